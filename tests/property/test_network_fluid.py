"""Laws of the fluid engine, and its agreement with an exact second engine in fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.tables import Ints
from tessera.solvers.network.fluid import flop_under_levels, simulate_fluid
from tests.support.laws import examples
from tests.support.networks import FluidJob, a_demand

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
