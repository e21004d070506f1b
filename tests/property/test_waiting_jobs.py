"""Laws of jobs that wait for others and of limited arrays, in rounds and in simulated worlds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.check import find_placement_violations
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.arrays import ArrayRange
from tessera.formulation.job.dependencies import Condition, Dependency, find_circle
from tessera.formulation.job.lifecycle import ACTIVE, LEAVING, JobState
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.snapshot import Dependencies, Snapshot
from tessera.simulator.forecasts.calibration import learn_corrections
from tessera.simulator.forecasts.draws import History, draw_facts
from tessera.simulator.forecasts.forecast import WAITS_FOR_UNKNOWN, make_forecast, sample_times
from tessera.simulator.forecasts.future import follow_future
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.simulator.run import Decider, Result
from tessera.simulator.traces.trace import Arrival
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.driver import decide_round, reason_of
from tests.support.laws import examples
from tests.support.snapshots import snapshots
from tests.support.worlds import BERT, FCFS, GREEDY, a_scenario, an_arrival, simulate_scenario

LAW = examples(60)


def gangs_of(outcome: RoundOutcome) -> dict[int, Gang]:
    return {d.job: d.gang for d in outcome.decisions if d.gang is not None}


def with_waits_and_arrays(snapshot: Snapshot, seed: int) -> Snapshot:
    """Return the snapshot with random dependencies of waiting jobs, and all jobs in arrays."""
    rng, jobs = np.random.default_rng(seed), snapshot.jobs
    count = len(jobs)
    unmet = np.where(jobs.among([JobState.QUEUED]), rng.integers(0, 2, count), 0)
    array = rng.integers(0, 2, count)
    occupied = np.bincount(array[jobs.among(ACTIVE | LEAVING)], minlength=2)
    limits = np.maximum(occupied, rng.integers(1, 4, 2))
    return replace(
        snapshot, jobs=replace(jobs, unmet=unmet, array=array, array_limit=limits[array])
    )


@given(snapshots(), st.integers(0, 2**32), st.sampled_from(["throughput", "jct", "max-min"]))
@LAW
def test_rounds_start_no_job_that_waits_and_keep_the_limits_of_arrays(
    snapshot: Snapshot, seed: int, objective: str
) -> None:
    limited = with_waits_and_arrays(snapshot, seed)
    jobs = limited.jobs
    outcome = decide_round(limited, Policy(objective=objective))
    runs = np.zeros(len(jobs), dtype=np.bool_)
    runs[list(gangs_of(outcome))] = True
    assert not (runs & (jobs.unmet > 0)).any()
    for job in np.flatnonzero(jobs.unmet).tolist():
        assert reason_of(outcome.decisions[job]).code is ReasonCode.WAITS_FOR_JOBS
    counts = np.bincount(jobs.array[runs | jobs.among(LEAVING)], minlength=2)
    for job in range(len(jobs)):
        assert counts[jobs.array[job]] <= jobs.array_limit[job]


def test_the_checker_finds_jobs_that_wait_and_arrays_over_their_limit() -> None:
    free = a_snapshot(
        nodes=some_nodes((0, 1, 4)),
        jobs=[a_job("a"), a_job("b")],
        estimates=[an_estimate()],
    )
    outcome = decide_round(free, Policy())
    placement = Placement(gangs=gangs_of(outcome))
    assert len(placement.gangs) == 2

    def rules(**columns: Any) -> set[str]:
        changed = replace(free, jobs=replace(free.jobs, **columns))
        found = find_placement_violations(changed, outcome.problem, outcome.solution, placement)
        return {violation.rule for violation in found}

    assert rules() == set()
    assert rules(unmet=np.array([0, 1])) == {"may run"}
    one = np.ones(2, dtype=np.int64)
    assert rules(array=0 * one, array_limit=one) == {"array limit"}
    assert rules(array=0 * one, array_limit=2 * one) == set()


def random_arrivals(seed: int, jobs: int) -> list[Arrival]:
    """Return jobs that wait for random earlier or later ones, without circles."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(jobs).tolist()
    place = {job: at for at, job in enumerate(order)}
    arrivals = []
    for job in range(jobs):
        before = [f"j{other}" for other in order[: place[job]]]
        chosen = rng.choice(before, min(len(before), int(rng.integers(0, 3))), replace=False)
        after = tuple(
            Dependency(job=str(name), condition=Condition(str(rng.choice(list(Condition)))))
            for name in chosen
        )
        at_s = 100.0 * int(rng.integers(0, 3)) if job else 0.0
        arrivals.append(
            an_arrival(f"j{job}", at_s, iterations=int(rng.integers(1, 600)), after=after)
        )
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([GREEDY, FCFS]))
@LAW
def test_worlds_start_no_job_before_its_dependencies_and_all_jobs_end(
    seed: int, jobs: int, options: RoundOptions
) -> None:
    arrivals = random_arrivals(seed, jobs)
    result = simulate_scenario(a_scenario(*arrivals), options)
    assert not result.stuck
    assert np.isfinite(result.end_s).all()
    at = {one.spec.name: i for i, one in enumerate(arrivals)}
    for one in arrivals:
        job, broken = at[one.spec.name], False
        for dependency in one.spec.after:
            on = at[dependency.job]
            met = dependency.condition.is_met(succeeded=result.state[on] == JobState.SUCCEEDED)
            broken |= not met
            assert result.first_start_s[job] >= result.end_s[on] or not met
        assert (result.state[job] == JobState.REJECTED) == broken
        assert math.isinf(result.first_start_s[job]) == broken


