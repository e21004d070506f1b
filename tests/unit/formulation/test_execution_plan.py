"""Execution plans: what can be launched, one JSON, one digest, one text, and their nodes."""

from __future__ import annotations

import ast
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    InvalidPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
    check_fits,
    read_execution_plan,
)
from tessera.formulation.job.submeshes import refuse_nodes, slice_nodes
from tests.support.execution_plans import execution_plans
from tests.support.laws import examples

GPT = Workload(model="gpt", params="1.3B", global_batch=128)


def even_plan(count: int = 2, **changes: Any) -> ExecutionPlan:
    """Return a plan of equal stages of 12 layers, each on 8 GPUs."""
    parts = (PlanStage(start=12 * i, end=12 * (i + 1), dp=4, tp=2) for i in range(count))
    plan = ExecutionPlan(stages=tuple(parts), micro_batch=16, accumulation=8)
    return replace(plan, **changes)


@given(execution_plans())
def test_the_json_of_a_plan_gives_the_plan_again(plan: ExecutionPlan) -> None:
    assert read_execution_plan("plan", plan.to_json()) == plan


@given(execution_plans(), execution_plans())
def test_plans_have_one_digest_only_if_they_are_equal(a: ExecutionPlan, b: ExecutionPlan) -> None:
    assert (a.digest == b.digest) == (a == b)


@given(execution_plans())
def test_fields_in_another_order_or_stated_defaults_change_nothing(plan: ExecutionPlan) -> None:
    plain = {"precision": "bf16", "chunks": 1} | json.loads(plan.to_json())
    text = json.dumps(dict(reversed(plain.items())), indent=2)
    assert read_execution_plan("plan", text).digest == plan.digest


def test_the_digest_of_a_plan_never_changes() -> None:
    # Stored plans are named by it. A field that is added later must have a default.
    plan = even_plan(zero=ZeroStage.OPTIMIZER, shape=(8, 8))
    assert plan.digest == "192b46f0fef095b942ca765925cc4fc22e371f4e7231b3a80bf44911bc3ce855"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            even_plan(accumulation=1, zero=ZeroStage.OPTIMIZER),
            "2 x (dp4 tp2), 1F1B, ZeRO-1, micro-batch 4",
        ),
        (even_plan(1), "dp4 tp2, micro-batch 4 x 8"),
        (
            ExecutionPlan(
                stages=(
                    PlanStage(start=0, end=3, dp=4, tp=2, sp=True),
                    PlanStage(start=3, end=5, dp=8),
                    PlanStage(start=5, end=9, dp=8),
                ),
                micro_batch=16,
                schedule=Schedule.GPIPE,
            ),
            "(dp4 tp2 sp) + 2 x dp8, GPipe, micro-batch 16 in all",
        ),
        (
            even_plan(
                4,
                schedule=Schedule.INTERLEAVED,
                chunks=2,
                recomputation=Recomputation.SELECTIVE,
                precision=Precision.FP8,
            ),
            "2 x (dp4 tp2), interleaved 1F1B with 2 chunks, selective recomputation, fp8,"
            " micro-batch 4 x 8",
        ),
        (
            ExecutionPlan(
                stages=(PlanStage(start=0, end=1),),
                micro_batch=1,
                zero=ZeroStage.PARAMETERS,
                offload=Offload.PARAMETERS,
            ),
            "dp1, ZeRO-3, parameters offload, micro-batch 1",
        ),
    ],
)
def test_a_plan_reads_as_people_write_it(plan: ExecutionPlan, text: str) -> None:
    assert str(plan) == text


