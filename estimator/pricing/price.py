"""Iteration time and memory of a given execution plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tessera.estimator.cells import Setting
from tessera.estimator.costs import drop_idle_degrees
from tessera.estimator.graph import Graph
from tessera.estimator.memory import (
    Overflow,
    host_state_bytes,
    largest_overflow,
    limit_bytes,
    place_states,
)
from tessera.estimator.pipeline import Pipelines, iteration_s
from tessera.estimator.plans import COST_COLUMNS, Candidates, StageCosts
from tessera.estimator.pricing.compute import plan_compute
from tessera.estimator.pricing.context import context_graph, context_training, exposed_ring_s
from tessera.estimator.pricing.flights import held_bytes
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import Demand
from tessera.formulation.base.tables import Floats
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
)

_DTYPES = {Precision.F32: "f32", Precision.BF16: "bf16", Precision.F16: "f16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """The predicted time and memory of an execution plan.

    ``memory_bytes`` has the bytes on the fullest GPU of each stage, for as many stages as the
    pipeline degree. ``overflow`` is the stage that exceeds the GPU's memory most, or None if the
    plan fits. ``host_bytes`` are the bytes of host memory that it needs on all nodes together.
    """

    plan: ExecutionPlan
    iter_time_s: float
    memory_bytes: tuple[float, ...]
    limit_bytes: float
    overflow: Overflow | None
    host_bytes: int = 0

    @property
    def demand(self) -> Demand:
        """Return what a job needs of nodes in all to run by the plan."""
        plan = self.plan
        return Demand(gpus=plan.gpus, cpus=plan.cpus, host_bytes=self.host_bytes)


def price_plan(setting: Setting, plan: ExecutionPlan) -> PlanPrice:
    """Return the price of a plan of a setting's own layers.

    The plan decides micro-batches, schedule, precision, recomputation, ZeRO and offload. Everything
    else is the setting's.

    Raises:
        InvalidInput: the plan is for other GPUs, layers or batches, or the model or the GPU type
            does not allow one of its degrees or switches; names the field of the plan.
    """
    costs = plan_costs(setting, plan)
    run, degree = plan_setting(setting, plan), plan.pipeline_degree
    seconds = float(plan_seconds(setting, plan, costs)[0])
    if not math.isfinite(seconds):
        raise InvalidInput("stages", f"cannot run in this setting: {plan}")
    parts = _memory_parts(run, plan, costs)
    needed = sum(parts.values(), np.full(degree, run.runtime.room.context_bytes))
    most = limit_bytes(run.hardware.memory_bytes, run.runtime.room)
    return PlanPrice(
        plan=plan,
        iter_time_s=seconds,
        memory_bytes=tuple(needed.tolist()),
        limit_bytes=most,
        overflow=largest_overflow(parts, needed, most),
        host_bytes=_host_bytes(run, plan),
    )


@lru_cache(maxsize=256)
def plan_costs(setting: Setting, plan: ExecutionPlan) -> StageCosts:
    """Return the costs of a plan's stages in order, each chunk for itself.

    Raises:
        InvalidInput: as for :func:`price_plan`.
    """
    _check_plan(setting, plan)
    return _stage_costs(plan_setting(setting, plan), plan)


def plan_seconds(setting: Setting, plan: ExecutionPlan, costs: StageCosts) -> Floats:
    """Return the iteration times at the costs of a plan's stages, shape (n,).

    Each column of ``costs`` has shape (n, stages), or that of one row.
    """
    degree, chunks = plan.pipeline_degree, plan.chunks

    def total(column: Floats) -> Floats:
        """Return the sums over the chunks of each stage, shape (n, degree)."""
        return np.asarray(column.reshape(-1, chunks, degree).sum(axis=1))

    pipelines = Pipelines(
        busy_s=total(costs.busy_s),
        send_s=total(costs.send_s) * (degree > 1),
        receive_s=total(costs.receive_s) * (degree > 1),
        backward_s=total(costs.backward_s),
        sync_s=total(costs.sync_s),
        update_s=total(costs.update_s),
    )
    return iteration_s(pipelines, plan.accumulation, setting.runtime.overlap, chunks)


def plan_setting(setting: Setting, plan: ExecutionPlan) -> Setting:
    """Return the setting with a plan's micro-batches and switches."""
    graph = setting.graph
    if plan.precision in _DTYPES:
        graph = graph_in(graph, _DTYPES[plan.precision])
    elif graph.dtype == "f32":
        graph = graph_in(graph, "bf16")  # fp8 is for products; the rest is in 16 bits
    training = replace(
        setting.training,
        global_batch=plan.global_batch,
        micro_batches=plan.accumulation,
        checkpointing=plan.recomputation is Recomputation.FULL,
        schedule=Schedule.GPIPE if plan.schedule is Schedule.GPIPE else Schedule.ONE_F_ONE_B,
    )
    states = place_states(setting.runtime.states, plan)
    return replace(
        setting,
        graph=graph,
        training=training,
        runtime=replace(setting.runtime, states=states),
        compute=plan_compute(setting.compute, setting.hardware, plan.precision),
    )


