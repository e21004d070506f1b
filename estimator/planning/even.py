"""Even plans: layers are cut into stages of about equal time, each on the same number of GPUs.

They are a small part of the plans that a search considers, so the Cells of many jobs are estimated
quickly. Plans of several GPU counts share one table if their nodes are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tessera.estimator.graph import Graph, balanced_ends
from tessera.estimator.memory import UsableMemory, limit_bytes, memory_bytes
from tessera.estimator.planning.options import least_in_each
from tessera.estimator.planning.search import Latency
from tessera.estimator.plans import Candidates, StageCosts, Training, powers_dividing
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.job.execution_plan import Schedule

EvenPlanKey = tuple[int, int]
"""A number of stages and the GPUs of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenPlans:
    """The candidate stages of even plans. Arrays have shape (K,).

    ``plan`` is the plan of a row, and ``stage`` is its stage in that plan.
    """

    candidates: Candidates
    # For each plan. An even split may have several plans, with different cuts.
    asked: tuple[EvenPlanKey, ...]
    plan: Ints
    stage: Ints


def even_plans(
    graph: Graph, cuts: Mapping[int, Sequence[Sequence[int]]], asked: Iterable[EvenPlanKey]
) -> EvenPlans:
    """Return all settings of all stages of even plans.

    ``cuts`` has the ends of the stages of each possible cut, by the number of stages.
    """
    plans: list[EvenPlanKey] = []
    rows: list[tuple[int, ...]] = []
    most_tp, most_ep = graph.tensor_limit.tolist(), graph.experts.tolist()
    for stages, gpus in dict.fromkeys(asked):
        for ends in cuts[stages]:
            for at, (first, last) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
                settings = _settings(gpus, min(most_tp[first:last]), max(most_ep[first:last]))
                rows += [(first, last, *setting, len(plans), at) for setting in settings]
            plans.append((stages, gpus))
    start, end, dp, tp, ep, plan, stage = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    candidates = Candidates(
        start=start, end=end, dp=dp, tp=tp, ep=ep, sp=np.zeros(len(start), dtype=np.bool_)
    )
    return EvenPlans(candidates=candidates, asked=tuple(plans), plan=plan, stage=stage)


def even_cuts(loads: Sequence[Floats], degrees: Iterable[int]) -> dict[int, list[list[int]]]:
    """Return the distinct cuts for each number of stages, one for each load.

    A cut minimises the load of its heaviest stage. Loads have shape (L,). Numbers of stages above
    the number of layers are left out.
    """
    return {
        stages: [
            list(ends)
            for ends in dict.fromkeys(tuple(balanced_ends(load, stages).tolist()) for load in loads)
        ]
        for stages in sorted(set(degrees))
        if stages <= len(loads[0])
    }


@lru_cache(maxsize=1024)
def _settings(gpus: int, tensor_limit: float, experts: float) -> tuple[tuple[int, int, int], ...]:
    """Return the (dp, tp, ep) of a stage, which are powers of two that divide its GPUs.

    Its layers allow tensor degrees up to ``tensor_limit``, and each GPU has the same number of
    ``experts``.
    """
    split = powers_dividing(gpus)
    return tuple(
        (gpus // tp, tp, ep)
        for tp in split
        for ep in split
        if tp <= tensor_limit and max(experts, 1) % ep == 0
    )


def least_times_s(
    plans: EvenPlans,
    costs: StageCosts,
    latency: Latency,
    training: Training,
    memory: float,
    room: UsableMemory | None = None,
) -> dict[EvenPlanKey, float]:
    """Return the seconds of the fastest plan of each even split.

    They are inf if no plan fits ``memory`` bytes per GPU. Each stage uses the setting with which a
    pipeline of such stages alone would be shortest. If all stages are alike, this is optimal.
    """
    stages = np.array([s for s, _ in plans.asked], dtype=np.int64)
    after = stages[plans.plan] - plans.stage  # micro-batches in flight under 1F1B
    flights = training.micro_batches if training.schedule is Schedule.GPIPE else after
    needed = memory_bytes(costs, 0, room) + costs.flight_bytes * np.minimum(
        flights, training.micro_batches
    )
    fits = (needed <= limit_bytes(memory, room)) & np.isfinite(costs.busy_s)
    alone_s = latency.added_s + latency.weight @ latency.worst_s
    group = plans.plan * (int(stages.max(initial=1)) + 1) + plans.stage
    rows = least_in_each(group, np.where(fits, alone_s, np.inf))
    first = np.flatnonzero(plans.stage[rows] == 0)
    worst_s = np.maximum.reduceat(latency.worst_s[:, rows], first, axis=1)
    time_s = np.add.reduceat(latency.added_s[rows], first) + latency.weight @ worst_s
    runs = np.logical_and.reduceat(fits[rows], first)
    times_s: dict[EvenPlanKey, float] = {}
    for even, seconds in zip(plans.asked, np.where(runs, time_s, np.inf).tolist(), strict=True):
        times_s[even] = min(seconds, times_s.get(even, np.inf))
    return times_s