def test_worlds_refuse_unknown_jobs_and_circles() -> None:
    for after in (("nothing",), ("a",)):
        spec = an_arrival("a", after=tuple(Dependency(job=name) for name in after))
        with pytest.raises(InvalidInput, match="after"):
            simulate_scenario(a_scenario(spec))


@given(st.dictionaries(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3)))
@LAW
def test_a_circle_is_found_if_and_only_if_there_is_one(graph: dict[int, set[int]]) -> None:
    jobs = [
        JobSpec(
            name=str(job),
            workload=BERT,
            iterations=1,
            requested_gpus=1,
            after=tuple(Dependency(job=str(other)) for other in sorted(others)),
        )
        for job, others in graph.items()
    ]
    circle = find_circle(jobs, {})
    for job, following in pairwise((*circle, *circle[:1])):
        assert int(following) in graph[int(job)]
    left = dict(graph)
    while free := [number for number, others in left.items() if not others & left.keys()]:
        left = {number: others for number, others in left.items() if number not in free}
    assert bool(circle) == bool(left)


def a_chain() -> Snapshot:
    """Return a running job, one that waits for it, and three that wait for what nobody foresees."""
    jobs = [
        a_job("first", iterations=100.0, iterations_left=100.0),
        a_job("second", unmet=1, iterations=50.0, iterations_left=50.0),
        a_job("held", state=JobState.HELD),
        a_job("behind", unmet=1),
        a_job("handler", unmet=1),
        a_job("all", unmet=1),
    ]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 1)), jobs=jobs, estimates=[an_estimate()])
    table = Dependencies.from_rows(
        [
            {"job": job, "on": on, "condition": code}
            for job, on, code in ((1, 0, 0), (3, 2, 0), (4, 0, 2))
        ]
    )
    return replace(snapshot, dependencies=table)


def test_a_future_starts_a_job_once_the_one_that_it_waits_for_has_finished() -> None:
    snapshot, rhythm = a_chain(), RoundRhythm(spacing_s=1.0, period_s=math.inf)
    draw = draw_facts(snapshot, History.of([], snapshot), 1.0, np.random.default_rng(1))
    followed = follow_future(snapshot, draw, Decider(GREEDY), rhythm)
    assert followed.start_s[1] >= followed.finish_s[0] > snapshot.now_s
    assert math.isfinite(followed.finish_s[1])
    assert np.isinf(followed.start_s[2:]).all()


def test_a_job_without_a_foreseeable_start_has_no_forecast_and_says_why() -> None:
    snapshot = a_chain()
    rhythm = RoundRhythm(spacing_s=1.0, period_s=math.inf, horizon_s=1e5)
    sampled = sample_times(
        snapshot, History.of([], snapshot), Decider(GREEDY), futures=2, seed=1, rhythm=rhythm
    )
    made = make_forecast(sampled, learn_corrections({}, 0.8), 0.8)
    why = {forecast.job: forecast.why_not for forecast in made.jobs}
    assert not why["first"]
    assert not why["second"]
    assert {why[name] for name in ("behind", "handler", "all")} == {WAITS_FOR_UNKNOWN}


def test_members_with_gpus_come_first_and_failed_ones_leave_their_place() -> None:
    jobs = [
        a_job("failed", array=0, array_limit=2, retry_s=5000.0, failures=1),
        a_job("first", array=0, array_limit=2),
        a_job("second", array=0, array_limit=2),
        a_job("leaves", array=0, array_limit=2, state=JobState.CANCELLING),
        a_job("other"),
    ]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 4)), jobs=jobs, estimates=[an_estimate()])
    outcome = decide_round(snapshot, Policy())
    assert sorted(gangs_of(outcome)) == [1, 4]
    reason = outcome.decisions[2].reason
    assert reason is not None
    assert reason.code is ReasonCode.ARRAY_LIMIT


def test_a_limited_array_never_runs_more_members_in_a_world() -> None:
    members = ArrayRange(first=0, last=9, max_running=3).members("sweep")
    arrivals = [
        an_arrival(m.name, array=m, iterations=100 + 7 * m.index, max_gpus=1) for m in members
    ]
    result = simulate_scenario(a_scenario(*arrivals), on_events=True)
    assert set(result.state) == {JobState.SUCCEEDED}
    assert most_at_once(result) == 3


def most_at_once(result: Result) -> int:
    """Return the largest number of jobs that ran at the same time."""
    changes = sorted(change for s in result.segments for change in ((s.start_s, 1), (s.end_s, -1)))
    return int(np.cumsum([change for _, change in changes]).max())