def test_the_chunks_of_an_interleaved_plan_share_their_gpus() -> None:
    plan = even_plan(4, schedule=Schedule.INTERLEAVED, chunks=2)
    assert (plan.pipeline_degree, plan.gpus, plan.layers) == (2, 16, 48)


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"stages": ()}, "stages", "at least one stage"),
        ({"micro_batch": 6}, "micro_batch", "divided equally among the 4 replicas"),
        ({"micro_batch": 0}, "micro_batch", "whole number from 1"),
        ({"accumulation": True}, "accumulation", "whole number from 1"),
        ({"shape": (8, 4)}, "shape", "12 GPUs, but the stages have 16"),
        ({"shape": (4, 12)}, "shape", "the most GPUs first"),
        ({"chunks": 2}, "chunks", "unless the schedule is interleaved"),
        ({"schedule": Schedule.INTERLEAVED}, "chunks", "at least 2"),
        ({"schedule": Schedule.INTERLEAVED, "chunks": 3}, "chunks", "divide the 2 stages"),
        ({"offload": Offload.PARAMETERS}, "offload", "ZeRO stage 3"),
        ({"model": "x" * 201}, "model", "200 characters"),
        ({"schedule": "2f2b"}, "schedule", "must be one of gpipe, 1f1b, interleaved"),
    ],
)
def test_a_plan_that_could_not_be_launched_is_refused(
    change: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InvalidPlan, match=said) as refused:
        even_plan(**change)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"start": 2, "end": 2}, "a stage has layers"),
        ({"start": 0, "end": 2, "dp": 4, "ep": 3}, "must divide the stage's 4 GPUs"),
        ({"start": 0, "end": 2, "sp": True}, "needs a tensor-parallel degree"),
        ({"start": -1, "end": 2}, "from 0 to"),
        ({"start": 0, "end": 2, "tp": 2**31}, "from 1 to"),
    ],
)
def test_an_impossible_stage_is_refused(stage: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidPlan, match=said):
        PlanStage(**stage)


CHUNKS = (PlanStage(start=0, end=1, dp=2), PlanStage(start=1, end=2, tp=2))
INTERLEAVED: dict[str, Any] = {"schedule": Schedule.INTERLEAVED, "chunks": 2}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: plan_from(0, 13), "misses layer 12"),
        (lambda: plan_from(0, 11), "repeats layer 11"),
        (
            lambda: ExecutionPlan(stages=CHUNKS, micro_batch=2, accumulation=2, **INTERLEAVED),
            r"parallelism of stages\[0\]",
        ),
        (
            lambda: even_plan(4, accumulation=3, **INTERLEAVED),
            "multiple of the pipeline degree 2",
        ),
        (
            lambda: check_fits(even_plan(model="bert/1.3B"), "plan", GPT),
            "made for the model bert/1.3B, not for gpt/1.3B",
        ),
        (
            lambda: check_fits(even_plan(accumulation=4), "plan", GPT),
            "64 an iteration, but the workload's global batch is 128",
        ),
        (lambda: check_fits(even_plan(), "plan", GPT, gpus=8), "is for 16 GPUs, not for 8"),
        (
            lambda: check_fits(even_plan(), "plan", GPT, layers=26),
            "ends at layer 24, but the model gpt/1.3B has 26",
        ),
    ],
)
def test_stages_that_do_not_match_each_other_or_the_workload_are_refused(
    make: Callable[[], object], said: str
) -> None:
    check_fits(even_plan(model="gpt/1.3B"), "plan", GPT, gpus=16, layers=24)
    with pytest.raises((InvalidInput, InvalidPlan), match=said):
        make()


