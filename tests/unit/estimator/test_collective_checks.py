"""Collectives of estimates next to those that XLA compiles: sums, groups, thresholds, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.estimator.compiling.checking import (
    FailedCheck,
    check_degrees,
    check_document,
    checks_note,
)
from tessera.estimator.compiling.collectives import collectives_of
from tessera.estimator.compiling.comparison import (
    CollectiveCheck,
    GroupKind,
    StepDegrees,
    compare_collectives,
    degrees_to_check,
    ring_bytes,
)
from tessera.estimator.compiling.compile import CompileRequest, compile_step
from tessera.estimator.compiling.compiled import Collective, CompiledStep, Memory, Uncompilable
from tessera.estimator.compiling.hlo import read_module
from tessera.estimator.graph import Graph, Layer, graph_of
from tessera.estimator.plans import Primitive
from tessera.estimator.tracing.models import steps
from tessera.estimator.tracing.trace import graph_of_step
from tessera.formulation.errors import DeadlineTooShort
from tessera.formulation.execution_plan import PlanStage

MODELS = "tessera.estimator.tracing.models.steps:"
TINY = {"hidden": 64, "layers": 2, "heads": 4, "vocabulary": 512, "sequence": 32, "dtype": "f32"}
DP2, TP2 = StepDegrees(dp=2, tp=1, zero=False), StepDegrees(dp=1, tp=2, zero=False)
BOTH = StepDegrees(dp=2, tp=2, zero=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def check_step(
    folder: Path, function: str, degrees: StepDegrees, **arguments: Any
) -> CollectiveCheck:
    check = check_degrees(
        graph_of_step(getattr(steps, function)(**arguments)),
        MODELS + function,
        arguments,
        degrees,
        lambda request: compile_step(request, folder),
    )
    assert isinstance(check, CollectiveCheck)
    return check


def ratios(check: CollectiveCheck) -> dict[GroupKind, float]:
    return {g.kind: g.compiled_bytes / g.estimated_bytes for g in check.groups}


def test_a_decoders_estimate_has_the_collectives_of_its_compiled_step(folder: Path) -> None:
    check = check_step(folder, "decoder", BOTH, **TINY)
    assert not check.differing
    assert ratios(check) == {
        GroupKind.TENSOR: pytest.approx(1.0, abs=0.01),
        GroupKind.DATA: pytest.approx(1.0, abs=0.001),  # and the loss; the tied table counts once
    }
    assert checks_note([check]) == "collectives at dp2 tp2 as compiled by XLA"


@pytest.mark.full
def test_gated_models_add_up_gradients_of_two_products_before_they_reduce_them(
    folder: Path,
) -> None:
    check = check_step(folder, "decoder", TP2, llama=1, **TINY)
    assert ratios(check)[GroupKind.TENSOR] == pytest.approx(1.0, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "degrees", "arguments", "within"),
    [
        ("decoder", DP2, TINY | {"experts": 4, "expert_group": 64}, 0.001),
        ("decoder", StepDegrees(dp=2, tp=2, zero=True), TINY | {"dtype": "bf16"}, 0.05),
        ("wide_resnet", DP2, {"base": 16, "width": 1, "side": 32, "classes": 16}, 0.03),
        ("vision", TP2, {"hidden": 64, "layers": 2, "heads": 4, "side": 64, "patch": 8}, 0.05),
        ("encoder_decoder", TP2, TINY, 0.05),
    ],
)
def test_estimates_of_all_families_are_near_their_compiled_steps(
    folder: Path, function: str, degrees: StepDegrees, arguments: dict[str, Any], within: float
) -> None:
    check = check_step(folder, function, degrees, **arguments)
    assert not check.differing
    for group in check.groups:
        if group.estimated_bytes:
            assert group.compiled_bytes == pytest.approx(group.estimated_bytes, rel=within)


@pytest.mark.full
def test_heads_that_do_not_divide_leave_attention_whole_which_the_check_reports(
    folder: Path,
) -> None:
    arguments: dict[str, Any] = TINY | {"heads": 5, "hidden": 80}
    assert graph_of_step(steps.decoder(**arguments)).tensor_limit.min() == 1  # no plan has it
    (tensor,) = check_step(folder, "decoder", TP2, **arguments).differing
    assert tensor.kind is GroupKind.TENSOR
    assert tensor.compiled_bytes < 0.8 * tensor.estimated_bytes


def test_a_failed_compilation_is_reported_and_not_noted() -> None:
    failed = check_degrees(
        a_graph(),
        MODELS + "perceptron",
        {},
        DP2,
        lambda request: compile_step(request, timeout_s=0.0),
    )
    assert isinstance(failed, FailedCheck)
    assert "took longer than 0 s" in failed.problem
    assert checks_note([failed]) == ""
    assert check_document(failed)["problem"] == failed.problem


def test_a_compilation_can_be_cancelled() -> None:
    with pytest.raises(DeadlineTooShort):
        compile_step(CompileRequest(target=MODELS + "perceptron"), cancelled=lambda: True)


def a_graph(**changed: float) -> Graph:
    fields: dict[str, Any] = {
        "kind": "k",
        "flops": 1.0,
        "touched": 1.0,
        "kernels": 1.0,
        "weights": 1000.0,
        "boundary": 10.0,
        "reduced": 10.0,
    }
    return graph_of("g", "f32", [Layer(**(fields | changed))])


def a_compiled_step(*collectives: Collective) -> CompiledStep:
    memory = Memory(arguments=1, outputs=1, aliased=0, temporaries=1)
    return CompiledStep(
        name="g",
        dp=2,
        tp=2,
        collectives=collectives,
        flops=1.0,
        bytes=1.0,
        memory=memory,
        versions={"jax": "1"},
    )


def a_collective(
    primitive: Primitive, payload: float, *groups: tuple[int, ...], times: int = 1
) -> Collective:
    return Collective(primitive=primitive, payload_bytes=payload, groups=groups, times=times)


TENSOR_GROUPS, DATA_GROUPS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def test_a_scatter_and_a_gather_equal_the_all_reduce_that_they_replace() -> None:
    # two samples of 10 scalars of 4 bytes, forward and backward; and half of 1,000 weights
    activation, gradients = 2 * 10 * 4.0, 1000 * 4 / 2
    check = compare_collectives(
        a_graph(),
        BOTH,
        a_compiled_step(
            a_collective(Primitive.ALL_REDUCE, activation, *TENSOR_GROUPS),
            a_collective(Primitive.REDUCE_SCATTER, activation, *TENSOR_GROUPS),
            a_collective(Primitive.ALL_GATHER, activation / 2, *TENSOR_GROUPS, times=2),
            a_collective(Primitive.ALL_REDUCE, gradients, *DATA_GROUPS),
        ),
    )
    assert [(g.kind, g.size, g.estimated_bytes, g.compiled_bytes) for g in check.groups] == [
        (GroupKind.TENSOR, 2, 2 * activation, 2 * activation),
        (GroupKind.DATA, 2, gradients, gradients),
    ]
    assert not check.differing


def test_a_difference_above_the_threshold_is_reported_with_both_numbers() -> None:
    check = compare_collectives(
        a_graph(),
        BOTH,
        a_compiled_step(
            a_collective(Primitive.ALL_REDUCE, 1.3 * 160.0, *TENSOR_GROUPS),
            a_collective(Primitive.ALL_REDUCE, 1.15 * 2000.0, *DATA_GROUPS),
        ),
    )
    (tensor,) = check.differing
    text = "tensor groups of 2: 160 B estimated, 208 B compiled (+30.0 %)"
    assert str(tensor) == text
    assert checks_note([check]) == f"collectives at dp2 tp2 differ: {text}"
    document = check_document(check)["groups"]
    assert [(g["group"], g["differs"]) for g in document] == [("tensor", True), ("data", False)]


def test_collectives_across_both_kinds_of_groups_are_shown_and_reported_if_large() -> None:
    right = (
        a_collective(Primitive.ALL_REDUCE, 160.0, *TENSOR_GROUPS),
        a_collective(Primitive.ALL_REDUCE, 2000.0, *DATA_GROUPS),
    )
    pairs = ((0, 0), (1, 2), (2, 1), (3, 3))
    for payload, differs in ((400.0, False), (500.0, True)):
        step = a_compiled_step(*right, a_collective(Primitive.SEND, payload, *pairs))
        check = compare_collectives(a_graph(), BOTH, step)
        mixed = check.groups[-1]
        assert (mixed.kind, mixed.compiled_bytes) == (GroupKind.MIXED, payload)
        assert check.differing == ((mixed,) if differs else ())


def test_only_gradients_are_compared_if_experts_are_divided_otherwise() -> None:
    graph = a_graph(experts=4.0, expert_weights=4000.0)
    gradients = (1000 / 2 + 4000 / 2) * 4.0
    step = a_compiled_step(
        a_collective(Primitive.ALL_REDUCE, 1e9, *TENSOR_GROUPS),
        a_collective(Primitive.ALL_REDUCE, gradients, *DATA_GROUPS),
    )
    check = compare_collectives(graph, BOTH, step)
    assert [g.kind for g in check.groups] == [GroupKind.DATA]
    assert "experts" in check.skipped
    assert not check.differing


def test_each_degree_of_a_plan_is_compiled_once_with_at_most_two_replicas() -> None:
    stages = [
        PlanStage(start=0, end=1, dp=8),
        PlanStage(start=1, end=2, dp=4, tp=2),
        PlanStage(start=2, end=3, dp=2, tp=2, sp=True),
        PlanStage(start=3, end=4),
    ]
    both = StepDegrees(dp=2, tp=2, zero=False)
    assert degrees_to_check(stages, 0) == [DP2, both]
    assert [d.zero for d in degrees_to_check(stages, 1)] == [True, True]
    assert not degrees_to_check([PlanStage(start=0, end=1)], 0)
    with pytest.raises(Uncompilable, match="ZeRO-3"):
        degrees_to_check(stages, 3)
    with pytest.raises(Uncompilable, match="cp"):
        degrees_to_check([PlanStage(start=0, end=1, cp=2)], 0)


@pytest.mark.parametrize(
    ("primitive", "times"),
    [
        (Primitive.ALL_REDUCE, 2 * 3 / 4),
        (Primitive.REDUCE_SCATTER, 3 / 4),
        (Primitive.ALL_GATHER, 3 / 4),
        (Primitive.ALL_TO_ALL, 3 / 4),
        (Primitive.SEND, 1.0),
    ],
)
def test_a_ring_sends_all_parts_but_the_own_one(primitive: Primitive, times: float) -> None:
    assert ring_bytes(primitive, 100.0, 4) == 100.0 * times


SUM = """HloModule m

