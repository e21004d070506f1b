"""Laws of every run: a second executor agrees, and promises are kept by rounds on events."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.snapshot import Snapshot
from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.solvers.rounds.due import due_s, next_leg_s
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.conditions import conditions
from tests.support.laws import examples
from tests.support.worlds import (
    COSTLY,
    POLICIES,
    StoppedClock,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

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


LOOKS = RoundOptions(objective="deadline")

ROUND_S = 300.0


def run_on_events(scenario: Scenario, spacing_s: float | None = None) -> Result:
    conditions = Conditions(
        overheads=COSTLY, on_events=True, spacing_s=spacing_s, patience_s=3600.0
    )
    return simulate(scenario, Decider(LOOKS, work=0.01), conditions, StoppedClock())


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw jobs with deadlines for two two-GPU nodes, more than fit at once."""
    at_s, jobs = 0.0, []
    for j in range(draw(st.integers(2, 7))):
        at_s += draw(st.sampled_from([0.0, 100.0, 900.0, 2500.0]))
        length = draw(st.integers(300, 9000))
        jobs.append(
            an_arrival(
                f"j{j}",
                at_s,
                iterations=length,
                requested_gpus=1,
                weight=draw(st.sampled_from([0.1, 1.0, 10.0])),
                deadline_s=length * draw(st.floats(0.4, 4.0) | st.just(math.inf)) + 200.0,
            )
        )
    profiles = [a_profile(1, 1.0), a_profile(2, 0.55), a_profile(4, 0.3)]
    return a_scenario(*jobs, nodes=some_specs(("a100", 2, 2)), profiles=profiles)


@given(scenarios(), st.sampled_from([None, 3.0, 120.0]))
@examples(20)
def test_promises_are_kept_by_rounds_on_events(scenario: Scenario, spacing_s: float | None) -> None:
    result = run_on_events(scenario, spacing_s)
    due = np.array([arrival.arrival_s + arrival.spec.deadline_s for arrival in scenario.arrivals])
    late = (result.admitted > 0) & ~(result.end_s <= due * (1 + 1e-9))
    assert not late.any()
    assert result.refused == 0


def test_a_round_without_promises_needs_no_follow_up() -> None:
    follow_ups: list[tuple[float, float]] = []
    decide = Decider(LOOKS, work=0.01)

    def noted(snapshot: Snapshot) -> RoundOutcome:
        outcome = decide(snapshot)
        follow_ups.append((snapshot.now_s, due_s(snapshot, outcome, ROUND_S)))
        return outcome

    free = a_scenario(an_arrival("a", iterations=500))
    simulate(free, noted, Conditions(on_events=True), StoppedClock())
    assert follow_ups == [(EPOCH_S, math.inf)]


def decided_rounds(scenario: Scenario, factor: float = 1.0) -> list[tuple[Snapshot, RoundOutcome]]:
    """Return the rounds of a run as a server has it, on snapshots as with its clock factor."""
    decide, rounds = Decider(LOOKS, work=0.01), list[tuple[Snapshot, RoundOutcome]]()

    def noted(snapshot: Snapshot) -> RoundOutcome:
        slow = replace(
            snapshot,
            clock_factor=factor,
            estimates=replace(
                snapshot.estimates, iter_time_s=snapshot.estimates.iter_time_s * factor
            ),
            jobs=replace(snapshot.jobs, restart_s=snapshot.jobs.restart_s * factor),
        )
        outcome = decide(slow)
        rounds.append((slow, outcome))
        return outcome

    simulate(scenario, noted, Conditions(on_events=True, spacing_s=3.0), StoppedClock())
    return rounds


A_SEQUENCE = a_scenario(
    an_arrival("first", iterations=1000, requested_gpus=2, deadline_s=1500.0),
    an_arrival("second", iterations=1000, requested_gpus=2, deadline_s=3600.0),
    nodes=some_specs(("a100", 1, 2)),
    profiles=[a_profile(2, 1.0)],
)
"""Two jobs with deadlines, of which only one fits at a time."""


def test_the_next_leg_of_a_promised_schedule_has_a_round() -> None:
    (snapshot, outcome), *later = decided_rounds(A_SEQUENCE)
    at_s = next_leg_s(snapshot, outcome)
    assert outcome.admission is not None
    assert at_s == min(s for s in outcome.admission.legs.start_s if s > snapshot.now_s)
    assert at_s in [snapshot.now_s for snapshot, _ in later]


def test_promises_are_due_at_the_same_time_whatever_the_clock_factor() -> None:
    def due(factor: float) -> list[tuple[float, float]]:
        return [
            (due_s(snapshot, outcome, ROUND_S), next_leg_s(snapshot, outcome))
            for snapshot, outcome in decided_rounds(A_SEQUENCE, factor)[:1]
        ]

    assert due(1.0)[0][0] < math.inf
    assert due(8.0) == due(1.0)
