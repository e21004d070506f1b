"""Correction factors k_j of priorities P_j = k_j I_j (Crux 4.2), exact in the long run.

The paper plays out a job and a reference job r under both orders, and takes the ratio at which the
orders tie. With n the iterations per second, first and last, that is

    k_j = t_j (n_j first - n_j last) / (t_r (n_r first - n_r last)),   k_r = 1,

so P_j > P_r exactly if serving j first yields more work than serving r first. The urgent job runs
as if alone. An iteration of the other job that begins at x ends at Phi(x), which is monotone and
shifts with the urgent job's period. So Phi is the lift of a circle map: its mean period exists and
does not depend on the start phase. It is followed in whole ticks until a phase recurs.

If the pair shares links, it is played on these: while the urgent job sends, the other one sends at
the speed that the fullest shared link leaves it. t remains that of I = W / t, the slowest link
alone, since only the product P = k I has a meaning. A pair that cannot fill a link together never
contends. It is played as if both jobs needed all of one link, which is the paper's way of comparing
jobs through r.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.linalg import lsqr

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.kernels.factors import busiest_neighbors, low_periods, pair_speeds

TICKS_A_SECOND: Final = 9_009e6
"""Ticks in a second.

Microseconds, and their thirds, sevenths, ninths, elevenths and thirteenths, are whole ticks."""
MOST_STEPS: Final = 4_000
"""Iterations that are followed until a phase recurs.

If none recurs, the period is usually known to 1e-7 of it, and at worst to 2 / ``MOST_STEPS`` of the
urgent job's period."""
FIT_STEPS: Final = 500
"""The same if k is fitted to many pairs."""
NARROW_BOUNDS: Final = (2 / 3, 3 / 2)
WIDE_BOUNDS: Final = (1 / 4, 4.0)
"""Bounds of k, from the experiments in the notes; WIDE does harm if links are saturated."""
UNLIMITED_BOUNDS: Final = (1e-6, 1e6)


class Clip(StrEnum):
    """A limit on the distance of k from 1."""

    NARROW = "narrow"  # [2/3, 3/2]
    # [1/4, 4] if all links that the job shares are offered less than 1, else [2/3, 3/2]
    BY_LOAD = "by-load"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AloneTimes:
    """The times of jobs alone, seconds, one entry for each job."""

    compute_s: Floats
    start_s: Floats  # the earliest time at which communication may begin
    delay_s: Floats  # the part of communication that needs no bandwidth; it comes first
    comm_s: Floats  # delay included

    @classmethod
    def of(cls, demand: LinkDemand, jobs: Ints) -> AloneTimes:
        """Return the timing of these jobs."""
        return cls(
            compute_s=demand.compute_s[jobs],
            start_s=demand.start_s[jobs],
            delay_s=demand.delay_s[jobs],
            comm_s=demand.comm_s[jobs],
        )


def correction_factors(
    demand: LinkDemand, *, references: int = 1, clip: Clip = Clip.BY_LOAD
) -> Floats:
    """Return k, (J,); it is 1 for jobs without traffic.

    If ``references`` is 1, each job is compared with one reference job, as in the paper. If it is
    larger, each job is compared with that many of the jobs that it shares a link with, those with
    most traffic. k is then the best fit to all these pairs (``fit_factors``), which is an open
    problem of the paper.

    Raises:
        InvalidInput: references below 1.
    """
    if references < 1:
        raise InvalidInput("references", f"is {references}; it must be at least 1")
    sending = np.flatnonzero(demand.comm_s > 0)
    k = np.ones(demand.jobs)
    if len(sending) < 2:
        return k
    if references > 1:
        k = fit_factors(demand, references)
    else:
        k[sending] = factors_against(demand, sending, np.full(len(sending), reference_of(demand)))
    low, high = _bounds(demand, clip)
    clipped: Floats = np.clip(k, low, high)
    return clipped


def reference_of(demand: LinkDemand) -> int:
    """Return the job with most traffic, ties to the first.

    Traffic is in link seconds per second, summed over links. The paper does not say whether it is
    meant per iteration or per second. Utilization is lost per second, and a job of long iterations
    that sends rarely hardly meets others, however much it sends then.
    """
    return int(np.argmax(_traffic(demand)))


