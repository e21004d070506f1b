"""A fairness floor: no job below a share of its rate alone, at the least price in work found (not in Crux).

Strict priority is hard on the lowest (the paper saw jobs lose 55.5 %). On request jobs that fall below the
floor are raised: first onto the level of the next more urgent job that they meet, where both share evenly,
then above it. The engine tells the rates. The order follows the levels, so that still no link serves the
less urgent of two jobs first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.cancelling import never
from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Demand
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.network.fluid import meetings, simulate, works
from tessera.solvers.network.swaps import (
    GAIN,
    PERIODS,
    Effort,
    Window,
    by_level,
    compact,
    level_moves,
)

ROUNDS: Final = 200
"""How often jobs are raised at most; less often, and more of them at once, where ``AT_MOST`` forbids it."""
AT_ONCE: Final = 0.1
"""Share of a group's jobs that are raised together at least, those furthest below the floor; or one."""
FEW: Final = 12
"""With more jobs in a group each event costs the engine about as much as so many events of a small one."""
AT_MOST: Final = 1e8
"""What the search may cost for all groups together, in iterations of jobs of small ones: some seconds."""
SHORT: Final = 0.2
"""Share of the window that rates are taken from at least, where a whole one would cost too much."""
CLOSE: Final = 0.005
"""A rate this little below the floor, as a share of the rate alone, is what a window's ends make of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floored:
    """Levels that keep the floor, or come closest."""

    level: Ints  # (J,)
    order: Ints  # (J,) most urgent first
    share: Floats  # (J,) rate over the rate alone
    met: bool  # every share is at least the floor
    price: float  # share of the work lost by it; below 0: none was


def floored(
    demand: Demand,
    level: Ints,
    order: Ints,
    levels: int,
    floor: float,
    *,
    most_jobs: int = 8,
    window: Window | None = None,
    cancelled: Callable[[], bool] = never,
) -> Floored:
    """Return levels under which each job has ``floor`` of its rate alone, if such are found.

    Where none are, those with the least sum of what jobs lack, and ``met`` says so. In link groups of at most
    ``most_jobs`` single changes of levels are then tried to win work back. Jobs on ``levels`` or above stay
    there: others have levels below that.

    Raises:
        InvalidInput: the floor is not in [0, 1].
    """
    if not 0 <= floor <= 1:
        raise InvalidInput("floor", f"is {floor}; it must lie in [0, 1]")
    if demand.jobs == 0:
        return Floored(level=level, order=order, share=np.zeros(0), met=True, price=0.0)
    groups = meetings(demand)
    spans = _spans(demand, groups, window or Window())
    before = _shares_of(demand, level, groups, spans)
    found, share = level.copy(), before
    short = [
        each for each in zip(groups, spans, strict=True) if _below(before[each[0]], floor).any()
    ]
    effort = Effort(2 * len(short), AT_MOST, cancelled)
    for group, span in sorted(short, key=lambda each: len(each[0])):
        part = compact(demand, group)
        found[group] = _raised(part, level[group], levels, floor, span, effort)
        if len(group) <= most_jobs:
            found[group] = _cheapened(part, found[group], levels, floor, span, effort)
    if (found != level).any():
        share = _shares_of(demand, found, groups, spans)
    rate = demand.work_flop / demand.alone_s
    work = float(rate @ before)
    return Floored(
        level=found,
        order=by_level(found, order),
        share=share,
        met=not _below(share, floor).any(),
        price=1 - float(rate @ share) / work if work > 0 else 0.0,
    )


def _spans(demand: Demand, groups: list[Ints], window: Window) -> list[tuple[float, float]]:
    """Return the window of each group: that of all jobs, which can then be played at once, or its own where
    fast jobs would end that one before the slowest has done its iterations."""
    spans = [window.of(demand)] * len(groups)
    if window.horizon_s is not None or not groups:
        return spans
    if spans[0][0] < PERIODS * float(demand.alone_s.max()):
        spans = [window.of(demand.among(group)) for group in groups]
    each = zip(groups, spans, strict=True)
    whole = sum(_played(demand.alone_s[group], span) for group, span in each)
    cut = max(SHORT, min(1.0, AT_MOST / 10 / whole))
    return [(horizon_s * cut, warm_s * cut) for horizon_s, warm_s in spans]


def _shares_of(
    demand: Demand, level: Ints, groups: list[Ints], spans: list[tuple[float, float]]
) -> Floats:
    """Return rates over rates alone, (J,), of each group over its window; 1: meets nobody."""
    if len(set(spans)) == 1:
        return _shares(demand, level, spans[0])
    found = np.ones(demand.jobs)
    for group, span in zip(groups, spans, strict=True):
        found[group] = _shares(demand.among(group), level[group], span)
    return found


def _shares(demand: Demand, level: Ints, span: tuple[float, float]) -> Floats:
    run = simulate(demand, level, horizon_s=span[0], warm_s=span[1])
    found: Floats = run.iterations * demand.alone_s
    return found


def _played(alone_s: Floats, span: tuple[float, float]) -> float:
    """Return what it costs to play a group, in iterations of jobs of a small one."""
    return sum(span) * float((1 / alone_s).sum()) * (len(alone_s) if len(alone_s) > FEW else 1)


def _below(share: Floats, floor: float) -> Bools:
    found: Bools = share < floor - CLOSE
    return found


def _raised(
    demand: Demand,
    level: Ints,
    levels: int,
    floor: float,
    span: tuple[float, float],
    effort: Effort,
) -> Ints:
    """Return the levels of one group, (J,), after raising who is below the floor as long as it helps."""
    each = _played(demand.alone_s, span)
    rounds = min(ROUNDS, int(effort.share() / each))
    if rounds < 1:
        return level  # before anything is held for each two of so many jobs
    meets, at_once = _meets(demand), max(AT_ONCE, 1 / rounds)
    now, best, least = level, level, np.inf
    seen: set[bytes] = set()
    for _ in range(rounds):
        effort.spend(each)
        share = _shares(demand, now, span)
        lack = float(np.maximum(floor - CLOSE - share, 0).sum())
        if lack < least:
            best, least = now, lack
        if lack == 0 or now.tobytes() in seen:
            break
        seen.add(now.tobytes())
        below = np.flatnonzero(_below(share, floor))
        worst = below[np.argsort(share[below], kind="stable")]
        now = now.copy()
        for job in worst[: max(1, int(at_once * len(demand.work_flop)))].tolist():
            _raise(now, job, meets[job], share, levels)
    return best


def _raise(level: Ints, job: int, meets: Bools, share: Floats, levels: int) -> None:
    """Change ``level``: the job joins the next higher one that it meets, or else leaves its equals below."""
    higher = level[meets & (level > level[job]) & (level < levels)]
    if len(higher):
        level[job] = higher.min()
    elif level[job] + 1 < levels:
        level[job] += 1
    else:
        equals = np.flatnonzero(meets & (level == level[job]))
        if len(equals) and level[job] > 0:
            level[equals[np.argmax(share[equals])]] -= 1


def _meets(demand: Demand) -> Bools:
    """Return which jobs share a link with which others, (J, J)."""
    uses = np.zeros((demand.jobs, demand.links), dtype=np.float32)
    uses[demand.job, demand.link] = 1.0
    found: Bools = (uses @ uses.T) > 0
    np.fill_diagonal(found, val=False)
    return found


def _cheapened(
    demand: Demand,
    level: Ints,
    levels: int,
    floor: float,
    span: tuple[float, float],
    effort: Effort,
) -> Ints:
    """Return the levels of one group, (J,), changed while that gains work and the floor is kept."""
    left = effort.share()
    if _below(_shares(demand, level, span), floor).any():
        return level
    each, now = _played(demand.alone_s, span), level
    work = float(works(demand, now[None], horizon_s=span[0], warm_s=span[1])[0])
    while True:
        rows = level_moves(now, levels)
        rows = rows[(rows[:, now >= levels] == now[now >= levels]).all(axis=1)]
        cost = 2 * each * len(rows)  # played together, at worst each once more alone
        if cost > left:
            return now
        left -= cost
        effort.spend(cost)
        found = works(demand, rows, horizon_s=span[0], warm_s=span[1])
        for at in np.argsort(-found, kind="stable").tolist():
            if found[at] <= work * (1 + GAIN):
                return now
            if not _below(_shares(demand, rows[at], span), floor).any():
                now, work = rows[at], float(found[at])
                break
        else:
            return now
