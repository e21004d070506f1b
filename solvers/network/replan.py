"""Paths and priorities of all jobs together, planned at each start and end of a job (Crux 4).

1. Paths are chosen in order of intensity (``paths``).
2. Priorities P = k I are assigned (``correction_factors``, ``priorities``). An earlier order is kept where P
   hardly differs.
3. Paths and orders of small groups are tried on the engine (``trials``, ``swaps``).
4. Priorities are compressed to the available priority levels (``compression``). Small groups with
   more jobs than levels are tried once more.
5. A fairness floor is applied on request (``floor``).

A job whose traffic is not measured yet has the highest level, alone among the jobs that it contends
with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.base import require_wanted
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.compression import compress_levels
from tessera.solvers.network.factors import Clip, correction_factors
from tessera.solvers.network.floor import FloorResult, apply_floor
from tessera.solvers.network.paths import least_comm_s, select_paths
from tessera.solvers.network.priorities import MARGIN, assign_priorities, order_of, stable_order
from tessera.solvers.network.swaps import Moves, PlayWindow, by_level, change_levels, swap_orders
from tessera.solvers.network.trials import TRIALS, try_paths

FABRIC_LEVELS = 8
"""The number of priority levels that NICs and switches have at most (Crux 4.3)."""


class Variant(StrEnum):
    """The parts of Crux that are used (Crux 6)."""

    PA = "crux-pa"  # priorities alone: plain ECMP paths, and a separate level for each job
    PS_PA = "crux-ps-pa"  # paths and priorities, and a separate level for each job
    FULL = "crux-full"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """Options of planning; Crux as published has ``swap_jobs`` 0 and ``margin`` 0."""

    variant: Variant = Variant.FULL
    references: int = 1
    clip: Clip = Clip.BY_LOAD
    swap_jobs: int = 8  # largest link group that is tried on the engine; 0 if none is
    moves: Moves = Moves.INSERTION
    trials: int = TRIALS  # choices of paths tried in such a group; 0 for none
    window: PlayWindow = field(default_factory=PlayWindow)
    margin: float = MARGIN
    floor: float = 0.0  # share of its rate alone that each job shall have
    samples: int = 10  # topological orders that compression tries
    seed: int = 0
    cancelled: Callable[[], bool] = never_cancelled  # whether nobody waits for the plan any more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanningResult:
    """A network plan with its demand and the results of single steps."""

    plan: NetworkPlan
    demand: LinkDemand
    holding: Ints  # unmeasured jobs that hold the highest level
    floored: FloorResult | None  # None if no floor was requested


def replan(
    contention: Contention,
    *,
    levels: int = FABRIC_LEVELS,
    fabric_levels: int = FABRIC_LEVELS,
    options: PlanningOptions | None = None,
    earlier: Sequence[str] = (),
    unmeasured: Sequence[str] = (),
) -> PlanningResult:
    """Return paths and priorities for all jobs; jobs without traffic contend with no job.

    ``earlier`` names jobs in the order of the last plan, the most urgent first; names of jobs that
    are gone are ignored. ``unmeasured`` names jobs whose traffic is not measured yet, the longest
    waiting first. One that contends with no other of them has the highest level. The others wait,
    and are planned by their estimates.

    Raises:
        InvalidInput: levels below 1 or more than the fabric has, or an option without meaning.
        DeadlineTooShort: ``options.cancelled`` has become true.
    """
    options = options or PlanningOptions()
    if not 1 <= levels <= fabric_levels:
        raise InvalidInput(
            "levels", f"is {levels}; it must lie between 1 and the fabric's {fabric_levels}"
        )
    index = {name: job for job, name in enumerate(contention.jobs)}
    known = [index[name] for name in dict.fromkeys(earlier) if name in index]
    new = [index[name] for name in dict.fromkeys(unmeasured) if name in index]
    chosen, demand, priority, order = _ranked(contention, np.array(known, np.int64), options)
    full = options.variant is Variant.FULL
    count = levels if full else max(demand.jobs, 1)
    holding = _holding(demand, new) if count > 1 else np.zeros(0, dtype=np.int64)
    rest = np.setdiff1d(order, holding)
    place = np.empty(demand.jobs, dtype=np.int64)
    place[rest] = np.arange(len(rest))
    part, order = demand.among(rest), place[order[~np.isin(order, holding)]]
    below = count - (min(len(holding), 1) if full else len(holding))
    level = np.empty(demand.jobs, dtype=np.int64)
    require_wanted(options.cancelled)
    level[rest], order = _levels(part, priority[rest], order, below, options)
    level[holding] = below if full else np.arange(count - 1, below - 1, -1)
    order, fair = np.concatenate([holding, rest[order]]), None
    if options.floor != 0:
        fair = apply_floor(
            demand,
            level,
            order,
            below,
            options.floor,
            most_jobs=options.swap_jobs,
            window=options.window,
            cancelled=options.cancelled,
        )
        level, order = fair.level, fair.order
    plan = NetworkPlan(chosen=chosen, priority=priority, order=order, level=level, levels=count)
    return PlanningResult(plan=plan, demand=demand, holding=holding, floored=fair)


def _paths(c: Contention, options: PlanningOptions) -> Ints:
    if options.variant is Variant.PA:
        return hash_bundles(c, options.seed)
    comm_s = least_comm_s(c)
    intensity = np.full(len(c.jobs), np.inf)
    np.divide(c.work_flop, comm_s, out=intensity, where=comm_s > 0)
    return select_paths(c, order_of(intensity))


def _ranked(
    c: Contention, earlier: Ints, options: PlanningOptions
) -> tuple[Ints, LinkDemand, Floats, Ints]:
    """Return the results of steps 1 to 3.

    They are the candidate of each bundle, (B,), the demand that follows, P, and the order after
    swaps, (J,).
    """
    chosen = _paths(c, options)
    demand = demand_of(c, chosen)
    priority = _priority(demand, options)
    order = (
        stable_order(priority, earlier, margin=options.margin)
        if len(earlier)
        else order_of(priority)
    )
    if options.swap_jobs < 2:
        return chosen, demand, priority, order
    if options.trials and options.variant is not Variant.PA:
        other, order = try_paths(
            c,
            chosen,
            order,
            most_jobs=options.swap_jobs,
            trials=options.trials,
            window=options.window,
            seed=options.seed,
            cancelled=options.cancelled,
        )
        if (other != chosen).any():
            chosen, demand = other, demand_of(c, other)
            priority = _priority(demand, options)
    order = swap_orders(
        demand,
        order,
        most_jobs=options.swap_jobs,
        moves=options.moves,
        window=options.window,
        cancelled=options.cancelled,
    )
    return chosen, demand, priority, order


def _priority(demand: LinkDemand, options: PlanningOptions) -> Floats:
    return assign_priorities(
        demand, correction_factors(demand, references=options.references, clip=options.clip)
    )


def _levels(
    demand: LinkDemand, priority: Floats, order: Ints, levels: int, options: PlanningOptions
) -> tuple[Ints, Ints]:
    """Return the priority levels, and the order that they follow.

    The levels are compressed if the variant does that.
    """
    if options.variant is not Variant.FULL:
        level = np.empty(demand.jobs, dtype=np.int64)
        level[order] = np.arange(demand.jobs - 1, -1, -1)
        return level, order
    level = compress_levels(
        demand, priority, order, levels, samples=options.samples, seed=options.seed
    )
    if options.swap_jobs <= levels:
        return level, order
    better = change_levels(
        demand,
        level,
        levels,
        least_jobs=levels + 1,
        most_jobs=options.swap_jobs,
        window=options.window,
        cancelled=options.cancelled,
    )
    return better, by_level(better, order) if (better != level).any() else order


def _holding(demand: LinkDemand, new: list[int]) -> Ints:
    """Return the jobs, in their order, that share no link with one that was taken before."""
    taken = np.zeros(demand.links, dtype=np.bool_)
    holding = []
    for job in new:
        links = demand.link[demand.link_start[job] : demand.link_start[job + 1]]
        if len(links) and not taken[links].any():
            taken[links] = True
            holding.append(job)
    return np.array(holding, dtype=np.int64)