def _stage_costs(run: Setting, plan: ExecutionPlan) -> StageCosts:
    """Return the costs of all stages in order, each in the groups of its context degree."""
    run = replace(run, graph=_limited_by_heads(run.graph))
    columns: dict[str, Floats] = {}
    every = np.arange(len(plan.stages))
    degrees = np.array([stage.cp for stage in plan.stages])
    for cp in sorted(set(degrees.tolist())):
        rows = every[degrees == cp]
        costs = _context_costs(run, plan, [plan.stages[row] for row in rows], cp)
        for name in COST_COLUMNS:
            columns.setdefault(name, np.zeros(len(every)))[rows] = getattr(costs, name)
    return StageCosts(candidates=_candidates(run.graph, plan.stages), **columns)


@lru_cache(maxsize=64)
def _limited_by_heads(graph: Graph) -> Graph:
    """Return a graph whose tensor degrees may be up to the heads, for degrees that were checked.

    Its own limits only have the powers of two that divide the heads.
    """
    limit = np.where(graph.heads > 0, graph.heads, graph.tensor_limit)
    return replace(graph, tensor_limit=limit)


@lru_cache(maxsize=64)
def graph_in(graph: Graph, dtype: str) -> Graph:
    """Return the graph in another data type, the same one each time."""
    return graph if graph.dtype == dtype else replace(graph, dtype=dtype)


def _context_costs(
    run: Setting, plan: ExecutionPlan, stages: list[PlanStage], cp: int
) -> StageCosts:
    candidates = _candidates(run.graph, stages)
    within = replace(
        run,
        graph=context_graph(run.graph, cp) if cp > 1 else run.graph,
        training=context_training(run.training, cp),
    )
    costs = within.costs(candidates, plan.recomputation)
    if cp == 1:
        return costs
    ring_s = exposed_ring_s(
        within.graph,
        within.training,
        run.shape,
        candidates,
        plan_compute(run.compute, run.hardware),
        run.network,
        cp,
        2 - (plan.recomputation is Recomputation.NONE),
    )
    return replace(costs, comm_s=costs.comm_s + ring_s)


def _host_bytes(run: Setting, plan: ExecutionPlan) -> int:
    """Return the bytes of host memory that the states of all GPUs need, on all nodes together."""
    if plan.offload is Offload.NONE:
        return 0
    graph, candidates = run.graph, _candidates(run.graph, plan.stages)
    dense = _sums(graph.weights, candidates) / candidates.tp
    dense = dense + _sums(graph.shared_weights, candidates)
    experts = _sums(graph.expert_weights, candidates) / candidates.ep
    replicas = np.maximum(candidates.gpus // candidates.ep, 1)
    states, training = run.runtime.states, run.training
    each = host_state_bytes(graph, training, states, dense, candidates.dp)
    each = each + host_state_bytes(graph, training, states, experts, replicas)
    return math.ceil(float((each * candidates.gpus).sum()))


def _sums(column: Floats, candidates: Candidates) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(column)])
    return np.asarray(running[candidates.end] - running[candidates.start], dtype=np.float64)


def _candidates(graph: Graph, stages: Sequence[PlanStage]) -> Candidates:
    """Return stages as candidates, in which a context group counts as replicas."""
    rows = [(s.start, s.end, s.dp * s.cp, s.tp, s.ep, s.sp) for s in stages]
    start, end, dp, tp, ep, sp = np.array(rows, dtype=np.int64).T
    return drop_idle_degrees(
        graph, Candidates(start=start, end=end, dp=dp, tp=tp, ep=ep, sp=sp.astype(bool))
    )


