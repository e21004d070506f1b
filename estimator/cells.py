"""The best execution plan of a job for each GPU count, GPU type and pipeline degree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np

from tessera.estimator.collectives.links import LinkNetwork
from tessera.estimator.costs import StageTerms, candidates_of
from tessera.estimator.graph import Graph, join_layers, merged_ends
from tessera.estimator.hardware import Hardware
from tessera.estimator.memory import MemoryCopies, States, UsableMemory
from tessera.estimator.pipeline import DEFAULT_OVERLAP, Overlap
from tessera.estimator.planning.assembly import assembled_plan
from tessera.estimator.planning.options import NoPlan, StageOptions, options_of, stage_depths
from tessera.estimator.planning.pareto import comm_each, find_frontier
from tessera.estimator.planning.search import PlanSearchResult, best_plans, latency_of, plan_of
from tessera.estimator.planning.stages import Stages, least_cut
from tessera.estimator.plans import (
    Candidates,
    Compute,
    Network,
    PricedPlan,
    Shape,
    StageCosts,
    Training,
    powers_of_two,
)
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)

COARSE_LAYERS = 16
"""Largest number of layers for planning. Neighbouring layers are merged until this many are left
(the Arena artifact; Alpa, section 5)."""


class MicroBatches(StrEnum):
    """Rules for the number of micro-batches of a plan, if it is not a given number."""

    STAGES = "stages"  # the number of stages (Arena)
    FOUR_STAGES = "4-stages"  # four times the number of stages (Crius, section 5.1, after GPipe)
    SEARCHED = "searched"  # the best power of two, except those that would leave stages empty


class Planner(StrEnum):
    """Planners that choose the plan of a pipeline degree. All respect the memory limit."""

    # The plan of least latency under the cost model (planning/search.py).
    EXACT = "exact"
    # The proxy plan: the least computation bias, then the least communication (Arena, section 3.3).
    ARENA = "arena"
    # The least communication across cuts. Each stage is data or tensor parallel (Crius, sections
    # 4.2 and 5.1).
    CRIUS = "crius"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The runtime that executes plans, as far as their time and memory depend on it."""

    overlap: Overlap = DEFAULT_OVERLAP
    planned_as: Overlap | None = None
    """The overlap that the runtime's search assumes when it chooses a plan. If it is None, the search
    assumes the real overlap."""
    states: States = field(default_factory=States)
    room: UsableMemory = field(default_factory=UsableMemory)
    copies: MemoryCopies = field(default_factory=MemoryCopies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """A job on GPUs of one type, with all that its Cells there depend on.

    ``graph`` may already be coarse. ``timed`` means that ``compute`` was measured on such a GPU. A
    correction of kernels that was learned from other jobs then does not apply.
    """

    graph: Graph
    training: Training
    hardware: Hardware
    shape: Shape
    compute: Compute
    network: Network
    runtime: Runtime = field(default_factory=Runtime)
    timed: bool = False

    def costs(
        self, candidates: Candidates, recomputation: Recomputation | None = None
    ) -> StageCosts:
        """Return the costs of candidate stages in this setting.

        ``recomputation`` is the training's if it is None.
        """
        runtime = self.runtime
        return self.terms(candidates).costs(
            runtime.states, recomputation or self.training.recomputation, runtime.copies
        )

    def terms(self, candidates: Candidates, micro_batch: int | Ints | None = None) -> StageTerms:
        """Return the terms of the costs of candidate stages in this setting.

        ``micro_batch`` is that of the training if it is None.
        """
        return StageTerms(
            self.graph,
            self.training,
            self.hardware,
            self.shape,
            candidates,
            self.compute,
            self.network,
            self.training.micro_batch if micro_batch is None else micro_batch,
        )

    def depths(self, costs: StageCosts) -> Ints:
        """Return the places where candidate stages fit, as in :mod:`tessera.estimator.planning.options`."""
        training = self.training
        return stage_depths(
            costs,
            self.hardware.memory_bytes,
            training.micro_batches,
            training.schedule,
            self.runtime.room,
        )


def data_sheet_setting(
    graph: Graph,
    training: Training,
    hardware: Hardware,
    shape: Shape,
    states: States,
    copies: MemoryCopies | None = None,
) -> Setting:
    """Return the setting of a job on GPUs that are known only from their data sheets.

    ``copies`` are those of the runtime. If it is None, they are PyTorch's.
    """
    return Setting(
        graph=graph,
        training=training,
        hardware=hardware,
        shape=shape,
        compute=RooflineCompute(hardware=hardware),
        network=LinkNetwork(hardware=hardware, shape=shape),
        runtime=Runtime(states=states, copies=copies or MemoryCopies()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoarseGraph:
    """A graph whose neighbouring layers are joined. ``ends`` are those of the original layers."""

    graph: Graph
    ends: Ints

    def fine_stage(self, stage: PlanStage) -> PlanStage:
        """Return a stage of coarse layers as one of the original layers."""
        start = int(self.ends[stage.start - 1]) if stage.start else 0
        return replace(stage, start=start, end=int(self.ends[stage.end - 1]))

    def coarse_stage(self, stage: PlanStage) -> PlanStage:
        """Return a stage of the original layers, whose ends are among these, as one of coarse ones."""
        start, end = np.searchsorted(self.ends, [stage.start, stage.end]).tolist()
        return replace(stage, start=start + 1 if stage.start else 0, end=end + 1)


@lru_cache(maxsize=64)
def _coarse_graph_cache(graph: Graph, most: int) -> list[CoarseGraph]:
    """Return the cache entry for the graph in ``most`` layers, a list that is empty at first.

    The coarse graph of a job is the same on all GPU types.
    """
    return []


def coarsen_graph(
    graph: Graph, most: int, cancelled: Callable[[], bool] = never_cancelled
) -> CoarseGraph:
    """Return :func:`tessera.estimator.graph.merge_layers` of the graph, computed once for each graph."""
    entry = _coarse_graph_cache(graph, most)
    if not entry:
        ends = merged_ends(graph, most, cancelled)
        entry.append(CoarseGraph(graph=join_layers(graph, ends), ends=ends))
    return entry[0]


def coarse_for(
    graph: Graph, stages: int, cancelled: Callable[[], bool] = never_cancelled
) -> CoarseGraph:
    """Return the graph in :data:`COARSE_LAYERS` layers, or one for each stage if that is more."""
    return coarsen_graph(graph, max(COARSE_LAYERS, stages), cancelled)


def degrees_of(gpus: int) -> list[int]:
    """Return the usual pipeline degrees 1, 2, 4 ..., up to the number of GPUs and of coarse layers.

    Deeper pipelines need finer layers, whose plans take minutes to search. They must be requested
    by their number.
    """
    return powers_of_two(min(gpus, COARSE_LAYERS))


def plan_cells(
    setting: Setting,
    degrees: Iterable[int] | None = None,
    micro_batches: MicroBatches | None = None,
    planner: Planner = Planner.EXACT,
    cancelled: Callable[[], bool] = never_cancelled,
) -> dict[int, PricedPlan]:
    """Return the planner's plan of each pipeline degree. A degree without a plan is absent.

    If ``degrees`` is None, the degrees are those of :func:`degrees_of`. If ``micro_batches`` is
    None, their number is that of the training.

    Raises:
        InvalidInput: a degree is below 1.
        DeadlineTooShort: it was cancelled.
    """
    wanted = sorted(set(degrees_of(setting.shape.gpus) if degrees is None else degrees))
    if wanted and wanted[0] < 1:
        raise InvalidInput("degrees", f"must be at least 1, not {wanted[0]}")
    coarse = coarse_for(setting.graph, wanted[-1] if wanted else 1, cancelled)
    best: dict[int, PricedPlan] = {}
    for count, some in degrees_by_micro_batches(wanted, setting.training, micro_batches).items():
        training = setting.training.within(count)
        within = replace(setting, graph=coarse.graph, training=training)
        for stages, plan in _plans_of_degrees(within, some, planner, cancelled).items():
            if stages not in best or plan.iter_time_s < best[stages].iter_time_s:
                best[stages] = plan
    return {
        degree: replace(plan, stages=tuple(map(coarse.fine_stage, plan.stages)))
        for degree, plan in sorted(best.items())
    }


def execution_plan_of(setting: Setting, plan: PricedPlan, model: str = "") -> ExecutionPlan:
    """Return a plan that :func:`plan_cells` found for this setting, as data to launch it by.

    ``model`` is the name of the model in plans.
    """
    training, states = setting.training.within(plan.micro_batches), setting.runtime.states
    return ExecutionPlan(
        stages=plan.stages,
        micro_batch=training.micro_batch,
        accumulation=training.micro_batches,
        schedule=training.schedule,
        zero=ZeroStage(states.zero),
        offload=Offload.OPTIMIZER if states.offload else Offload.NONE,
        recomputation=training.recomputation,
        precision=Precision(setting.graph.dtype),
        shape=setting.shape.each_node,
        model=model,
    )


def degrees_by_micro_batches(
    degrees: Sequence[int], training: Training, rule: MicroBatches | None
) -> Mapping[int, list[int]]:
    """Return the degrees by their number of micro-batches, which is at most the number of samples."""
    if rule is MicroBatches.SEARCHED:
        counts = powers_of_two(training.global_batch)
        return {n: [d for d in degrees if n >= d or n == counts[-1]] for n in counts}
    by_count: dict[int, list[int]] = {}
    for degree in degrees:
        by_count.setdefault(micro_batches_of(rule, degree, training), []).append(degree)
    return by_count


def micro_batches_of(rule: MicroBatches | None, stages: int, training: Training) -> int:
    """Return the number of micro-batches of a plan, or the largest possible one if it is searched."""
    if rule is None:
        return training.micro_batches
    if rule is MicroBatches.SEARCHED:
        return powers_of_two(training.global_batch)[-1]
    wanted = stages if rule is MicroBatches.STAGES else 4 * stages
    return min(wanted, training.global_batch)


def _plans_of_degrees(
    setting: Setting, degrees: Sequence[int], planner: Planner, cancelled: Callable[[], bool]
) -> dict[int, PricedPlan]:
    """Return the plans of a coarse setting at its number of micro-batches."""
    costs, options = cost_candidates(setting)
    if not len(options):
        return {}
    plans = PLANNERS[planner](setting, costs, options, degrees, cancelled)
    training, room = setting.training, setting.runtime.room
    return {stages: plan_of(plan, costs, training, room) for stages, plan in plans.items()}


def cost_candidates(setting: Setting) -> tuple[StageCosts, StageOptions]:
    """Return all candidate stages of a coarse setting, and the places where they fit."""
    candidates = candidates_of(setting.graph, setting.shape, sequence_parallel=False)
    costs = setting.costs(candidates)
    return costs, options_of(candidates, setting.depths(costs))


def search_plans(
    setting: Setting,
    costs: StageCosts,
    options: StageOptions,
    degrees: Iterable[int],
    cancelled: Callable[[], bool] = never_cancelled,
) -> dict[int, PlanSearchResult]:
    """Return the plan that the runtime's search chooses for each degree, with its real latency."""
    runtime, count = setting.runtime, setting.training.micro_batches
    searched = latency_of(costs, count, runtime.planned_as or runtime.overlap)
    plans = best_plans(options, searched, setting.shape.gpus, degrees, cancelled)
    if runtime.planned_as is None:
        return plans
    real = latency_of(costs, count, runtime.overlap)
    return {
        stages: PlanSearchResult(rows=f.rows, latency_s=real.of(np.array(f.rows, dtype=np.int64)))
        for stages, f in plans.items()
    }


def proxy_plans(
    setting: Setting,
    costs: StageCosts,
    options: StageOptions,
    degrees: Iterable[int],
    cancelled: Callable[[], bool] = never_cancelled,
) -> dict[int, PlanSearchResult]:
    """Return Arena's proxy plan of each degree (section 3.3), with its latency.

    GPUs are assigned in proportion to the load of layers, i.e. their computation on one GPU. The
    planner does not consider the latency of a plan.
    """
    training, gpus = setting.training, setting.shape.gpus
    single = np.ones(1, dtype=np.int64)
    forward_s, backward_s = setting.compute.layer_s(
        setting.graph, training, np.full(1, float(training.micro_batch)), single
    )
    load_s = (training.forwards * forward_s + backward_s)[0]
    comm_s = comm_each(costs, training.micro_batches)
    plans: dict[int, PlanSearchResult] = {}
    for stages in degrees:
        require_caller(cancelled)
        with suppress(NoPlan):  # a degree without a plan is absent
            whole = find_frontier(options, load_s, comm_s, gpus, stages, training.micro_batches)
            plans[stages] = _with_latency(setting, costs, whole.proxy.rows)
    return plans


def assembled_plans(
    setting: Setting,
    costs: StageCosts,
    options: StageOptions,
    degrees: Iterable[int],
    cancelled: Callable[[], bool] = never_cancelled,
) -> dict[int, PlanSearchResult]:
    """Return Crius' plan of each degree, with its latency.

    The model is cut before memory is considered (section 4.2). Then each stage becomes data or
    tensor parallel, so that the plan fits and is fastest (section 5.1).
    """
    graph, training, gpus = setting.graph, setting.training, setting.shape.gpus
    depth = np.zeros(len(costs.candidates), dtype=np.int64)
    depth[options.source] = options.depth
    handed_bytes = graph.element_bytes * training.micro_batch * graph.boundary
    plans: dict[int, PlanSearchResult] = {}
    for stages in degrees:
        require_caller(cancelled)
        with suppress(NoPlan):  # a degree without a plan is absent
            whole = Stages(ends=(len(graph),), gpus=(gpus,), bias=0.0)
            cut = whole if stages == 1 else least_cut(graph.flops, graph.boundary, gpus, stages)
            best = assembled_plan(
                costs,
                depth,
                cut,
                handed_bytes,
                setting.network,
                setting.shape.gpus_per_node,
                training.micro_batches,
            )
            plans[stages] = _with_latency(setting, costs, best.rows)
    return plans


def _with_latency(setting: Setting, costs: StageCosts, rows: Sequence[int]) -> PlanSearchResult:
    """Return a plan with the latency that the cost model predicts."""
    latency = latency_of(costs, setting.training.micro_batches, setting.runtime.overlap)
    return PlanSearchResult(rows=tuple(rows), latency_s=latency.of(rows))


PlannerFunction = Callable[
    [Setting, StageCosts, StageOptions, Iterable[int], Callable[[], bool]],
    dict[int, PlanSearchResult],
]

PLANNERS: Final[Mapping[Planner, PlannerFunction]] = MappingProxyType(
    {Planner.EXACT: search_plans, Planner.ARENA: proxy_plans, Planner.CRIUS: assembled_plans}
)
"""The function of each planner. Degrees for which it finds no plan are absent from its result."""