def factors_against(
    demand: LinkDemand, jobs: Ints, references: Ints, *, steps: int = MOST_STEPS
) -> Floats:
    """Return k of each job against its reference, unclipped, from 0 to inf.

    It is 1 if neither order matters. All jobs must have traffic. It is inf if the reference loses
    nothing by being last, and 0 if the job gains nothing by being first. Both are common, so k must
    be clipped.
    """
    speed, _ = _meetings(demand, jobs, references)
    apart = (speed >= 1).all(axis=1)
    speed[apart] = 0.0
    k = tie_factors(
        AloneTimes.of(demand, jobs), AloneTimes.of(demand, references), speed, steps=steps
    )
    k[jobs == references] = 1.0
    return k


def tie_factors(
    job: AloneTimes, reference: AloneTimes, speed: Floats, *, steps: int = MOST_STEPS
) -> Floats:
    """Return k of each job against its reference, for given speeds.

    ``speed`` (pairs, 2) is the speed of the job, and of the reference, while the other one is
    served first.
    """
    fractional = np.any((speed > 0) & (speed < 1), axis=1)
    ticks = _ticks(job, reference, fractional)
    own, other = ticks[:3], ticks[3:6]
    comm, other_comm = ticks[6:]
    alone, other_alone = _alone(own), _alone(other)
    last, slack = _low(other, own, speed[:, 0], steps=steps)
    other_last, other_slack = _low(own, other, speed[:, 1], steps=steps)
    gain, loss = last - alone, other_last - other_alone
    gain[gain <= slack + 1e-9 * alone] = 0.0
    loss[loss <= other_slack + 1e-9 * other_alone] = 0.0
    k = np.ones(len(comm))
    finite = np.isfinite(last) & np.isfinite(other_last)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Both sides are products of small integers, so a rational k is exact.
        k[finite] = (comm * gain * other_alone * other_last)[finite] / (
            other_comm * loss * alone * last
        )[finite]
        rates = np.where(np.isfinite(last), gain / last, 1.0) * comm / alone
        other_rates = np.where(np.isfinite(other_last), loss / other_last, 1.0)
        starved = rates / (other_rates * other_comm / other_alone)
    k[~finite] = starved[~finite]
    k[(gain == 0) & (loss == 0)] = 1.0
    return k


def fit_factors(demand: LinkDemand, references: int) -> Floats:
    """Return the best fit of k, (J,), to pairs of jobs that share links.

    Each job is paired with up to ``references`` others. It is a least-squares fit of log k_j - log
    k_r to the logarithm of the pair's factor in [1/4, 4], weighted by the product of their loads
    where they share a link. The mean of log k is 0 among jobs connected by such pairs.
    """
    first, second = _pairs(demand, references)
    speed, weight = _meetings(demand, first, second)
    meets = (speed < 1).any(axis=1)
    if not meets.any():
        return np.ones(demand.jobs)
    first, second, weight = first[meets], second[meets], np.sqrt(weight[meets])
    wanted = np.log(np.clip(factors_against(demand, first, second, steps=FIT_STEPS), *WIDE_BOUNDS))
    row = np.arange(len(first))
    system = coo_matrix(
        (
            np.concatenate([weight, -weight]),
            (np.concatenate([row, row]), np.concatenate([first, second])),
        ),
        shape=(len(first), demand.jobs),
    ).tocsr()
    solved = lsqr(system, wanted * weight, atol=1e-12, btol=1e-12)[0]
    fit: Floats = np.exp(np.asarray(solved, dtype=np.float64))
    return fit


def _traffic(demand: LinkDemand) -> Floats:
    duty = demand.busy_s / demand.alone_s[demand.job]
    return np.bincount(demand.job, weights=duty, minlength=demand.jobs).astype(np.float64)


def _bounds(demand: LinkDemand, clip: Clip) -> tuple[Floats, Floats]:
    """Return the bounds of k, (J,) each."""
    wide = np.zeros(demand.jobs, dtype=np.bool_)
    if clip is Clip.BY_LOAD:
        wide = ~_saturated(demand)
    low, high = UNLIMITED_BOUNDS if clip is Clip.NONE else NARROW_BOUNDS
    return np.where(wide, WIDE_BOUNDS[0], low), np.where(wide, WIDE_BOUNDS[1], high)


