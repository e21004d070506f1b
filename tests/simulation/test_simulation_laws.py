"""Laws of every run of the service's own round function, e.g. that a second executor agrees."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Result
from tessera.simulator.truth import perturb_estimates
from tests.support.conditions import conditions
from tests.support.laws import examples
from tests.support.worlds import COSTLY, POLICIES, a_random_scenario, simulate_scenario

SEARCHES = Overheads(
    save_s=31.7,
    load_s=17.3,
    search_s={1: 20.0, 8: 400.0},
    checkpoint_every_s=333.3,
    profile_s=100.0,
)

CASES = st.tuples(
    st.integers(0, 2**16),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([math.inf, 4000.0]),
    st.sampled_from([COSTLY, SEARCHES]),
)
"""Seed, policy, rounds on events, error of estimates, horizon, overheads."""

some_cases = examples(25)


def run_case(case: tuple[int, str, bool, float, float, Overheads]) -> Result:
    seed, policy, on_events, error, horizon_s, overheads = case
    scenario = a_random_scenario(seed)
    return simulate_scenario(
        scenario,
        POLICIES[policy],
        on_events=on_events,
        horizon_s=horizon_s,
        overheads=overheads,
        **conditions(scenario, seed, error),
    )


@given(CASES)
@some_cases
def test_the_independent_executor_computes_the_same_completion_times(
    case: tuple[int, str, bool, float, float, Overheads],
) -> None:
    result = run_case(case)
    jct_s = replay_lines(lines_of(log_of(result)))
    names = [arrival.spec.name for arrival in result.scenario.arrivals]
    finished = np.array([state == "succeeded" for state in result.state])
    expected_s = np.where(finished, result.end_s - result.arrival_s, np.inf)
    np.testing.assert_allclose([jct_s[name] for name in names], expected_s, rtol=1e-6)
    assert result.refused == 0


@given(CASES)
@some_cases
def test_work_and_gpu_seconds_add_up_and_waiting_jobs_do_not_train(
    case: tuple[int, str, bool, float, float, Overheads],
) -> None:
    result = run_case(case)
    trained: defaultdict[int, float] = defaultdict(float)
    last_s: defaultdict[int, float] = defaultdict(float)
    until_s: defaultdict[tuple[int, int], float] = defaultdict(float)
    for s in result.segments:
        trained[s.job] += s.iterations - s.lost
        assert max(last_s[s.job], result.arrival_s[s.job]) <= s.start_s <= s.end_s
        assert s.end_s > s.ready_s or s.iterations == 0
        last_s[s.job] = s.end_s
        for node, gpus in s.members:
            for gpu in gpus:
                assert until_s[node, gpu] <= s.start_s
                until_s[node, gpu] = s.end_s
        away = [
            f
            for f in result.conditions.failures
            if f.node in {result.nodes[n] for n, _ in s.members}
        ]
        assert not any(s.start_s < f.up_s and f.down_s < s.end_s for f in away)
    for job, arrival in enumerate(result.scenario.arrivals):
        if result.state[job] == "succeeded":
            assert trained[job] == pytest.approx(arrival.spec.iterations, rel=1e-9)
        else:
            assert trained[job] < arrival.spec.iterations
    ends = result.end_s[np.isfinite(result.end_s)]
    assert (ends <= result.ended_s).all()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("on_events", [False, True])
def test_the_same_run_repeats_bit_for_bit(policy: str, on_events: bool) -> None:
    case = 7, policy, on_events, 0.1, math.inf, COSTLY
    first, second = run_case(case), run_case(case)
    assert first.segments == second.segments
    assert first.rounds == second.rounds
    for f in fields(first):
        if isinstance(getattr(first, f.name), np.ndarray):
            assert np.array_equal(getattr(first, f.name), getattr(second, f.name)), f.name


def test_wrong_estimates_change_decisions_but_not_true_speeds() -> None:
    """Each segment trains at the true rate of its Cell, whatever estimates the rounds saw."""
    scenario = a_random_scenario(5, jobs=12)
    estimates = perturb_estimates(scenario.profiles, 0.5, 1)
    blind, seeing = (
        simulate_scenario(scenario, POLICIES["ilp"], visible=visible)
        for visible in (estimates, None)
    )
    chosen = [
        [(s.job, s.start_s, s.cell.gpu_type, s.cell.gpus) for s in result.segments]
        for result in (blind, seeing)
    ]
    assert chosen[0] != chosen[1]
    rates: dict[tuple[object, ...], set[float]] = {}
    for result in (blind, seeing):
        for s in result.segments:
            work = scenario.arrivals[s.job].spec.workload
            cell = (work, s.cell.gpu_type, s.cell.gpus, s.cell.pipeline_degree, len(s.members))
            if s.end_s - s.ready_s > 1.0:
                rate = s.iterations / (s.end_s - s.ready_s)
                rates.setdefault(cell, set()).add(round(rate, 6))
    assert all(len(distinct) == 1 for distinct in rates.values())
    assert len(rates) > 5
