"""Jobs that compute and communicate over shared links: rates of a fluid model, exact from event to event.

Job j computes for compute_s an iteration; start_s after its beginning communication may start, whose delay
passes first, and which then moves data at a speed x in [0, 1] that loads link e with x busy_s / (comm_s -
delay_s); both done, the next iteration begins. Higher levels are served first and pre-empt lower ones; inside
a level x is max-min fair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import Demand
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.kernels.jit import fixed
from tessera.solvers.network.kernels import fluid as kernel
from tessera.solvers.network.kernels import groups

MOMENT = 1e-9
"""Events closer than this share of the shortest iteration come at one moment."""

MOST_NOISE = 5.0
"""With much more some iterations last no time at all, and events never end."""

_MOST_CODED = 39  # pairs of jobs, each above, below or beside, that an int64 can name: 3^39 < 2^63


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What jobs do over a window, on average."""

    iterations: Floats  # (J,) a second; a part of compute done is that part of an iteration
    comm: Floats  # (J,) seconds of communication a second, delay included; x = 1 counts full

    def work_per_s(self, demand: Demand) -> float:
        """Return the flop done a second (Crux eq. 1: U_T / T)."""
        return float(demand.work_flop @ self.iterations)


def simulate(
    demand: Demand,
    level: Ints,
    *,
    horizon_s: float,
    warm_s: float = 0.0,
    offset_s: Floats | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Run:
    """Return the rates over [``warm_s``, ``warm_s`` + ``horizon_s``]; all begin at 0.

    ``level`` int64[jobs], any integers: the higher is served first. ``offset_s`` float64[jobs]: when each
    job's first iteration begins. ``noise``: standard deviation of the logarithm of the factor (mean 1) of
    each iteration's compute_s and start_s; equal seeds draw equal factors for a job's n-th iteration.

    Raises:
        InvalidInput: shapes or numbers that have no meaning.
    """
    if len(level) != demand.jobs:
        raise InvalidInput("level", f"has {len(level)} entries for {demand.jobs} jobs")
    if not 0 <= noise <= MOST_NOISE or seed < 0:
        raise InvalidInput("noise", f"must be 0 to {MOST_NOISE:g}, and seed at least 0")
    begin_s = np.zeros(demand.jobs) if offset_s is None else np.asarray(offset_s, np.float64)
    if len(begin_s) != demand.jobs or not ((begin_s >= 0) & np.isfinite(begin_s)).all():
        raise InvalidInput("offset_s", "must be a number of at least 0 for each job")
    ready = _prepared(demand)
    window = _window(demand, horizon_s, warm_s)
    iterations, comm = np.zeros(demand.jobs), np.zeros(demand.jobs)
    kernel.rates(
        ready.times,
        ready.uses,
        ready.groups,
        fixed(np.asarray(level, np.int64)),
        fixed(begin_s),
        window,
        (float(noise), int(seed)),
        iterations,
        comm,
    )
    return Run(iterations=iterations / horizon_s, comm=comm / horizon_s)


def works(demand: Demand, levels: Ints, *, horizon_s: float, warm_s: float = 0.0) -> Floats:
    """Return the flop a second under each row of ``levels``, (R,); as ``simulate`` has them.

    Jobs that cannot meet are played apart, and once for all rows that order those alike that meet.

    Raises:
        InvalidInput: shapes or numbers that have no meaning.
    """
    if levels.ndim != 2 or levels.shape[1] != demand.jobs:
        raise InvalidInput("levels", f"must be [assignments, {demand.jobs} jobs]")
    ready = _prepared(demand)
    window = _window(demand, horizon_s, warm_s)
    total = np.zeros(len(levels))
    if len(levels) == 0:
        return total
    rows = np.ascontiguousarray(levels, np.int64)
    work_flop = fixed(demand.work_flop)
    group_start, member, _ = ready.groups
    for g in range(len(group_start) - 1):
        jobs = member[group_start[g] : group_start[g + 1]]
        distinct, which = _distinct(rows[:, jobs], *_pairs(ready.uses, jobs))
        work = np.empty(len(distinct))
        kernel.patterns(
            ready.times, ready.uses, ready.groups, g, fixed(rows[distinct]), work_flop, window, work
        )
        total += work[which]
    return total / horizon_s


def meetings(demand: Demand) -> list[Ints]:
    """Return the groups of two jobs or more that can slow each other down, directly or through others.

    Jobs that share only links that they cannot fill together never do.
    """
    group_start, member, _ = _prepared(demand).groups
    found = np.split(member, group_start[1:-1])
    return [jobs for jobs in found if len(jobs) > 1]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A demand as the loops want it."""

    times: kernel.Times
    uses: groups.Uses
    groups: kernel.Groups


def _prepared(demand: Demand) -> _Prepared:
    d = demand
    send_s = d.send_s
    link, use_start = fixed(d.link), fixed(d.link_start)
    share = d.busy_s / send_s[d.job]
    keep = groups.tight((use_start, link, fixed(share)), d.links)
    kept_start = np.concatenate([[0], np.cumsum(keep)])[d.link_start]
    group_start, member, first_link, renamed = groups.grouped(
        fixed(kept_start), fixed(d.link[keep]), d.links
    )
    times = fixed(d.compute_s), fixed(d.start_s), fixed(d.delay_s), fixed(send_s)
    return _Prepared(
        times,
        (fixed(kept_start), fixed(renamed), fixed(share[keep])),
        (fixed(group_start), fixed(member), fixed(first_link)),
    )


def _window(demand: Demand, horizon_s: float, warm_s: float) -> kernel.Window:
    if not (0 < horizon_s < math.inf and 0 <= warm_s < math.inf):
        raise InvalidInput("horizon_s", "must be above 0 and warm_s at least 0, both finite")
    end_s = float(warm_s + horizon_s)
    shortest_s = float(demand.alone_s.min(initial=math.inf))
    apart_s = MOMENT * shortest_s if demand.jobs else 0.0
    return float(warm_s), end_s, max(apart_s, 4 * float(np.spacing(end_s)))


def _pairs(uses: groups.Uses, jobs: Ints) -> tuple[Ints, Ints]:
    """Return the places in ``jobs`` of each two that meet on a link; none where they are too many to name."""
    use_start, link, _ = uses
    if len(jobs) * (len(jobs) - 1) // 2 > _MOST_CODED:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    on = [set(link[use_start[j] : use_start[j + 1]].tolist()) for j in jobs.tolist()]
    meet = [(a, b) for b in range(len(on)) for a in range(b) if not on[a].isdisjoint(on[b])]
    found = np.array(meet, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _distinct(levels: Ints, one: Ints, other: Ints) -> tuple[Ints, Ints]:
    """Return rows of which no two do the same, and for each row which of them does as it does.

    Two do where they put each pair that meets, (``one``, ``other``), into the same relation: who meets nobody
    of a level notices it through those alone that it meets.
    """
    count, jobs = levels.shape
    if jobs > 1 and len(one) == 0:
        every = np.arange(count, dtype=np.int64)
        return every, every
    relation = np.sign(levels[:, one] - levels[:, other]) + 1
    code = relation @ (3 ** np.arange(len(one), dtype=np.int64))
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), which.astype(np.int64)
