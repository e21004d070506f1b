"""A fairness floor: each job keeps a share of its rate alone, at little cost in work (not in Crux).

Strict priority is hard on the lowest jobs (the paper saw jobs lose 55.5 %). On request, jobs that
fall below the floor are raised. A job is first raised to the level of the next more urgent job that
it shares a link with, where both share evenly, and then above it. The engine computes the rates.
The order follows the levels, so on every link it is still true that the less urgent of two jobs is
not served first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.network.fluid import contending_groups, flop_under_levels, simulate_fluid
from tessera.solvers.network.swaps import (
    MIN_GAIN,
    PERIODS,
    PlayEffort,
    PlayWindow,
    by_level,
    compact_demand,
    level_moves,
)
from tessera.solvers.sums import dot

MAX_ROUNDS: Final = 200
"""Maximum number of times that jobs are raised.

If ``MAX_COST`` forbids that, they are raised less often, and more of them at the same time."""
MIN_SHARE_AT_ONCE: Final = 0.1
"""Least share of a group's jobs that are raised together, those furthest below the floor; or one.
"""
SMALL_GROUP_JOBS: Final = 12
"""In a group with more jobs, an event costs the engine as much as one event for each of its jobs.
"""
MAX_COST: Final = 1e8
"""Maximum cost of the search for all groups, in iterations of jobs of small groups: some seconds.
"""
MIN_WINDOW_SHARE: Final = 0.2
"""Least share of the window that is played, if a whole window would cost too much."""
FLOOR_TOLERANCE: Final = 0.005
"""A rate this far below the floor, as a share of the rate alone, is an effect of the window's ends.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FloorResult:
    """Priority levels that keep the floor, or come closest to it."""

    level: Ints  # (J,)
    order: Ints  # (J,) the most urgent first
    share: Floats  # (J,) rate over the rate alone
    met: bool  # whether every share is at least the floor
    price: float  # the share of the work that the floor costs; below 0 if it gains work