def _saturated(demand: LinkDemand) -> Bools:
    """Return whether each job shares a link that is offered 1 or more, (J,)."""
    shared = np.bincount(demand.link, minlength=demand.links) > 1
    full = shared & (demand.offered >= 1)
    is_saturated = np.zeros(demand.jobs, dtype=np.bool_)
    is_saturated[demand.job[full[demand.link]]] = True
    return is_saturated


def _meetings(demand: LinkDemand, first: Ints, second: Ints) -> tuple[Floats, Floats]:
    d = demand
    send_s = d.send_s
    speed, weight = np.ones((len(first), 2)), np.zeros(len(first))
    pair_speeds(
        as_fixed_array(first),
        as_fixed_array(second),
        as_fixed_array(d.link_start),
        as_fixed_array(d.link),
        as_fixed_array(d.busy_s / send_s[d.job]),
        as_fixed_array(d.busy_s / d.alone_s[d.job]),
        speed,
        weight,
    )
    return speed, weight


def _pairs(demand: LinkDemand, most: int) -> tuple[Ints, Ints]:
    """Return pairs of each job with the jobs of most traffic among those on its links.

    No pair occurs twice.
    """
    d = demand
    traffic = _traffic(d)
    by_link = np.lexsort((d.job, -traffic[d.job], d.link))
    user_start = np.searchsorted(d.link[by_link], np.arange(d.links + 1))
    busiest = np.empty((d.jobs, most), dtype=np.int64)
    busiest_neighbors(
        as_fixed_array(d.link_start),
        as_fixed_array(d.link),
        as_fixed_array(user_start),
        as_fixed_array(d.job[by_link]),
        as_fixed_array(traffic),
        busiest,
    )
    job, place = np.nonzero(busiest >= 0)
    other = busiest[job, place]
    key = np.unique(np.minimum(job, other) * d.jobs + np.maximum(job, other))
    return key // d.jobs, key % d.jobs


def _parts(timing: AloneTimes) -> tuple[Floats, Floats, Floats]:
    """Return compute, the earliest start of sending, and its duration at full speed; seconds."""
    return timing.compute_s, timing.start_s + timing.delay_s, timing.comm_s - timing.delay_s


def _tick_s(*timings: AloneTimes) -> float:
    """Return the length of a tick such that no sum of times needs more than a float's 53 bits."""
    longest_s = max(float((t.compute_s + t.start_s + t.comm_s).max(initial=0.0)) for t in timings)
    a_second = TICKS_A_SECOND
    while longest_s * a_second > 2.0**50:
        a_second /= 1000
    return 1 / a_second


def _ticks(job: AloneTimes, reference: AloneTimes, fractional: Bools) -> list[Floats]:
    """Return both jobs' parts and t as whole numbers of ticks, pair by pair.

    They have no common divisor, which keeps products small. The exception are ``fractional`` pairs,
    in which moments fall between ticks.
    """
    size = _tick_s(job, reference)
    values = np.stack([*_parts(job), *_parts(reference), job.comm_s, reference.comm_s])
    whole = np.rint(values / size).astype(np.int64)
    whole[(whole == 0) & (values > 0)] = 1
    whole //= np.where(fractional, 1, np.gcd.reduce(whole, axis=0))
    return list(whole.astype(np.float64))


def _alone(parts: list[Floats]) -> Floats:
    compute, start, send = parts
    alone: Floats = np.maximum(compute, start + send)
    return alone


def _low(
    high: list[Floats],
    low: list[Floats],
    speed: Floats,
    phase: Floats | None = None,
    *,
    steps: int = MOST_STEPS,
) -> tuple[Floats, Floats]:
    """Return the mean period of ``low`` when served last, and its largest error; all in ticks."""
    count = len(speed)
    period, slack = np.empty(count), np.empty(count)
    begin = np.zeros(count) if phase is None else phase
    compute, start, send = (as_fixed_array(each) for each in low)
    low_periods(
        as_fixed_array(_alone(high)),
        as_fixed_array(high[2]),
        compute,
        start,
        send,
        as_fixed_array(speed),
        as_fixed_array(begin),
        steps,
        period,
        slack,
    )
    return np.maximum(period, _alone(low)), slack
