"""The execution plans that a job's program tries at launch, around the plan of its Cell.

Everything but the division stays as in that plan: micro-batches, schedule, ZeRO, recomputation,
offload, precision, and the number of pipeline stages. So the winner is always a plan of the same
Cell, in the full space, too. The spaces are those of :mod:`tessera.estimator.planning.tuning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import CoarseGraph, Setting, coarse_for
from tessera.estimator.costs import candidates_of
from tessera.estimator.graph import join_layers
from tessera.estimator.planning.labels import Criteria, complete_labels, rest_of
from tessera.estimator.planning.options import options_of, stages_at
from tessera.estimator.planning.pareto import comm_each, find_frontier
from tessera.estimator.planning.search import latency_of
from tessera.estimator.planning.tuning import SearchSpace, arena_rules, crius_halves, whole_space
from tessera.estimator.plans import StageCosts, shape_on
from tessera.estimator.pricing.price import plan_setting, price_plan
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Cell
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage, join_chunks
from tessera.formulation.job.launch import TuningSpace
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.records.estimates import EstimateRecord, TuningRecord

MAX_TUNING_PLANS: Final = 200
"""Largest number of plans of a space that are tried, those with the best estimates. A budget of ten
minutes is rarely enough for more."""

MAX_COUNT: Final = 2**62
"""Largest number of plans of a space that is stored. Larger spaces count as this one."""

_WIDTH: Final = 2_000
"""Number of partial plans kept after each stage, while the best plans of a large space are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlans:
    """The plans to try, the one with the best estimate first.

    ``space_plans`` is the number of all plans of the space that fit into memory, of which ``plans``
    are at most :data:`MAX_TUNING_PLANS`. ``whole_plans`` is that of the full space. Both count
    plans that the runtime refuses, too.
    """

    plans: tuple[ExecutionPlan, ...]
    space_plans: int
    whole_plans: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Surroundings:
    """The setting of a plan in coarse layers, with the full space of its number of stages.

    ``rows`` are the plan itself, as rows of the candidates.
    """

    run: Setting
    coarse: CoarseGraph
    costs: StageCosts
    whole: SearchSpace
    rows: tuple[int, ...]


def record_tunings(
    estimator: Estimator,
    record: EstimateRecord,
    tunings: Iterable[tuple[str, TuningSpace]],
    exhausted: Collection[Cell] = (),
) -> list[TuningRecord]:
    """Return the plans to try around the plan of an estimate, for each of some runtimes and spaces.

    Runtimes that cannot run that plan are left out, and so are spaces in which there is no other
    one. ``exhausted`` are Cells on shapes by plans that ran out of memory here.
    """
    cell, plan = record.cell, record.plan
    if plan is None or not math.isfinite(record.iter_time_s):
        return []
    shape = shape_on(cell.gpus, cell.nodes, estimator.hardware[cell.gpu_type].gpus_per_node)
    if shape is None:
        return []
    setting = estimator.setting(record.workload, cell.gpu_type, shape)
    names = {c.plan for c in exhausted if (c.gpu_type, c.nodes) == (cell.gpu_type, cell.nodes)}
    records = []
    for runtime, space in tunings:
        if RUNTIMES[runtime].refuse_plan(plan):
            continue
        found = list_tuning_plans(setting, plan, runtime, space, names)
        if found is None or not set(found.plans) - {plan}:
            continue
        records.append(
            TuningRecord(
                workload=record.workload,
                gpu_type=cell.gpu_type,
                plan=plan,
                runtime=runtime,
                space=space,
                plans=found.plans,
                space_plans=found.space_plans,
                whole_plans=found.whole_plans,
            )
        )
    return records


def list_tuning_plans(
    setting: Setting,
    plan: ExecutionPlan,
    runtime: str,
    space: TuningSpace,
    exhausted: Collection[str] = (),
    most: int = MAX_TUNING_PLANS,
    cancelled: Callable[[], bool] = never_cancelled,
) -> TuningPlans | None:
    """Return the plans of a space around ``plan`` that a runtime can run and that fit into memory.

    The result is None if the plan has no such space: it has context parallelism, or its stages have
    numbers of GPUs that are no powers of two. Around a plan with chunks, plans without them are
    tried, and the plan itself. ``exhausted`` are digests of plans that ran out of memory here. Cuts
    are at the coarse layers of the planner and at those of the plan.

    Raises:
        DeadlineTooShort: it was cancelled.
    """
    joined_plan = join_chunks(plan)
    around = _surroundings(setting, joined_plan, cancelled)
    if around is None:
        return None
    chosen = _SPACES[space](around)
    refuse_plan = RUNTIMES[runtime].refuse_plan
    plans: list[tuple[float, str, ExecutionPlan]] = []
    if plan.chunks > 1 and not refuse_plan(plan) and plan.digest not in exhausted:
        plans.append((price_plan(setting, plan).iter_time_s, plan.digest, plan))
    for rows in _best_rows(around, chosen, 2 * most, cancelled):
        if len(plans) >= most:
            break
        found = _plan_of(around, joined_plan, rows)
        if refuse_plan(found) or found.digest in exhausted:
            continue
        try:
            price = price_plan(setting, found)
        except InvalidInput:  # the model's own layers do not allow the division
            continue
        if price.overflow is None:
            plans.append((price.iter_time_s, found.digest, found))
    return TuningPlans(
        plans=tuple(found for _, _, found in sorted(plans, key=lambda entry: entry[:2])),
        space_plans=min(chosen.count + (plan.chunks > 1), MAX_COUNT),
        whole_plans=min(around.whole.count + (plan.chunks > 1), MAX_COUNT),
    )


