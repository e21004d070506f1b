"""Laws of correction factors and of orders that are kept, on random pairs of jobs."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.solvers.network.factors import (
    MOST_STEPS,
    AloneTimes,
    factors_against,
    low_periods_s,
)
from tessera.solvers.network.fluid import flop_under_levels
from tessera.solvers.network.priorities import stable_order
from tests.support.laws import examples
from tests.support.networks import FluidJob, a_demand

TWELFTHS = st.integers(1, 48).map(lambda n: n / 12)
ORDERS = np.array([[1, 0], [0, 1]])


@st.composite
def timings(draw: st.DrawFn) -> AloneTimes:
    """Draw a job with rational times."""
    compute_s, part, comm_s = draw(TWELFTHS), draw(st.integers(0, 6)), draw(TWELFTHS)
    return AloneTimes(
        compute_s=np.array([compute_s]),
        start_s=np.array([compute_s * part / 6]),
        delay_s=np.zeros(1),
        comm_s=np.array([comm_s]),
    )


def _alone_s(job: AloneTimes) -> float:
    return float(max(job.compute_s[0], job.start_s[0] + job.comm_s[0]))


def _simulated_s(high: AloneTimes, low: AloneTimes, phase: Fraction, iterations: int) -> Fraction:
    """Return the exact time at which ``low`` has done ``iterations`` iterations, simulated step by step."""
    compute, start, send = (
        Fraction(v[0]).limit_denominator(10**6) for v in (low.compute_s, low.start_s, low.comm_s)
    )
    busy = Fraction(high.comm_s[0]).limit_denominator(10**6)
    period = Fraction(_alone_s(high)).limit_denominator(10**6)
    at = phase
    for _ in range(iterations):
        left, now = send, at + start
        while left > 0:
            into = now % period
            if into < busy:
                now += busy - into
                continue
            step = min(left, period - into)
            now, left = now + step, left - step
        at = max(at + compute, now)
    return at - phase


@examples(60)
@given(high=timings(), low=timings(), phase=st.integers(0, 47))
def test_the_period_of_the_last_job_matches_a_step_by_step_run_from_any_start(
    high: AloneTimes, low: AloneTimes, phase: int
) -> None:
    found, slack = low_periods_s(high, low, np.zeros(1))
    moved, _ = low_periods_s(high, low, np.zeros(1), phase_s=phase / 12)
    if math.isinf(found[0]):
        assert high.comm_s[0] >= _alone_s(high) - 1e-9
        assert math.isinf(moved[0])
        return
    assert slack[0] == 0
    assert abs(moved[0] - found[0]) <= 1e-12 * found[0]
    count = 60
    mean = float(_simulated_s(high, low, Fraction(phase, 12), count)) / count
    assert abs(mean - found[0]) <= _alone_s(high) / count + 1e-9


@examples(100)
@given(high=timings(), low=timings(), speed=st.sampled_from([0.0, 0.25, 1 / 3, 0.9]))
def test_the_period_of_the_last_job_keeps_its_proven_bounds(
    high: AloneTimes, low: AloneTimes, speed: float
) -> None:
    found, slack = (v[0] for v in low_periods_s(high, low, np.array([speed])))
    t, share = low.comm_s[0], high.comm_s[0] / _alone_s(high)
    free_s = _alone_s(high) - high.comm_s[0]
    least = max(
        _alone_s(low), t / (1 - share * (1 - speed)) if share * (1 - speed) < 1 else math.inf
    )
    assert found + slack >= least - 1e-6
    if speed == 0 and free_s > 1e-9:
        blocked_s = high.comm_s[0] * math.ceil(t / free_s - 1e-9)
        assert found <= max(low.compute_s[0], low.start_s[0] + t + blocked_s) + 1e-6
    assert slack <= 2 * _alone_s(high) / MOST_STEPS


def _pair(
    first: AloneTimes, second: AloneTimes, works_flop: tuple[float, float], shared: float
) -> list[FluidJob]:
    return [
        FluidJob(
            work=work,
            compute_s=float(job.compute_s[0]),
            start_s=float(job.start_s[0]),
            busy_s={0: float(job.comm_s[0]) * shared, own: float(job.comm_s[0])},
        )
        for job, work, own in zip((first, second), works_flop, (1, 2), strict=True)
    ]


@examples(50)
@given(
    first=timings(),
    second=timings(),
    weight=st.sampled_from([0.5, 1.0, 1.1, 1.5, 3.0]),
    shared=st.sampled_from([1.0, 0.75, 0.6]),
)
def test_serving_the_job_with_the_higher_unclipped_priority_first_does_more_work(
    first: AloneTimes, second: AloneTimes, weight: float, shared: float
) -> None:
    demand = a_demand(*_pair(first, second, (weight, 1.0), shared))
    k = float(factors_against(demand, np.array([0]), np.array([1]))[0])
    mine, other = k * demand.intensity[0], demand.intensity[1]
    slowest_s = demand.alone_s.max()
    work = flop_under_levels(demand, ORDERS, horizon_s=600 * slowest_s, warm_s=20 * slowest_s)
    # an iteration at each end of the window
    edge = 2 * float(demand.work_flop.sum()) / (600 * slowest_s)
    if work[0] > work[1] + edge:
        assert mine > other
    elif work[1] > work[0] + edge:
        assert mine < other


@examples(60)
@given(first=timings(), second=timings(), shared=st.sampled_from([1.0, 0.75]))
def test_the_factors_of_a_pair_in_both_directions_are_reciprocal(
    first: AloneTimes, second: AloneTimes, shared: float
) -> None:
    demand = a_demand(*_pair(first, second, (1.0, 1.0), shared))
    k = factors_against(demand, np.array([0, 1]), np.array([1, 0]))
    if 0 < k[0] < math.inf:
        assert math.isclose(k[0] * k[1], 1.0, rel_tol=1e-9)
    else:
        assert {0.0, math.inf} == set(k.tolist())


@examples(60)
@given(
    priority=st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
    margin=st.floats(0, 1),
    data=st.data(),
)
def test_a_stable_order_separates_distant_priorities_and_makes_no_needless_change(
    priority: list[float], margin: float, data: st.DataObject
) -> None:
    p = np.array(priority)
    earlier = np.array(data.draw(st.permutations(range(len(p)))), dtype=np.int64)
    order = stable_order(p, earlier, margin=margin)
    assert sorted(order.tolist()) == list(range(len(p)))
    for at, job in enumerate(order.tolist()):
        assert not (p[order[at + 1 :]] > (1 + margin) * p[job]).any()
    again = stable_order(p, order, margin=margin)
    assert again.tolist() == order.tolist()
    if all(p[b] <= (1 + margin) * p[a] for i, a in enumerate(earlier) for b in earlier[i + 1 :]):
        assert order.tolist() == earlier.tolist()
    if margin == 0:
        assert all(p[a] >= p[b] for a, b in pairwise(order.tolist()))