%fused (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %both = f32[8]{0} add(%a, %b)
  ROOT %out = f32[8]{0} multiply(%both, %both)
}

%copied (c: f32[8], d: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  %d = f32[8]{0} parameter(1)
  ROOT %too = f32[8]{0} add(%d, %c)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %x = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%sum
  %y = f32[8]{0} all-reduce(%p), replica_groups=OTHER, to_apply=%sum
  %z = f32[8]{0} USE(%x)
  %f = f32[8]{0} fusion(%x, %y), kind=kLoop, calls=%fused
  %g = f32[8]{0} fusion(%y, %x), kind=kLoop, calls=%copied
  ROOT %r = f32[8]{0} subtract(%f, %g)
}
"""


def a_sum(other: str = "{{0,1}}", use: str = "bitcast") -> list[tuple[float, tuple[str, ...]]]:
    text = SUM.replace("OTHER", other).replace("USE", use).replace(", to_apply=%sum", "")
    collectives = collectives_of(read_module(text), 2)
    return [(c.payload_bytes, c.corrected) for c in collectives]


def test_all_reduces_that_are_only_added_up_count_once_even_if_the_addition_is_repeated() -> None:
    assert a_sum() == [(32.0, ("sum",))]


@pytest.mark.parametrize(("other", "use"), [("{{0},{1}}", "bitcast"), ("{{0,1}}", "negate")])
def test_all_reduces_with_other_groups_or_other_users_count_each(other: str, use: str) -> None:
    single = [(32.0, ())]
    assert a_sum(other, use) == (single if other != "{{0,1}}" else 2 * single)


def test_a_sum_of_three_counts_once() -> None:
    text = (
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        "  %t = (f32[8]{0}, f32[8]{0}, f32[8]{0}) all-reduce(%p, %p, %p), replica_groups={{0,1}}\n"
        "  %x = f32[8]{0} get-tuple-element(%t), index=0\n"
        "  %y = f32[8]{0} get-tuple-element(%t), index=1\n"
        "  %z = f32[8]{0} get-tuple-element(%t), index=2\n"
        "  %a = f32[8]{0} add(%x, %y)\n"
        "  %b = f32[8]{0} add(%a, %z)\n"
        "  ROOT %r = f32[8]{0} multiply(%b, %b)\n}\n"
    )
    (collective,) = collectives_of(read_module(text), 2)
    assert (collective.payload_bytes, collective.corrected) == (32.0, ("sum",))
