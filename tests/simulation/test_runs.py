"""The times of rounds, and the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.check import Violation
from tessera.formulation.errors import InvalidInput
from tessera.formulation.snapshot import Snapshot
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.worlds import (
    COSTLY,
    DEADLINES,
    FREE,
    GREEDY,
    StoppedClock,
    a_profile,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

ONE_GPU = some_specs(("a100", 1, 1))


def rounds_of(result: Result) -> list[float]:
    return [row.at_s for row in result.rounds]


def recording_decider(
    snapshots: list[Snapshot], options: RoundOptions = GREEDY
) -> Callable[[Snapshot], RoundOutcome]:
    decider = Decider(options)

    def decide(snapshot: Snapshot) -> RoundOutcome:
        snapshots.append(snapshot)
        return decider(snapshot)

    return decide


def test_rounds_happen_at_whole_multiples_of_the_period_and_only_while_there_are_jobs() -> None:
    scenario = a_scenario(
        an_arrival("a", 450.0, iterations=100),
        an_arrival("b", 90_000.0, iterations=100),
        an_arrival("c", 90_300.1, iterations=100),
        nodes=ONE_GPU,
        profiles=[a_profile()],
    )
    result = simulate_scenario(scenario)
    assert rounds_of(result) == [600.0, 90_000.0, 90_600.0]
    assert result.end_s.tolist() == [700.0, 90_100.0, 90_700.0]


def test_a_node_failure_while_there_is_no_job_triggers_no_round() -> None:
    scenario = a_scenario(an_arrival("a", 9000.0))
    gone = [Failure(node="a100-0", down_s=1000.0, up_s=2000.0)]
    assert rounds_of(simulate_scenario(scenario, failures=gone))[0] == 9000.0
    assert rounds_of(simulate_scenario(scenario, failures=gone, on_events=True)) == [9000.0]


def test_rounds_on_events_happen_at_events_and_at_most_once_per_round_s() -> None:
    scenario = a_scenario(
        an_arrival("a", 10.0, iterations=10_000),
        an_arrival("b", 20.0, iterations=10_000),
        an_arrival("c", 1000.0, iterations=10_000),
        profiles=[a_profile()],
    )
    result = simulate_scenario(scenario, on_events=True, horizon_s=2000.0)
    assert rounds_of(result) == [10.0, 310.0, 1000.0]


def test_with_a_gap_rounds_are_those_of_a_server_with_that_gap_and_period() -> None:
    arrivals = [an_arrival(f"j{at_s}", at_s, iterations=10**6) for at_s in (0, 1, 2, 50, 900)]
    scenario = a_scenario(*arrivals)
    result = simulate_scenario(scenario, on_events=True, spacing_s=3.0, horizon_s=1300.0)
    assert rounds_of(result) == [0.0, 3.0, 50.0, 350.0, 650.0, 900.0, 1200.0]


@pytest.mark.parametrize("given", [{"spacing_s": 3.0}, {"spacing_s": -1.0, "on_events": True}])
def test_a_gap_without_meaning_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="spacing_s"):
        Conditions(**given)


def test_events_that_no_round_sees_do_not_delay_rounds_on_events() -> None:
    """A straggler at 990 s calls for no decision; the arrival at 1,000 s does."""
    scenario = a_scenario(
        an_arrival("a", 10.0, iterations=10_000),
        an_arrival("b", 1000.0, iterations=10_000),
        profiles=[a_profile()],
    )
    slow = [Straggler(node="a100-0", start_s=990.0, end_s=995.0, factor=2.0)]
    result = simulate_scenario(scenario, on_events=True, stragglers=slow, horizon_s=2000.0)
    assert rounds_of(result) == [10.0, 1000.0]


def test_jobs_running_at_the_horizon_are_logged_until_then() -> None:
    """The horizon is in the middle of a segment and between two rounds."""
    scenario = a_scenario(an_arrival("a", iterations=10_000), profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=COSTLY, horizon_s=1000.0)
    last = result.segments[-1]
    assert (last.start_s, last.ready_s, last.end_s, last.ended_by) == (0.0, 31.0, 1000.0, "horizon")
    assert last.iterations == 969
    assert (result.ended_s, result.state, result.stuck) == (1000.0, ("running",), False)
    assert math.isinf(result.end_s[0])


def test_jobs_that_arrive_after_the_horizon_are_not_part_of_the_run() -> None:
    scenario = a_scenario(an_arrival("a"), an_arrival("b", 5000.0), profiles=[a_profile()])
    result = simulate_scenario(scenario, overheads=replace(FREE, profile_s=100.0), horizon_s=2000.0)
    assert result.state == ("succeeded", "held")
    assert [one.arrival_s for one in result.tasks] == [0.0]
    assert result.profiling_gpu_s == 100.0


def test_a_run_is_stuck_if_nothing_can_start_the_remaining_jobs() -> None:
    """No node ever returns, so the job waits. Without a limit of patience the run would never end."""
    scenario = a_scenario(an_arrival("a", 100.0), nodes=ONE_GPU, profiles=[a_profile()])
    gone = [Failure(node="a100-0", down_s=1.0, up_s=math.inf)]
    for on_events in (False, True):
        result = simulate_scenario(scenario, failures=gone, patience_s=7200.0, on_events=on_events)
        assert result.stuck
        assert result.state == ("queued",)
        assert 7200.0 < result.ended_s <= 8000.0


def test_a_run_is_not_stuck_while_a_node_may_still_return() -> None:
    scenario = a_scenario(an_arrival("a", 100.0), nodes=ONE_GPU, profiles=[a_profile()])
    gone = [Failure(node="a100-0", down_s=1.0, up_s=50_000.0)]
    result = simulate_scenario(scenario, failures=gone, patience_s=7200.0)
    assert (result.stuck, result.end_s.tolist()) == (False, [51_100.0])


def test_a_job_with_an_impossible_deadline_is_rejected_and_a_possible_one_is_promised_and_kept() -> (
    None
):
    scenario = a_scenario(
        an_arrival("late", deadline_s=500.0),
        an_arrival("meets", deadline_s=1200.0),
        nodes=ONE_GPU,
        profiles=[a_profile()],
    )
    snapshots: list[Snapshot] = []
    result = simulate_scenario(scenario, decide=recording_decider(snapshots, DEADLINES))
    assert result.state == ("rejected", "succeeded")
    assert (result.rounds[0].suspended, result.rounds[0].waiting) == (0, 0)
    assert result.end_s[0] == 0.0
    assert result.end_s[1] <= 1200.0
    assert result.admitted[1] == 1.0
    assert result.admitted[0] == 0.0
    legs = snapshots[1].legs
    assert {snapshots[1].jobs.name[j] for j in legs.job.tolist()} == {"meets"}


def test_a_round_that_breaks_a_rule_changes_nothing_but_is_counted_and_numbered() -> None:
    decider, numbers = Decider(GREEDY), []

    def decide(snapshot: Snapshot) -> RoundOutcome:
        numbers.append(snapshot.round_number)
        outcome = decider(snapshot)
        if snapshot.round_number == 1:
            broken = Violation(rule="none", detail="made up")
            outcome = replace(outcome, violations=(broken,))
        return outcome

    result = simulate_scenario(a_scenario(an_arrival("a")), decide=decide)
    assert result.refused == 1
    assert result.first_start_s.tolist() == [300.0]
    assert numbers[:2] == [1, 2]


def test_progress_reports_how_many_jobs_have_ended() -> None:
    reports: list[tuple[float, int]] = []
    scenario = a_scenario(
        an_arrival("a", iterations=400),
        an_arrival("b", 900.0),
        nodes=ONE_GPU,
        profiles=[a_profile()],
    )
    simulate(
        scenario,
        Decider(GREEDY),
        Conditions(overheads=FREE),
        StoppedClock(),
        lambda now_s, over: reports.append((now_s, over)),
    )
    assert reports[:4] == [(0.0, 0), (300.0, 0), (600.0, 1), (900.0, 1)]


@pytest.mark.parametrize(
    "wrong", [{"round_s": 0.0}, {"round_s": math.inf}, {"horizon_s": 0.0}, {"patience_s": -1.0}]
)
def test_meaningless_conditions_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Conditions(**wrong)  # type: ignore[arg-type]
