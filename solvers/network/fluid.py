"""A fluid model of jobs that compute and communicate over shared links, exact between events.

Job j computes for compute_s in each iteration. Communication may start start_s after the beginning
of the iteration. Its delay passes first; then data moves at a speed x in [0, 1] that loads link e
with x busy_s / (comm_s - delay_s). When both are done, the next iteration begins. Higher priority
levels are served first and preempt lower ones; inside a level, x is max-min fair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.kernels import fluid as kernel
from tessera.solvers.network.kernels import groups
from tessera.solvers.sums import dot

MOMENT = 1e-9
"""Events that differ by less than this share of the shortest iteration happen at one moment."""

MOST_NOISE = 5.0
"""With much more noise, some iterations last no time at all, and events never end."""

_MOST_CODED = 39  # pairs of jobs, each above, below or equal, that an int64 can encode: 3^39 < 2^63


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FluidRun:
    """The average rates of jobs over a window."""

    iterations: Floats  # (J,) per second; a part of the compute counts as that part of an iteration
    comm: Floats  # (J,) seconds of communication per second, delay included; x = 1 counts fully

    def work_per_s(self, demand: LinkDemand) -> float:
        """Return the flop done per second (Crux eq. 1: U_T / T)."""
        return dot(demand.work_flop, self.iterations)


def simulate_fluid(
    demand: LinkDemand,
    level: Ints,
    *,
    horizon_s: float,
    warm_s: float = 0.0,
    offset_s: Floats | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> FluidRun:
    """Return the rates over [``warm_s``, ``warm_s`` + ``horizon_s``].

    ``level`` (int64[jobs]) is any integers; higher levels are served first. ``offset_s``
    (float64[jobs]) is the begin of each job's first iteration; if it is None, all begin at 0.
    ``noise`` is the standard deviation of the logarithm of a factor (mean 1) on each iteration's
    compute_s and start_s. Equal seeds draw equal factors for the n-th iteration of a job.

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
    kernel.add_rates(
        ready.times,
        ready.uses,
        ready.groups,
        as_fixed_array(np.asarray(level, np.int64)),
        as_fixed_array(begin_s),
        window,
        (float(noise), int(seed)),
        iterations,
        comm,
    )
    return FluidRun(iterations=iterations / horizon_s, comm=comm / horizon_s)


def flop_under_levels(
    demand: LinkDemand, levels: Ints, *, horizon_s: float, warm_s: float = 0.0
) -> Floats:
    """Return the flop per second under each row of ``levels``, (R,).

    The meaning of levels is that of ``simulate_fluid``. Jobs that cannot contend are played separately.
    Rows that order all contending jobs alike are played once.

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
    work_flop = as_fixed_array(demand.work_flop)
    group_start, member, _ = ready.groups
    for g in range(len(group_start) - 1):
        jobs = member[group_start[g] : group_start[g + 1]]
        distinct, which = _distinct(rows[:, jobs], *_pairs(ready.uses, jobs))
        work = np.empty(len(distinct))
        kernel.play_rows(
            ready.times,
            ready.uses,
            ready.groups,
            g,
            as_fixed_array(rows[distinct]),
            work_flop,
            window,
            work,
        )
        total += work[which]
    return total / horizon_s


def contending_groups(demand: LinkDemand) -> list[Ints]:
    """Return the groups of two or more jobs that can slow each other down.

    They do so directly or through others. Jobs whose shared links cannot be filled by them together
    never do.
    """
    group_start, member, _ = _prepared(demand).groups
    parts = np.split(member, group_start[1:-1])
    return [jobs for jobs in parts if len(jobs) > 1]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A demand in the form that the loops use."""

    times: kernel.Times
    uses: groups.Uses
    groups: kernel.Groups


def _prepared(demand: LinkDemand) -> _Prepared:
    d = demand
    send_s = d.send_s
    link, use_start = as_fixed_array(d.link), as_fixed_array(d.link_start)
    share = d.busy_s / send_s[d.job]
    keep = groups.uses_that_matter((use_start, link, as_fixed_array(share)), d.links)
    kept_start = np.concatenate([[0], np.cumsum(keep)])[d.link_start]
    group_start, member, first_link, renamed = groups.group_by_links(
        as_fixed_array(kept_start), as_fixed_array(d.link[keep]), d.links
    )
    times = (
        as_fixed_array(d.compute_s),
        as_fixed_array(d.start_s),
        as_fixed_array(d.delay_s),
        as_fixed_array(send_s),
    )
    return _Prepared(
        times,
        (as_fixed_array(kept_start), as_fixed_array(renamed), as_fixed_array(share[keep])),
        (as_fixed_array(group_start), as_fixed_array(member), as_fixed_array(first_link)),
    )


def _window(demand: LinkDemand, horizon_s: float, warm_s: float) -> kernel.CountWindow:
    if not (0 < horizon_s < math.inf and 0 <= warm_s < math.inf):
        raise InvalidInput("horizon_s", "must be above 0 and warm_s at least 0, both finite")
    end_s = float(warm_s + horizon_s)
    shortest_s = float(demand.alone_s.min(initial=math.inf))
    apart_s = MOMENT * shortest_s if demand.jobs else 0.0
    return float(warm_s), end_s, max(apart_s, 4 * float(np.spacing(end_s)))


def _pairs(uses: groups.Uses, jobs: Ints) -> tuple[Ints, Ints]:
    """Return the places in ``jobs`` of each two jobs that share a link.

    The result is empty if there are too many pairs to encode.
    """
    use_start, link, _ = uses
    if len(jobs) * (len(jobs) - 1) // 2 > _MOST_CODED:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    on = [set(link[use_start[j] : use_start[j + 1]].tolist()) for j in jobs.tolist()]
    meet = [(a, b) for b in range(len(on)) for a in range(b) if not on[a].isdisjoint(on[b])]
    places = np.array(meet, dtype=np.int64).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def _distinct(levels: Ints, first_job: Ints, second_job: Ints) -> tuple[Ints, Ints]:
    """Return rows with distinct effects, and for each row which of them has the same effect.

    Two rows have the same effect if they put each contending pair, (``first_job``, ``second_job``),
    into the same relation. A job that shares no link with another notices its level only through
    jobs that it shares a link with.
    """
    count, jobs = levels.shape
    if jobs > 1 and len(first_job) == 0:
        every = np.arange(count, dtype=np.int64)
        return every, every
    relation = np.sign(levels[:, first_job] - levels[:, second_job]) + 1
    code = relation @ (3 ** np.arange(len(first_job), dtype=np.int64))
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), which.astype(np.int64)
