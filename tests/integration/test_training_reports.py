"""Reports of jobs that train: progress that falls, facts for users, and the price of a restart."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tessera.db.agents.agents import load_desired_gangs
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.records.jobs import RestartTimes, TrainingRecord
from tests.support.reports import PHASE, a_member, report_members, report_training, start_times
from tests.support.round_trips import record_trips
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    fail,
    job,
    run,
    start,
    submit,
)

A0, A1 = "a100-0", "a100-1"


@pytest.fixture
def pair(store: Store) -> Store:
    """Return a store where a, of 1,000 iterations, runs on both nodes and b on the second."""
    a_cluster(store, nodes=2, gpus=4)
    submit(store, a_spec("a"), a_spec("b"))
    run(store, a=[(A0, [0]), (A1, [0])], b=[(A1, [1])])
    return store


def iterations_left(store: Store, name: str) -> float:
    jobs = store.snapshot(C).jobs
    return float(jobs.iterations_left[jobs.name.index(name)])


def restart_s(store: Store, name: str) -> float:
    """Return the price of a restart in rounds."""
    jobs = store.snapshot(C).jobs
    return float(jobs.restart_s[jobs.name.index(name)])


def training(store: Store, name: str) -> TrainingRecord:
    record = job(store, name).training
    assert record is not None
    return record


def restart(store: Store, name: str) -> int:
    """Let a job fail and start again on the first node; return its new generation."""
    fail(store, name)
    run(store, **{name: [(A0, [0])]})
    return job(store, name).generation


def move(store: Store, name: str, gpu: int) -> int:
    """Move a job to a GPU of the first node; return its new generation."""
    snapshot = store.snapshot(C)
    commit(store, snapshot, start(snapshot, name, [(A0, [gpu])], DecisionKind.MOVE))
    agents_report(store)
    return job(store, name).generation


def test_a_job_that_resumes_from_its_checkpoint_has_done_less_than_before(
    pair: Store,
) -> None:
    report_training(pair, "a", A0, iterations_done=450.0, resumed_iterations=0.0)
    generation = restart(pair, "a")
    report_training(pair, "a", A0, generation)  # it has not begun to train
    assert job(pair, "a").iterations_done == 450.0
    version = job(pair, "a").version
    report_training(pair, "a", A0, generation, iterations_done=400.0, resumed_iterations=400.0)
    assert (job(pair, "a").iterations_done, iterations_left(pair, "a")) == (400.0, 600.0)
    assert job(pair, "a").version == version  # no user's etag is outdated
    report_training(pair, "a", A0, generation, iterations_done=0.0, resumed_iterations=0.0)
    assert iterations_left(pair, "a") == 1000.0


def test_a_late_report_of_an_older_generation_takes_no_progress_away(pair: Store) -> None:
    report_training(pair, "a", A0, iterations_done=450.0, resumed_iterations=0.0)
    generation = restart(pair, "a")
    report_training(pair, "a", A0, generation, iterations_done=410.0, resumed_iterations=400.0)
    for late in (3.0, 450.0):
        report_training(pair, "a", A0, 1, iterations_done=late, resumed_iterations=0.0, loss=9.0)
    assert job(pair, "a").iterations_done == 410.0
    assert job(pair, "a").training is None


@pytest.mark.parametrize("runtime", ["replay", "", "unheard-of"])
def test_a_job_that_is_replayed_never_goes_back(pair: Store, runtime: str) -> None:
    facts: dict[str, Any] = {"loss": 1.0, "memory_bytes": 5, "checkpoint_iterations": 1.0}
    facts |= {"restart_times": start_times(1.0, 2.0, 3.0), "resumed_iterations": 0.0}
    for done in (40.0, 10.0):
        report_training(pair, "a", A0, iterations_done=done, runtime=runtime, **facts)
    assert (job(pair, "a").iterations_done, job(pair, "a").training) == (40.0, None)
    assert restart_s(pair, "a") == 60.0


def test_contradictory_progress_takes_nothing_away(pair: Store) -> None:
    report_training(pair, "a", A0, iterations_done=40.0, resumed_iterations=0.0)
    for done, resumed in (
        (10.0, 20.0),  # fewer than those from which it went on
        (-1.0, 0.0),
        (math.nan, 0.0),
        (10.0, math.nan),
        (10.0, -5.0),
        (10.0, -math.inf),
        (10.0, 1e300),
    ):
        report_training(pair, "a", A0, iterations_done=done, resumed_iterations=resumed)
        assert job(pair, "a").iterations_done == 40.0
    # Only the leader takes progress away.
    report_training(pair, "a", A1, iterations_done=10.0, resumed_iterations=0.0)
    assert job(pair, "a").iterations_done == 40.0


def test_a_job_that_has_ended_keeps_its_progress(pair: Store) -> None:
    report_training(
        pair, "a", A0, phase=PHASE.SUCCEEDED, iterations_done=1000.0, resumed_iterations=0.0
    )
    report_training(pair, "a", A0, iterations_done=3.0, resumed_iterations=0.0)
    assert (job(pair, "a").state, job(pair, "a").iterations_done) == (JobState.SUCCEEDED, 1000.0)


def test_iterations_are_timed_while_a_job_does_them_again(pair: Store) -> None:
    report_training(pair, "a", A0, iterations_done=450.0, resumed_iterations=0.0)
    generation = restart(pair, "a")
    for done in range(400, 408):  # the first report takes progress away, and is no sample
        report_training(
            pair,
            "a",
            A0,
            generation,
            iterations_done=float(done),
            resumed_iterations=400.0,
            iter_time_s=2.0 + done / 1000,
        )
    assert job(pair, "a").iterations_done == 407.0
    (measurement,) = pair.estimation(C).measurements
    assert measurement.iter_time_s == pytest.approx(2.405)  # the median of 403 to 407


def test_the_newest_facts_of_training_are_stored(pair: Store) -> None:
    assert job(pair, "a").training is None
    now_s = pair.snapshot(C).now_s
    report_training(
        pair,
        "a",
        A0,
        iterations_done=410.0,
        resumed_iterations=0.0,
        loss=2.5,
        memory_bytes=2**30,
        checkpoint_iterations=400.0,
        checkpoint_age_s=3600.0,
        remark="the checkpoint of iteration 405 was passed over",
    )
    before = training(pair, "a")
    assert (before.loss, before.memory_bytes, before.checkpoint_iterations) == (2.5, 2**30, 400.0)
    assert before.remark == "the checkpoint of iteration 405 was passed over"
    assert before.checkpoint_s is not None
    assert 0 <= before.checkpoint_s - (now_s - 3600) < 600
    assert (before.restart_times, before.restart_s, before.exit_reason) == (None, 0.0, None)
    # What the next report does not mention stays, and a checkpoint was completed only once.
    report_training(
        pair, "a", A0, iterations_done=420.0, checkpoint_iterations=400.0, checkpoint_age_s=5.0
    )
    assert training(pair, "a") == before
    report_training(pair, "a", A0, loss=0.0, checkpoint_iterations=420.0)
    after = training(pair, "a")
    assert (after.loss, after.checkpoint_iterations) == (0.0, 420.0)
    assert after.checkpoint_s is not None
    assert after.checkpoint_s > before.checkpoint_s + 3000
    assert job(pair, "b").training is None


def test_checkpoints_that_the_job_does_not_have_are_ignored(pair: Store) -> None:
    for lie in (1000.5, 1e12, 1e300, math.nan, math.inf, -1.0):
        report_training(pair, "a", A0, loss=1.0, checkpoint_iterations=lie)
        assert training(pair, "a") == TrainingRecord(loss=1.0)
    report_training(pair, "a", A0, checkpoint_iterations=0.0, checkpoint_age_s=math.nan)
    assert training(pair, "a") == TrainingRecord(loss=1.0, checkpoint_iterations=0.0)


def test_meaningless_numbers_leave_what_was_stored(pair: Store) -> None:
    report_training(pair, "a", A0, loss=2.0, memory_bytes=7, checkpoint_iterations=4.0)
    before = training(pair, "a")
    for lie in (math.nan, math.inf, -math.inf, 1e300, -1e300):
        lies: dict[str, Any] = {"loss": lie, "checkpoint_iterations": lie}
        lies |= {"memory_bytes": -(2**63), "restart_times": start_times(lie, lie, lie)}
        report_training(pair, "a", A0, iterations_done=5.0, **lies)
        assert training(pair, "a") == before
        assert (job(pair, "a").iterations_done, restart_s(pair, "a")) == (5.0, 60.0)


def test_memory_is_the_most_of_all_members_of_the_generation(pair: Store) -> None:
    report_training(pair, "a", A0, memory_bytes=5)
    report_training(pair, "a", A1, memory_bytes=9)
    report_training(pair, "a", A0, memory_bytes=6)
    assert training(pair, "a").memory_bytes == 9
    generation = restart(pair, "a")
    report_training(pair, "a", A0, generation, memory_bytes=4)
    assert training(pair, "a").memory_bytes == 4


def test_members_know_of_their_memory_and_remarks_alone_and_one_report_covers_several_jobs(
    pair: Store,
) -> None:
    facts: dict[str, Any] = {"loss": 1.0, "checkpoint_iterations": 3.0}
    facts |= {"restart_times": start_times(1, 2, 3), "remark": "a port was taken"}
    report_members(pair, a_member("a", A1, memory_bytes=4, **facts), a_member("b", A1, loss=3.0))
    assert training(pair, "a") == TrainingRecord(memory_bytes=4, remark="a port was taken")
    assert training(pair, "b") == TrainingRecord(loss=3.0)


def test_the_median_of_measured_starts_is_what_a_restart_costs_in_rounds(
    pair: Store,
) -> None:
    # A first start has no stop, so it says too little.
    report_training(pair, "a", A0, restart_times=start_times(0, 20, 15))
    assert (restart_s(pair, "a"), training(pair, "a").restart_s) == (60.0, 0.0)
    assert training(pair, "a").restart_times == RestartTimes(launch_s=20.0, first_iteration_s=15.0)
    costs, expected = (41, 47, 44, 400, 42, 1, 2, 3), (41, 44, 44, 45.5, 44, 44, 42, 3)
    for k, (cost_s, median_s) in enumerate(zip(costs, expected, strict=True)):
        generation = move(pair, "a", 1 + k % 2)
        times = start_times(0.5, 0.25, cost_s - 0.75)
        for _ in range(3):  # each start counts once
            report_training(pair, "a", A0, generation, restart_times=times)
        assert restart_s(pair, "a") == training(pair, "a").restart_s == median_s
    assert restart_s(pair, "b") == 60.0  # of the same workload
    assert job(pair, "a").spec.restart_s == 60.0  # as stated
    (desired,) = pair.read(load_desired_gangs, C, f"agent-{A0}").gangs
    assert desired.spec.restart_s == 60.0


def test_a_start_has_a_price_once_its_first_iteration_is_done_in_a_sensible_time(
    pair: Store,
) -> None:
    generation = move(pair, "a", 2)
    times = [(6, 20, 0), (1e6, 20, 15), (-1, 20, 15), (6, math.nan, 15), (6, 20, math.inf)]
    for wrong in times:
        report_training(pair, "a", A0, generation, restart_times=start_times(*wrong))
        assert restart_s(pair, "a") == 60.0
    report_training(pair, "a", A0, generation, restart_times=start_times(6, 20, 15))
    assert (training(pair, "a").restart_s, restart_s(pair, "a")) == (41.0, 41.0)


def test_a_report_of_training_takes_no_turn_and_a_repeated_one_writes_nothing(
    pair: Store, database: Database
) -> None:
    facts: dict[str, Any] = {"iter_time_s": 1.0, "resumed_iterations": 0.0, "loss": 1.5}
    facts |= {"memory_bytes": 1, "checkpoint_iterations": 2.0, "remark": "r"}
    facts |= {"restart_times": start_times(1, 2, 3), "iterations_done": 20.0}
    with record_trips(database) as plain:
        report_training(pair, "b", A1, iterations_done=10.0, iter_time_s=1.0)
    with record_trips(database) as trips:
        report_training(pair, "b", A1, **facts)
    assert len(trips) == len(plain) + 1, trips
    (lock,) = (trip for trip in trips if "FOR NO KEY UPDATE" in trip)  # of the job's row
    assert "FROM jobs" in lock
    execute(database, "UPDATE trainings SET checkpoint_at = 'epoch'")
    with database.read() as connection:
        version = "SELECT xmin FROM trainings"
        before = connection.exec_driver_sql(version).all()
    report_training(pair, "b", A1, **facts)
    with database.read() as connection:
        assert connection.exec_driver_sql(version).all() == before


def test_facts_of_training_outlive_the_job_but_not_its_row(pair: Store, database: Database) -> None:
    report_training(pair, "a", A0, loss=3.0)
    apply_event(pair, "a", JobEvent.CANCEL)
    agents_report(pair)
    assert training(pair, "a").loss == 3.0
    execute(database, "DELETE FROM jobs WHERE name = 'a'")
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM trainings").scalar() == 0


def test_training_since_the_last_checkpoint_is_lost_if_the_last_stop_wrote_none(
    pair: Store,
) -> None:
    def unsaved_since_s() -> float:
        jobs = pair.snapshot(C).jobs
        return float(jobs.unsaved_since_s[jobs.name.index("a")])

    report_training(pair, "a", A0, checkpoint_iterations=4.0, checkpoint_age_s=0.0)
    assert unsaved_since_s() == 0  # it has not been stopped yet
    generation = move(pair, "a", 1)
    since_s = pair.snapshot(C).now_s
    report_training(pair, "a", A0, generation, restart_times=start_times(2.0, 20.0, 15.0))
    assert since_s - 600 < unsaved_since_s() <= pair.snapshot(C).now_s
    newer: dict[str, Any] = {
        "checkpoint_iterations": 9.0,
        "checkpoint_age_s": 0.0,
        "iterations_done": 9.0,
    }
    report_training(pair, "a", A0, generation, **newer)
    saved = training(pair, "a")
    assert saved.checkpoint_s is not None
    assert unsaved_since_s() == pytest.approx(saved.checkpoint_s, abs=1.0)
    generation = move(pair, "a", 2)
    with_one = start_times(2.0, 20.0, 15.0)
    with_one.checkpoint_s = 1.0
    report_training(pair, "a", A0, generation, restart_times=with_one)
    assert unsaved_since_s() == 0