def apply_floor(
    demand: LinkDemand,
    level: Ints,
    order: Ints,
    levels: int,
    floor: float,
    *,
    most_jobs: int = 8,
    window: PlayWindow | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> FloorResult:
    """Return priority levels under which each job has ``floor`` of its rate alone.

    If none are found, return those with the least sum of what jobs lack; ``met`` is then false. In
    link groups of at most ``most_jobs``, single changes of levels are then tried to regain work.
    Jobs on ``levels`` or above stay there; the others have levels below that.

    Raises:
        InvalidInput: the floor is not in [0, 1].
    """
    if not 0 <= floor <= 1:
        raise InvalidInput("floor", f"is {floor}; it must lie in [0, 1]")
    if demand.jobs == 0:
        return FloorResult(level=level, order=order, share=np.zeros(0), met=True, price=0.0)
    groups = contending_groups(demand)
    spans = _spans(demand, groups, window or PlayWindow())
    before = _shares_of(demand, level, groups, spans)
    raised, share = level.copy(), before
    short = [
        each for each in zip(groups, spans, strict=True) if _below(before[each[0]], floor).any()
    ]
    effort = PlayEffort(2 * len(short), MAX_COST, cancelled)
    for group, span in sorted(short, key=lambda each: len(each[0])):
        part = compact_demand(demand, group)
        raised[group] = _raised(part, level[group], levels, floor, span, effort)
        if len(group) <= most_jobs:
            raised[group] = _cheapened(part, raised[group], levels, floor, span, effort)
    if (raised != level).any():
        share = _shares_of(demand, raised, groups, spans)
    rate = demand.work_flop / demand.alone_s
    work = dot(rate, before)
    return FloorResult(
        level=raised,
        order=by_level(raised, order),
        share=share,
        met=not _below(share, floor).any(),
        price=1 - dot(rate, share) / work if work > 0 else 0.0,
    )


def _spans(demand: LinkDemand, groups: list[Ints], window: PlayWindow) -> list[tuple[float, float]]:
    """Return the window of each group.

    It is the window of all jobs, so that all groups can be played together. If fast jobs would end
    that one before the slowest job has done its iterations, each group has its own.
    """
    spans = [window.of(demand)] * len(groups)
    if window.horizon_s is not None or not groups:
        return spans
    if spans[0][0] < PERIODS * float(demand.alone_s.max()):
        spans = [window.of(demand.among(group)) for group in groups]
    each = zip(groups, spans, strict=True)
    whole = sum(_played(demand.alone_s[group], span) for group, span in each)
    cut = max(MIN_WINDOW_SHARE, min(1.0, MAX_COST / 10 / whole))
    return [(horizon_s * cut, warm_s * cut) for horizon_s, warm_s in spans]


def _shares_of(
    demand: LinkDemand, level: Ints, groups: list[Ints], spans: list[tuple[float, float]]
) -> Floats:
    """Return rates over rates alone, (J,), of each group over its window.

    1 for jobs in no group.
    """
    if len(set(spans)) == 1:
        return _shares(demand, level, spans[0])
    shares = np.ones(demand.jobs)
    for group, span in zip(groups, spans, strict=True):
        shares[group] = _shares(demand.among(group), level[group], span)
    return shares


def _shares(demand: LinkDemand, level: Ints, span: tuple[float, float]) -> Floats:
    run = simulate_fluid(demand, level, horizon_s=span[0], warm_s=span[1])
    shares: Floats = run.iterations * demand.alone_s
    return shares


def _played(alone_s: Floats, span: tuple[float, float]) -> float:
    """Return the cost of playing a group, in iterations of jobs of a small one."""
    return (
        sum(span)
        * float((1 / alone_s).sum())
        * (len(alone_s) if len(alone_s) > SMALL_GROUP_JOBS else 1)
    )


def _below(share: Floats, floor: float) -> Bools:
    is_below: Bools = share < floor - FLOOR_TOLERANCE
    return is_below


def _raised(
    demand: LinkDemand,
    level: Ints,
    levels: int,
    floor: float,
    span: tuple[float, float],
    effort: PlayEffort,
) -> Ints:
    """Return the levels of one group, (J,), after raising jobs below the floor while it helps."""
    each = _played(demand.alone_s, span)
    rounds = min(MAX_ROUNDS, int(effort.share() / each))
    if rounds < 1:
        return level  # return before the pairs of a large group need memory
    meets, at_once = _meets(demand), max(MIN_SHARE_AT_ONCE, 1 / rounds)
    now, best, least = level, level, np.inf
    tried: set[bytes] = set()
    for _ in range(rounds):
        effort.spend(each)
        share = _shares(demand, now, span)
        lack = float(np.maximum(floor - FLOOR_TOLERANCE - share, 0).sum())
        if lack < least:
            best, least = now, lack
        if lack == 0 or now.tobytes() in tried:
            break
        tried.add(now.tobytes())
        below = np.flatnonzero(_below(share, floor))
        worst = below[np.argsort(share[below], kind="stable")]
        now = now.copy()
        for job in worst[: max(1, int(at_once * len(demand.work_flop)))].tolist():
            _raise(now, job, meets[job], share, levels)
    return best


def _raise(level: Ints, job: int, meets: Bools, share: Floats, levels: int) -> None:
    """Change ``level``: raise the job to the next higher level of a job that it shares a link with.

    Without such a job, raise it by one. At the top level, lower the fastest of its equals by one.
    """
    higher = level[meets & (level > level[job]) & (level < levels)]
    if len(higher):
        level[job] = higher.min()
    elif level[job] + 1 < levels:
        level[job] += 1
    else:
        equals = np.flatnonzero(meets & (level == level[job]))
        if len(equals) and level[job] > 0:
            level[equals[np.argmax(share[equals])]] -= 1


def _meets(demand: LinkDemand) -> Bools:
    """Return whether each two jobs share a link, (J, J)."""
    uses = np.zeros((demand.jobs, demand.links), dtype=np.float32)
    uses[demand.job, demand.link] = 1.0
    meets: Bools = (uses @ uses.T) > 0
    np.fill_diagonal(meets, val=False)
    return meets


def _cheapened(
    demand: LinkDemand,
    level: Ints,
    levels: int,
    floor: float,
    span: tuple[float, float],
    effort: PlayEffort,
) -> Ints:
    """Return the levels of one group, (J,), changed while that gains work and the floor is kept."""
    left = effort.share()
    if _below(_shares(demand, level, span), floor).any():
        return level
    each, now = _played(demand.alone_s, span), level
    work = float(flop_under_levels(demand, now[None], horizon_s=span[0], warm_s=span[1])[0])
    while True:
        rows = level_moves(now, levels)
        rows = rows[(rows[:, now >= levels] == now[now >= levels]).all(axis=1)]
        # The rows are played together. At worst, each is played once more alone.
        cost = 2 * each * len(rows)
        if cost > left:
            return now
        left -= cost
        effort.spend(cost)
        work_of_row = flop_under_levels(demand, rows, horizon_s=span[0], warm_s=span[1])
        for at in np.argsort(-work_of_row, kind="stable").tolist():
            if work_of_row[at] <= work * (1 + MIN_GAIN):
                return now
            if not _below(_shares(demand, rows[at], span), floor).any():
                now, work = rows[at], float(work_of_row[at])
                break
        else:
            return now
