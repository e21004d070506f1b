"""The exact least-latency plan of a Cell under the cost model.

The time of an iteration is a sum over stages plus weighted maxima over stages
(:mod:`tessera.estimator.pipeline`). With the sum T and the maxima m_i, latency = T + sum_i w_i *
m_i. The heaviest weight, B - 1, is on the slowest stage. Once a plan is known, no stage slower than
(its latency - least T) / (B - 1) can be in a better one. This leaves few stages and few partial
plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.estimator.memory import UsableMemory, in_flight, memory_bytes
from tessera.estimator.pipeline import (
    DEFAULT_OVERLAP,
    Overlap,
    Sync,
    exposed_sync_s,
    first_send_s,
    paces_s,
)
from tessera.estimator.planning.chain import suffix_tables, walk_plan
from tessera.estimator.planning.labels import Criteria, RestBounds, complete_labels, rest_of
from tessera.estimator.planning.options import NoPlan, StageOptions, least_in_each, stages_at
from tessera.estimator.plans import PricedPlan, StageCosts, Training
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.tables import Bools, Floats, Ints

_LIMITS = np.array([0.0, 0.04, 0.15])
"""Relative slack of the slowest stage of a first plan over its least possible value."""
_MAX_PARTIAL_PLANS = 256
"""Number of partial plans kept after each stage. If there are more, the bounds are computed again
from the stages that are still fast enough. The search is then repeated with 8 times the number,
until all partial plans are kept."""
_MAX_ROWS = 4_000_000
"""Number of partial plans and next stages together up to which the search is repeated with more. Beyond
it, memory would have no bound, and the best plan so far is taken."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latency:
    """The terms of the latency of an iteration.

    It is the sum of ``added_s`` (K,) over stages, plus ``weight`` (M,) times the maximum over
    stages of each row of ``worst_s`` (M, K).
    """

    added_s: Floats
    worst_s: Floats
    weight: Floats

    def of(self, rows: Sequence[int] | Ints) -> float:
        """Return the latency of the plan with these rows, in seconds."""
        at = np.asarray(rows, dtype=np.int64)
        return float(self.added_s[at].sum() + self.weight @ self.worst_s[:, at].max(axis=1))


