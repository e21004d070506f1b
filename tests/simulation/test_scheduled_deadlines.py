"""Rounds that are triggered only by events still keep promised deadline schedules."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.snapshot import Snapshot
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.solvers.rounds.due import due_s, next_leg_s
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.laws import examples
from tests.support.worlds import (
    COSTLY,
    StoppedClock,
    a_profile,
    a_scenario,
    an_arrival,
    some_specs,
)

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