def plan_from(*starts: int) -> ExecutionPlan:
    """Return a plan whose stages have 12 layers from these."""
    stages = tuple(PlanStage(start=s, end=s + 12, dp=4) for s in starts)
    return ExecutionPlan(stages=stages, micro_batch=4)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{}", "plan.stages"),
        ("[]", "plan"),
        ("nonsense", "plan"),
        ('{"stages":{},"micro_batch":1}', "plan.stages"),
        ('{"stages":[1],"micro_batch":1}', "plan.stages[0]"),
        ('{"stages":[{"start":0}],"micro_batch":1}', "plan.stages[0].end"),
        ('{"stages":[{"start":0,"end":1}]}', "plan.micro_batch"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1.5}', "plan.micro_batch"),
        ('{"stages":[{"start":0,"end":1,"pp":2}],"micro_batch":1}', "plan.stages[0].pp"),
        ('{"stages":[{"start":0,"end":1,"dp":"2"}],"micro_batch":1}', "plan.stages[0].dp"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1,"zero":true}', "plan.zero"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1,"schedule":"2f2b"}', "plan.schedule"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1,"shape":[[1]]}', "plan.shape[0]"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1,"model":1}', "plan.model"),
        ('{"stages":[{"start":0,"end":1}],"micro_batch":1,"lr":1}', "plan.lr"),
    ],
)
def test_bad_json_is_refused_with_the_name_of_the_field(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_execution_plan("plan", text)
    assert refused.value.field == field


def fill(sizes: list[int], nodes: int, node_gpus: int) -> bool:
    """Return whether GPUs handed out one by one, largest stage first, never cross a node's end."""
    free = [(node, gpu) for node in range(nodes) for gpu in range(node_gpus)]
    for size in sorted(sizes, reverse=True):
        mine, free = free[:size], free[size:]
        per_node = [sum(node == k for node, _ in mine) for k in {node for node, _ in mine}]
        is_part = len(per_node) == 1
        if len(mine) < size or not (is_part or set(per_node) == {node_gpus}):
            return False
    return not free


@examples(500)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_stages_fit_exactly_if_the_procedure_ends(
    sizes: list[int], nodes: int, node_gpus: int
) -> None:
    shapes = slice_nodes(sizes, nodes, node_gpus)
    assert (shapes is not None) == fill(sizes, nodes, node_gpus)
    if shapes is not None:
        assert [hosts * devices for hosts, devices in shapes] == sizes
        assert all(hosts == 1 or devices == node_gpus for hosts, devices in shapes)


class Mesh:
    """A mesh of equal hosts, as Alpa's procedure needs it."""

    def __init__(self, hosts: int, devices: int) -> None:
        self.num_hosts, self.num_devices_per_host = hosts, devices
        self.num_devices = hosts * devices

    def slice_2d(self, *_indices: Any) -> str:
        return "part"


def load_procedure(wheel: str) -> Callable[[Mesh, list[tuple[int, int]]], object]:
    """Return Alpa's own procedure, which needs nothing of Alpa but its text."""
    with zipfile.ZipFile(wheel) as files:
        tree = ast.parse(files.read("alpa/pipeline_parallel/stage_construction.py"))
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "get_sliced_virtual_submeshes"
    ]
    names: dict[str, Any] = {"np": np}
    exec(compile(tree, wheel, "exec"), names)
    procedure: Callable[[Mesh, list[tuple[int, int]]], object] = names[
        "get_sliced_virtual_submeshes"
    ]
    return procedure


@pytest.mark.skipif(
    "TESSERA_ALPA_WHEEL" not in os.environ,
    reason="TESSERA_ALPA_WHEEL names no wheel of Alpa (pip download alpa==0.2.3 --no-deps)",
)
@examples(500)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_alpas_own_procedure_agrees(sizes: list[int], nodes: int, node_gpus: int) -> None:
    procedure = load_procedure(os.environ["TESSERA_ALPA_WHEEL"])
    shapes = [(1, size) if size < node_gpus else (size // node_gpus, node_gpus) for size in sizes]
    divides = all(size < node_gpus or size % node_gpus == 0 for size in sizes)
    try:
        procedure(Mesh(nodes, node_gpus), shapes)
    except AssertionError:
        assert slice_nodes(sizes, nodes, node_gpus) is None
    else:
        assert (slice_nodes(sizes, nodes, node_gpus) is not None) == divides


@examples(200)
@given(st.data())
def test_powers_of_two_always_fit(data: st.DataObject) -> None:
    node_gpus, nodes = 2 ** data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    left, sizes = nodes * node_gpus, []
    while left:
        whole = [node_gpus * k for k in range(1, left // node_gpus + 1)]
        parts = [2**k for k in range(4) if 2**k < node_gpus and 2**k <= left]
        sizes.append(data.draw(st.sampled_from([*whole, *parts])))
        left -= sizes[-1]
    assert slice_nodes(sizes, nodes, node_gpus) is not None


@pytest.mark.parametrize(
    ("sizes", "shape", "problem"),
    [
        ([4, 4], (4, 4), ""),
        ([3, 1], (4,), ""),
        ([3, 3, 1, 1], (4, 4), "stages of 3, 3, 1, 1 GPUs on 2 nodes of 4"),
        ([6, 2], (4, 4), "whole nodes or a part of one"),
        ([2, 2], (3, 1), "different numbers of GPUs"),
    ],
)
def test_a_refusal_says_what_does_not_fit(
    sizes: list[int], shape: tuple[int, ...], problem: str
) -> None:
    assert (refuse_nodes(sizes, shape) == "") == (problem == "")
    assert problem in refuse_nodes(sizes, shape)