def _surroundings(
    setting: Setting, plan: ExecutionPlan, cancelled: Callable[[], bool]
) -> _Surroundings | None:
    if any(stage.cp > 1 for stage in plan.stages):
        return None
    coarse = _coarse_around(setting, plan, cancelled)
    run = replace(plan_setting(setting, plan), graph=coarse.graph)
    sequence_parallel = any(stage.sp for stage in plan.stages)
    candidates = candidates_of(run.graph, run.shape, sequence_parallel=sequence_parallel)
    costs = run.costs(candidates)
    depths = np.where(plan.micro_batch % candidates.dp == 0, run.depths(costs), 0)
    options = options_of(candidates, depths)
    rows = [
        _row_of(costs, coarse.coarse_stage(stage)) for stage in plan.stages
    ]  # -1 where the candidates lack it
    if not np.isin(rows, options.source).all():
        return None
    return _Surroundings(
        run=run,
        coarse=coarse,
        costs=costs,
        whole=whole_space(candidates, plan.gpus, plan.pipeline_degree, depths),
        rows=tuple(rows),
    )


def _coarse_around(
    setting: Setting, plan: ExecutionPlan, cancelled: Callable[[], bool]
) -> CoarseGraph:
    """Return the coarse graph of the planner, with more cuts where the plan has its own."""
    coarse = coarse_for(setting.graph, plan.pipeline_degree, cancelled)
    ends = np.union1d(coarse.ends, [stage.end for stage in plan.stages]).astype(np.int64)
    if len(ends) == len(coarse.ends):
        return coarse
    return CoarseGraph(graph=join_layers(setting.graph, ends), ends=ends)


def _row_of(costs: StageCosts, stage: PlanStage) -> int:
    """Return the candidate that is a stage of coarse layers, or -1."""
    c = costs.candidates
    same = (c.start == stage.start) & (c.end == stage.end) & (c.dp == stage.dp)
    same &= (c.tp == stage.tp) & (c.ep == stage.ep) & (c.sp == stage.sp)
    rows = np.flatnonzero(same)
    return int(rows[0]) if len(rows) else -1


def _halves(around: _Surroundings) -> SearchSpace:
    return crius_halves(around.whole, around.rows)


def _arena(around: _Surroundings) -> SearchSpace:
    run, whole = around.run, around.whole
    count = run.training.micro_batches
    load_s, comm_s = _load_s(run), comm_each(around.costs, count)
    frontier = find_frontier(whole.options, load_s, comm_s, whole.gpus, whole.stages, count)
    return arena_rules(whole, [ranked.rows for ranked in frontier.plans], load_s)


def _load_s(run: Setting) -> Floats:
    """Return the seconds of each layer on one GPU, its load in Arena's planner, shape (L,)."""
    training, single = run.training, np.ones(1, dtype=np.int64)
    forward_s, backward_s = run.compute.layer_s(
        run.graph, training, np.full(1, float(training.micro_batch)), single
    )
    load_s: Floats = (training.forwards * forward_s + backward_s)[0]
    return load_s


_SPACES: Final[dict[TuningSpace, Callable[[_Surroundings], SearchSpace]]] = {
    TuningSpace.HALVES: _halves,
    TuningSpace.ARENA: _arena,
    TuningSpace.FULL: lambda around: around.whole,
}


def _best_rows(
    around: _Surroundings, space: SearchSpace, most: int, cancelled: Callable[[], bool]
) -> list[tuple[int, ...]]:
    """Return the plans of a space with the least predicted times, as rows, the best first.

    Up to :data:`_WIDTH` partial plans are kept after each stage, those whose rest may be fastest.
    """
    options, stages, gpus = space.options, space.stages, space.gpus
    if not len(options):
        return []
    latency = latency_of(
        around.costs, around.run.training.micro_batches, around.run.runtime.overlap
    )
    criteria = Criteria(
        added=latency.added_s[None, options.source], worst=latency.worst_s[:, options.source]
    )
    rest = rest_of(options, criteria, stages, gpus, cancelled)
    if not np.isfinite(rest.added[0, stages, 0, gpus]):
        return []

    def judge(added: Floats, worst: Floats) -> Floats:
        bound: Floats = added[0] + latency.weight @ worst
        return bound

    labels, _ = complete_labels(
        options, criteria, rest, stages, gpus, judge, _WIDTH, cancelled, keeps_dominated=True
    )
    plans = [tuple(rows) for rows in options.source[labels.rows].T.tolist()]
    return sorted(plans, key=lambda rows: (latency.of(rows), rows))[:most]


def _plan_of(around: _Surroundings, plan: ExecutionPlan, rows: tuple[int, ...]) -> ExecutionPlan:
    stages = stages_at(around.costs.candidates, np.array(rows, dtype=np.int64))
    return replace(plan, stages=tuple(map(around.coarse.fine_stage, stages)))
