"""The independent executor of logs, laws of every run, and replays of recorded allocations."""

from __future__ import annotations

import ast
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator import executor
from tessera.simulator.executor import ReplayFailed, replay_lines
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.logfile import lines_of, log_of, write_log
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.solvers.rounds.due import due_s, next_segment_s
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.conditions import conditions
from tests.support.laws import examples
from tests.support.worlds import (
    COSTLY,
    FREE,
    POLICIES,
    StoppedClock,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)

Row = dict[str, Any]


def a_run() -> Result:
    """Return a run of two jobs on one node, which fails at 500 s and lags from 1,000 s to 1,300 s."""
    scenario = a_scenario(
        an_arrival("a", 5.0, iterations=2000),
        an_arrival("b", 7.0, iterations=300),
        nodes=some_specs(("a100", 1, 4)),
        profiles=[a_profile(1, 1.0), a_profile(2, 0.6)],
    )
    return simulate_scenario(
        scenario,
        overheads=COSTLY,
        horizon_s=6000.0,
        failures=[Failure(node="a100-0", down_s=500.0, up_s=700.0)],
        stragglers=[Straggler(node="a100-0", start_s=1000.0, end_s=1300.0, factor=1.5)],
    )


def tampered_log(change: Callable[[list[Row]], None]) -> list[str]:
    """Return the log of ``a_run`` with changed segments."""
    rows = [json.loads(line) for line in lines_of(log_of(a_run()))]
    change([row for row in rows if row["kind"] == "segment"])
    return [json.dumps(row) for row in rows if not row.get("gone")]


def segment_ended_by(segments: list[Row], ended_by: str) -> Row:
    return next(s for s in segments if s["ended_by"] == ended_by)


def hold_gpus_twice(segments: list[Row]) -> None:
    first, second = (s for s in segments if s["start_s"] == 300.0)
    first["on"] = second["on"]


def use_unknown_gpu(segments: list[Row]) -> None:
    segments[0]["on"] = [["a100-0", [3, 4]]]


def drop_gpus(segments: list[Row]) -> None:
    segments[0]["on"] = [["a100-0", [0]]]


def make_ready_sooner(segments: list[Row]) -> None:
    segments[0]["ready_s"] -= 1.0


def forget_segment(segments: list[Row]) -> None:
    segment_ended_by(segments, "failure")["gone"] = True


def forget_lag(segments: list[Row]) -> None:
    next(s for s in segments if s["slowdown"] > 1)["slowdown"] = 1.0


def lose_less(segments: list[Row]) -> None:
    next(s for s in segments if s["lost"])["lost"] -= 1.0


def end_too_soon(segments: list[Row]) -> None:
    segment_ended_by(segments, "finish")["end_s"] -= 1.0


def start_before_arrival(segments: list[Row]) -> None:
    segments[0]["start_s"] = 1.0


def change_cell_after_lag(segments: list[Row]) -> None:
    lagging = segments.index(segment_ended_by(segments, "speed"))
    segments[lagging + 1]["plan"] = "another"


def test_an_unchanged_log_replays_to_the_same_run() -> None:
    result = a_run()
    jct_s = replay_lines(tampered_log(lambda _segments: None))
    assert list(jct_s.values()) == pytest.approx((result.end_s - result.arrival_s).tolist())
    assert any(s.lost for s in result.segments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hold_gpus_twice, "hold its GPUs alone"),
        (use_unknown_gpu, "hold GPUs that its nodes have"),
        (drop_gpus, "hold GPUs that its nodes have"),
        (make_ready_sooner, "be ready when the overheads say"),
        (forget_segment, "end when its work|ready when|lose|continue"),
        (forget_lag, "end when its work ends"),
        (lose_less, "lose what came after"),
        (end_too_soon, "end when its work ends"),
        (start_before_arrival, "follow the previous one"),
        (change_cell_after_lag, "continue unchanged"),
    ],
)
def test_a_log_that_breaks_a_rule_is_refused(
    change: Callable[[list[Row]], None], message: str
) -> None:
    with pytest.raises(ReplayFailed, match=message):
        replay_lines(tampered_log(change))


def test_a_job_that_trains_more_than_its_work_is_detected() -> None:
    lines = [
        json.dumps(row | ({"iterations": 100} if row["kind"] == "job" else {}))
        for row in map(json.loads, lines_of(log_of(a_run())))
    ]
    with pytest.raises(ReplayFailed, match=r"no more than its work|end when its work"):
        replay_lines(lines)


def test_the_executor_imports_nothing_of_the_simulator_and_is_short() -> None:
    source = Path(executor.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    ]
    assert not [name for name in imported if str(name).startswith("tessera")]
    code = [
        line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) < 160


def test_each_line_of_a_log_is_an_object_and_infinite_numbers_are_null(tmp_path: Path) -> None:
    scenario = a_scenario(an_arrival("a"), profiles=[a_profile(), a_profile(2, math.inf)])
    endless = replace(FREE, checkpoint_every_s=math.inf)
    log = log_of(simulate_scenario(scenario, overheads=endless))
    file = tmp_path / "run.jsonl"
    write_log(log, file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines == list(lines_of(log))
    rows = [json.loads(line) for line in lines]
    assert {row["kind"] for row in rows} == {"run", "node", "profile", "job", "segment"}
    assert [row["iter_time_s"] for row in rows if row["kind"] == "profile"] == [1.0, None]
    assert rows[0]["overheads"]["checkpoint_every_s"] is None
    (segment,) = (row for row in rows if row["kind"] == "segment")
    assert (segment["job"], segment["end_s"]) == ("a", log.segments[0].end_s)


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


def test_the_next_schedule_segment_of_a_promised_schedule_has_a_round() -> None:
    (snapshot, outcome), *later = decided_rounds(A_SEQUENCE)
    at_s = next_segment_s(snapshot, outcome)
    assert outcome.admission is not None
    assert at_s == min(s for s in outcome.admission.schedule_segments.start_s if s > snapshot.now_s)
    assert at_s in [snapshot.now_s for snapshot, _ in later]


def test_promises_are_due_at_the_same_time_whatever_the_clock_factor() -> None:
    def due(factor: float) -> list[tuple[float, float]]:
        return [
            (due_s(snapshot, outcome, ROUND_S), next_segment_s(snapshot, outcome))
            for snapshot, outcome in decided_rounds(A_SEQUENCE, factor)[:1]
        ]

    assert due(1.0)[0][0] < math.inf
    assert due(8.0) == due(1.0)