def _memory_parts(run: Setting, plan: ExecutionPlan, costs: StageCosts) -> dict[str, Floats]:
    """Return the parts of each stage's bytes by their names, each of shape (stages,).

    Chunks are not computed at the same time, but the buffers for their gradients are.
    """
    degree, chunks = plan.pipeline_degree, plan.chunks

    def by_chunk(column: Floats) -> Floats:
        return column.reshape(chunks, degree)

    working = by_chunk(costs.working_bytes)
    if chunks > 1:
        copies = replace(run.runtime.copies, gradients=0.0)
        without = replace(run, runtime=replace(run.runtime, copies=copies))
        bare = by_chunk(_stage_costs(without, plan).working_bytes)
        working = bare.max(axis=0, keepdims=True) + (working - bare).sum(axis=0, keepdims=True)
    return {
        "states": by_chunk(costs.state_bytes).sum(axis=0),
        "activations in flight": held_bytes(
            plan.schedule, by_chunk(costs.flight_bytes), plan.accumulation
        ),
        "working activations": working[0],
    }


def _check_plan(setting: Setting, plan: ExecutionPlan) -> None:
    graph, shape = setting.graph, setting.shape
    if plan.gpus != shape.gpus:
        raise InvalidInput("stages", f"have {plan.gpus} GPUs, but there are {shape.gpus}")
    if plan.shape and plan.shape != shape.each_node:
        there = "+".join(map(str, shape.each_node))
        stated = "+".join(map(str, plan.shape))
        raise InvalidInput(
            "shape", f"is {stated} GPUs, but the GPUs are on nodes of {there}; leave it out"
        )
    if plan.layers != len(graph):
        raise InvalidInput(
            "stages", f"end at layer {plan.layers}, but the model has {len(graph)} layers"
        )
    if plan.global_batch != setting.training.global_batch:
        raise InvalidInput(
            "micro_batch",
            f"x accumulation is {plan.global_batch} samples, but the global batch is"
            f" {setting.training.global_batch}; make them equal",
        )
    _check_operators(setting, plan)
    for index, stage in enumerate(plan.stages):
        check_degrees(graph, stage, f"stages[{index}].")


def _check_operators(setting: Setting, plan: ExecutionPlan) -> None:
    """Refuse switches that need attention's operators or a GPU's fp8 where they are not known."""
    wants = {
        "recomputation": plan.recomputation is Recomputation.SELECTIVE,
        "cp": any(stage.cp > 1 for stage in plan.stages),
        "precision": plan.precision is Precision.FP8,
    }
    if not setting.graph.attention_flops.any():
        for field, wanted in wants.items():
            if wanted:
                raise InvalidInput(
                    field,
                    f"cannot be priced for {setting.graph.name}, because its graph does not say which"
                    " operators are attention; describe the model with --model, --architecture or"
                    " --hf, or leave this out",
                )
    if wants["precision"] and setting.hardware.fp8_flops is None:
        raise InvalidInput(
            "precision",
            f"of fp8 is not possible on {setting.hardware.name}, which has no products in fp8 (or its"
            " entry lacks flops.fp8); use bf16",
        )


def check_degrees(graph: Graph, stage: PlanStage, prefix: str = "") -> None:
    """Refuse degrees that a stage's layers do not allow.

    Raises:
        InvalidInput: names the field with ``prefix`` before it.
    """
    rows = slice(stage.start, stage.end)
    heads = {int(n) for n in graph.heads[rows] if n}
    for count in heads:
        if count % stage.tp:
            raise InvalidInput(
                f"{prefix}tp",
                f"is {stage.tp}, but must divide the {count} attention heads (of keys and values)",
            )
    limit = int(graph.tensor_limit[rows].min())
    if not heads and stage.tp > limit:
        raise InvalidInput(f"{prefix}tp", f"is {stage.tp}, but the layers allow at most {limit}")
    for count in {int(n) for n in graph.experts[rows]}:
        if max(count, 1) % stage.ep and count > 1:
            raise InvalidInput(f"{prefix}ep", f"is {stage.ep}, but must divide the {count} experts")
    if stage.ep > 1 and not (graph.experts > 1).any():
        raise InvalidInput(f"{prefix}ep", f"is {stage.ep}, but the model has no experts")