def latency_of(
    costs: StageCosts, micro_batches: int, overlap: Overlap = DEFAULT_OVERLAP
) -> Latency:
    """Return the terms of ``tessera.estimator.pipeline.iteration_s`` for each candidate."""
    pace = paces_s(costs, overlap)
    synced = exposed_sync_s(costs.sync_s, costs.backward_s, overlap)
    in_turn = overlap.sync is Sync.IN_TURN
    after = [costs.update_s] if in_turn else [synced, costs.update_s]
    return Latency(
        added_s=costs.busy_s + first_send_s(costs.send_s, overlap) + (synced if in_turn else 0.0),
        worst_s=np.array([*pace, *after]),
        weight=np.array([micro_batches - 1.0] * len(pace) + [1.0] * len(after)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearchResult:
    """The best plan with its latency.

    ``rows`` are the plan's stages in order, as rows of the original table of candidates.
    """

    rows: tuple[int, ...]
    latency_s: float


def best_plans(
    options: StageOptions,
    latency: Latency,
    gpus: int,
    degrees: Iterable[int],
    cancelled: Callable[[], bool] = never_cancelled,
    known_s: Mapping[int, float] | None = None,
) -> dict[int, PlanSearchResult]:
    """Return the least-latency plan of each pipeline degree on exactly ``gpus`` GPUs.

    Degrees without a plan are absent. The result is exact up to a relative error of 1e-9, unless
    there are too many partial plans to keep. All degrees share the bounds on the rest of a plan.
    ``known_s`` are the latencies of known plans, by degree. A degree is absent if it has none that
    is faster.

    Raises:
        DeadlineTooShort: it was cancelled.
    """
    wanted = sorted({s for s in degrees if 1 <= s <= min(gpus, options.layers)})
    if not wanted:
        return {}
    counts = latency.weight > 0
    weight, worst_s = latency.weight[counts], latency.worst_s[counts]
    limit_by_degree_s = {s: (known_s or {}).get(s, math.inf) for s in wanted}
    least_s = latency.added_s[options.source] + weight @ worst_s[:, options.source]
    fast = options.only(least_s < max(limit_by_degree_s.values()) * (1 - _TIE))
    usable = fast.only(_useful(fast, latency))
    unit = int(np.gcd.reduce(usable.gpus)) or 1  # all stages have multiples of these GPUs
    if gpus % unit or wanted[0] > gpus // unit:
        return {}
    usable, gpus = replace(usable, gpus=usable.gpus // unit), gpus // unit
    wanted = [stages for stages in wanted if stages <= gpus]
    criteria = Criteria(added=latency.added_s[None, usable.source], worst=worst_s[:, usable.source])
    rest = rest_of(usable, criteria, wanted[-1], gpus, cancelled)
    plans: dict[int, PlanSearchResult] = {}
    for stages in wanted:
        least = rest.added[0, stages, 0, gpus] + weight @ rest.worst[:, stages, 0, gpus]
        if least < limit_by_degree_s[stages] * (1 - _TIE):
            best = _best(
                usable, criteria, weight, rest, stages, gpus, limit_by_degree_s[stages], cancelled
            )
            plans |= {} if best is None else {stages: best}
    return plans


def best_plan(options: StageOptions, latency: Latency, gpus: int, stages: int) -> PlanSearchResult:
    """Return the least-latency plan of one pipeline degree.

    Raises:
        NoPlan: no chain of options covers the layers within memory.
    """
    plans = best_plans(options, latency, gpus, [stages])
    if stages not in plans:
        raise NoPlan(
            f"no plan with {stages} stages fits on {gpus} GPUs; use more GPUs, more memory, or another"
            " pipeline degree"
        )
    return plans[stages]


def plan_of(
    result: PlanSearchResult,
    costs: StageCosts,
    training: Training,
    room: UsableMemory | None = None,
) -> PricedPlan:
    """Return a search result as a plan, with the memory of each stage."""
    rows = np.array(result.rows, dtype=np.int64)
    flights = in_flight(training.schedule, len(rows), training.micro_batches)
    every = memory_bytes(costs, 0, room)[rows] + costs.flight_bytes[rows] * flights
    return PricedPlan(
        stages=stages_at(costs.candidates, rows),
        micro_batches=training.micro_batches,
        iter_time_s=result.latency_s,
        memory_bytes=tuple(every.tolist()),
    )


def _best(
    options: StageOptions,
    criteria: Criteria,
    weight: Floats,
    rest: RestBounds,
    stages: int,
    gpus: int,
    known_s: float,
    cancelled: Callable[[], bool],
) -> PlanSearchResult | None:
    """Return the best plan, or None if none is faster than ``known_s``.

    A good first plan excludes most stages. The few that remain give tighter bounds.
    """
    best, limit_s = None, known_s
    if not math.isfinite(known_s):
        best = _first(options, criteria, weight, rest, stages, gpus, cancelled)
        limit_s = best.latency_s
    kept = _in_time(criteria, weight, rest, stages, gpus, limit_s)
    options, criteria = options.only(kept), criteria.only(kept)
    width, exact = _MAX_PARTIAL_PLANS, False
    while not exact:
        better, exact = _below(
            options, criteria, weight, rest, stages, gpus, limit_s, width, cancelled
        )
        if better is not None:
            best, limit_s = better, better.latency_s
        if not exact and width == _MAX_PARTIAL_PLANS:
            kept = _in_time(criteria, weight, rest, stages, gpus, limit_s)
            options, criteria = options.only(kept), criteria.only(kept)
            rest = rest_of(options, criteria, stages, gpus, cancelled)
        width *= 8
        if width * len(options) > _MAX_ROWS * options.layers:
            break
    return best


def _first(
    options: StageOptions,
    criteria: Criteria,
    weight: Floats,
    rest: RestBounds,
    stages: int,
    gpus: int,
    cancelled: Callable[[], bool],
) -> PlanSearchResult:
    """Return the best of the plans with the least sum within limits on the heaviest maximum.

    The other maxima count as their mean over stages, which is a sum.
    """
    heaviest = int(weight.argmax())
    pace = criteria.worst[heaviest]
    others = np.delete(weight[:, None] * criteria.worst, heaviest, axis=0).sum(axis=0) / stages
    limit = rest.worst[heaviest, stages, 0, gpus] * (1 + _TIE + _LIMITS)
    value = np.where(pace <= limit[:, None], criteria.added[0] + others, np.inf)
    table = suffix_tables(options, value, np.add, stages, gpus, cancelled)
    plans = [walk_plan(options, v, t, stages, gpus) for v, t in zip(value, table, strict=True)]
    latency = [
        float(criteria.added[0, p].sum() + weight @ criteria.worst[:, p].max(axis=1)) for p in plans
    ]
    best = int(np.argmin(latency))
    return PlanSearchResult(
        rows=tuple(options.source[plans[best]].tolist()), latency_s=latency[best]
    )


def _below(
    options: StageOptions,
    criteria: Criteria,
    weight: Floats,
    rest: RestBounds,
    stages: int,
    gpus: int,
    limit_s: float,
    width: int,
    cancelled: Callable[[], bool],
) -> tuple[PlanSearchResult | None, bool]:
    """Return the best plan faster than ``limit_s``, and whether the search was exhaustive."""

    def judge(added: Floats, worst: Floats) -> Floats:
        bound = added[0] + weight @ worst
        return np.where(bound < limit_s * (1 - _TIE), bound, np.inf)

    labels, exact = complete_labels(options, criteria, rest, stages, gpus, judge, width, cancelled)
    if not len(labels):
        return None, exact
    total = labels.added[0] + weight @ labels.worst
    best = int(total.argmin())
    rows = options.source[labels.rows[:, best]]
    return PlanSearchResult(rows=tuple(rows.tolist()), latency_s=float(total[best])), exact


def _in_time(
    criteria: Criteria, weight: Floats, rest: RestBounds, stages: int, gpus: int, most: float
) -> Bools:
    """Return which options can be part of a plan no slower than ``most``.

    Each maximum alone must leave room for the least of everything else.
    """
    least = weight * rest.worst[:, stages, 0, gpus]
    others = rest.added[0, stages, 0, gpus] + least.sum() - least
    kept: Bools = (weight[:, None] * criteria.worst + others[:, None] <= most * (1 + _TIE)).all(
        axis=0
    )
    return kept


def _useful(options: StageOptions, latency: Latency) -> Ints:
    """Return the options that no other option for the same layers and GPUs dominates."""
    at = options.source
    values = np.vstack([latency.added_s[None, at], latency.worst_s[:, at], -options.depth[None]])
    most = int(options.gpus.max(initial=0)) + 1
    group = (options.start * (options.layers + 1) + options.end) * most + options.gpus
    lead_of = np.zeros(int(group.max(initial=0)) + 1, dtype=np.int64)
    left = np.flatnonzero(np.isfinite(values).all(axis=0))
    kept = [left[:0]]
    # No option dominates that of least sum. Keep it, and drop the options that it dominates.
    while len(left):
        lead = left[least_in_each(group[left], values[0, left])]
        kept.append(lead)
        lead_of[group[lead]] = lead
        left = left[(values[:, lead_of[group[left]]] > values[:, left]).any(axis=0)]
    return np.sort(np.concatenate(kept))
