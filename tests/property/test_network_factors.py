"""Laws of the fluid engine, of correction factors, and of orders that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.tables import Ints
from tessera.solvers.network.factors import (
    MOST_STEPS,
    AloneTimes,
    factors_against,
)
from tessera.solvers.network.fluid import flop_under_levels, simulate_fluid
from tessera.solvers.network.priorities import stable_order
from tests.support.laws import examples
from tests.support.network_periods import low_periods_s
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


NEAR = 1e-7


@dataclass
class _ExactEngine:
    """A job as the second engine sees it; all times are fractions."""

    job: FluidJob
    level: int
    compute: Fraction = Fraction(0)  # remaining in this iteration
    wait: Fraction = Fraction(0)  # until sending may start
    send: Fraction = Fraction(0)  # remaining seconds at full speed
    iterations: Fraction = Fraction(0)
    carried: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        self.busy = {e: Fraction(b) for e, b in self.job.busy_s.items()}
        self.full = max(self.busy.values(), default=Fraction(0))
        self.c = Fraction(self.job.compute_s)
        self.begin()

    def begin(self) -> None:
        start_s = self.job.compute_s if self.job.start_s is None else self.job.start_s
        self.compute, self.send = self.c, self.full
        self.wait = Fraction(start_s) + Fraction(self.job.delay_s)

    @property
    def sends(self) -> bool:
        return self.wait == 0 and self.send > 0


def _speeds(jobs: Sequence[_ExactEngine]) -> dict[int, Fraction]:
    """Return the max-min fair speeds of each level in turn, computed by their definition."""
    room: dict[int, Fraction] = {e: Fraction(1) for job in jobs for e in job.busy}
    speed: dict[int, Fraction] = {}
    for level in sorted({job.level for job in jobs}, reverse=True):
        rising = [i for i, job in enumerate(jobs) if job.level == level and job.sends]
        height = Fraction(0)
        while rising:
            take = {
                e: sum(
                    (jobs[i].busy.get(e, Fraction(0)) / jobs[i].full for i in rising), Fraction(0)
                )
                for e in room
            }
            step = min([Fraction(1) - height] + [room[e] / t for e, t in take.items() if t > 0])
            height += step
            for e, t in take.items():
                room[e] -= t * step
            held = [i for i in rising if height == 1 or any(room[e] == 0 for e in jobs[i].busy)]
            assert held
            speed.update(dict.fromkeys(held, height))
            rising = [i for i in rising if i not in held]
    return speed


def _exact_rates(
    jobs: Sequence[FluidJob], level: Sequence[int], horizon: Fraction
) -> list[_ExactEngine]:
    """Simulate the jobs in exact arithmetic, and recompute everything at each event."""
    all_ = [_ExactEngine(job=job, level=at) for job, at in zip(jobs, level, strict=True)]
    now = Fraction(0)
    while now < horizon:
        speed = _speeds(all_)
        steps = [horizon - now]
        for i, one in enumerate(all_):
            steps += [left for left in (one.compute, one.wait) if left > 0]
            if speed.get(i, 0) > 0:
                steps.append(one.send / speed[i])
        step = min(steps)
        now += step
        for i, one in enumerate(all_):
            one.iterations += min(step, one.compute) / one.c
            one.compute = max(Fraction(0), one.compute - step)
            one.carried += speed.get(i, Fraction(0)) * step
            if one.sends:
                one.send -= speed.get(i, Fraction(0)) * step
            one.wait = max(Fraction(0), one.wait - step)
            if one.compute == 0 and one.wait == 0 and one.send == 0:
                one.begin()
    return all_


quarters = st.integers(1, 12).map(lambda n: n / 4)


@st.composite
def fluid_jobs(draw: st.DrawFn, links: int = 3, least_links: int = 0) -> FluidJob:
    compute_s = draw(quarters)
    return FluidJob(
        work=draw(st.integers(1, 50)),
        compute_s=compute_s,
        start_s=compute_s * draw(st.sampled_from([0.0, 0.5, 1.0])),
        delay_s=draw(st.sampled_from([0.0, 0.0, 0.25])),
        busy_s=draw(
            st.dictionaries(
                st.integers(0, links - 1), quarters, min_size=least_links, max_size=links
            )
        ),
    )


@st.composite
def cases(draw: st.DrawFn, most: int = 4) -> tuple[list[FluidJob], list[int]]:
    jobs = draw(st.lists(fluid_jobs(), min_size=1, max_size=most))
    return jobs, [draw(st.integers(0, 2)) for _ in jobs]


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


@examples(150)
@given(case=cases(), horizon=st.integers(1, 160).map(lambda n: Fraction(n, 8)))
def test_rates_match_an_exact_engine_in_fractions(
    case: tuple[list[FluidJob], list[int]], horizon: Fraction
) -> None:
    jobs, level = case
    run = simulate_fluid(a_demand(*jobs), _ints(level), horizon_s=float(horizon))
    for i, one in enumerate(_exact_rates(jobs, level, horizon)):
        assert run.iterations[i] * float(horizon) == pytest.approx(float(one.iterations), abs=NEAR)
        if one.job.delay_s == 0:
            assert run.comm[i] * float(horizon) == pytest.approx(float(one.carried), abs=NEAR)


@examples(150)
@given(
    jobs=st.lists(fluid_jobs(links=1, least_links=1), min_size=1, max_size=6),
    data=st.data(),
    horizon_s=st.integers(1, 500),
)
def test_on_one_link_the_carried_intensity_is_the_work_done_up_to_one_iteration_per_job(
    jobs: list[FluidJob], data: st.DataObject, horizon_s: int
) -> None:
    """This is the finite form of Crux's Theorem 1, which holds for all levels."""
    level = _ints([data.draw(st.integers(0, 3)) for _ in jobs])
    demand = a_demand(*jobs)
    run = simulate_fluid(demand, level, horizon_s=horizon_s)
    carried = float(demand.intensity @ run.comm) * horizon_s
    done = run.work_per_s(demand) * horizon_s
    assert abs(carried - done) <= demand.work_flop.sum() * (1 + NEAR)


@examples(60)
@given(case=cases(most=5), data=st.data())
def test_many_assignments_in_one_call_give_the_results_of_single_calls(
    case: tuple[list[FluidJob], list[int]], data: st.DataObject
) -> None:
    jobs, level = case
    rows = [level] + [
        [data.draw(st.integers(0, 3)) for _ in jobs] for _ in range(data.draw(st.integers(0, 12)))
    ]
    demand = a_demand(*jobs)
    found = flop_under_levels(demand, np.array(rows, dtype=np.int64), horizon_s=20.0, warm_s=3.0)
    apart = [
        simulate_fluid(demand, _ints(row), horizon_s=20.0, warm_s=3.0).work_per_s(demand)
        for row in rows
    ]
    assert found == pytest.approx(apart, rel=NEAR)


@examples(60)
@given(case=cases(most=5), cut=st.integers(1, 30))
def test_two_consecutive_windows_add_up_to_one(
    case: tuple[list[FluidJob], list[int]], cut: int
) -> None:
    jobs, level = case
    demand, levels = a_demand(*jobs), _ints(level)
    whole = simulate_fluid(demand, levels, horizon_s=40.0)
    first = simulate_fluid(demand, levels, horizon_s=cut)
    second = simulate_fluid(demand, levels, horizon_s=40.0 - cut, warm_s=cut)
    for name in ("iterations", "comm"):
        parts = getattr(first, name) * cut + getattr(second, name) * (40.0 - cut)
        assert parts == pytest.approx(getattr(whole, name) * 40.0, abs=NEAR)
