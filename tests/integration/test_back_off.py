"""Jobs that fail repeatedly: stored back-offs, reasons of their state, and rounds that they trigger."""

from __future__ import annotations

import pytest

from tessera.db.schema.engine import Database
from tessera.db.store.reads import job_history
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.job.lifecycle import JobEvent, JobState
from tessera.formulation.job.reasons import Reason, ReasonCode
from tests.support.decided_rounds import schedule
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    end_back_off,
    execute,
    fail,
    job,
    prolong_back_off,
    run,
    start,
    states,
    submit,
    wait,
)

A0 = "a100-0"


@pytest.fixture
def store(database: Database) -> Store:
    """Return a store whose agents do not expire, however slow the machine is."""
    return Store(database, lease_s=3600.0)


@pytest.fixture
def retry_store(store: Store) -> Store:
    """Return a store with a node of four GPUs, on which a runs while b waits."""
    a_cluster(store, nodes=1, gpus=4)
    submit(store, a_spec("a", max_retries=20), a_spec("b", requested_gpus=4))
    run(store, a=[(A0, range(4))])
    return store


def back_off_s(store: Store, name: str = "a") -> float:
    """Return the seconds from a job's last crash to its next attempt."""
    crashes = [entry.at_s for entry in store.read(job_history, C, name) if entry.event == "crash"]
    return job(store, name).retry_s - crashes[-1]


def reason_of(store: Store, name: str = "a") -> Reason:
    reason = job(store, name).reason
    assert reason is not None
    return reason


def test_each_failure_in_a_row_doubles_the_back_off(retry_store: Store, database: Database) -> None:
    waits = []
    for _ in range(8):
        fail(retry_store, "a")
        waits.append(back_off_s(retry_store))
        end_back_off(database)
        run(retry_store, a=[(A0, range(4))])
    for wait_s, expected_s in zip(waits, (30, 60, 120, 240, 480, 960, 1800, 1800), strict=True):
        assert expected_s - 10.0 < wait_s <= expected_s  # the history is written a moment later


def test_a_failure_after_a_good_run_counts_as_the_first(
    retry_store: Store, database: Database
) -> None:
    fail(retry_store, "a")
    fail_again(retry_store, database)
    assert job(retry_store, "a").reason is not None
    assert back_off_s(retry_store) > 50.0
    end_back_off(database)
    run(retry_store, a=[(A0, range(4))])
    execute(database, "UPDATE jobs SET ran_at = ran_at - interval '11 min' WHERE name = 'a'")
    fail(retry_store, "a")
    assert back_off_s(retry_store) <= 30.0
    # A start that fails is a failure, too.
    end_back_off(database)
    snapshot = retry_store.snapshot(C)
    commit(retry_store, snapshot, start(snapshot, "a", [(A0, range(4))]))
    fail(retry_store, "a", "no such program")
    assert job(retry_store, "a").state is JobState.QUEUED
    assert back_off_s(retry_store) > 50.0


def fail_again(store: Store, database: Database) -> None:
    end_back_off(database)
    run(store, a=[(A0, range(4))])
    fail(store, "a")


def test_a_lost_node_is_no_failure_of_the_job(retry_store: Store, database: Database) -> None:
    execute(database, "UPDATE agents SET heard_at = heard_at - interval '2 h'")
    retry_store.expire(C)
    assert job(retry_store, "a").state is JobState.QUEUED
    assert (job(retry_store, "a").retries, job(retry_store, "a").retry_s) == (0, 0.0)


def test_a_failed_job_says_at_once_that_it_waits_and_until_when(
    retry_store: Store, database: Database
) -> None:
    fail(retry_store, "a", "x" * 5000)
    reason = reason_of(retry_store)  # no round has looked at it since
    assert (reason.code, job(retry_store, "a").reason_round) == (ReasonCode.BACK_OFF, 0)
    assert len(str(reason.message)) < 400
    assert str(reason.message).startswith("the job failed once, the last time with: xxx")
    prolong_back_off(database)
    assert 0 < retry_store.outlooks([C])[C].event_in_s <= 3600
    schedule(retry_store)
    end_back_off(database)
    assert "the next round may start it" in str(reason_of(retry_store).message)
    assert retry_store.outlooks([C])[C].event_in_s == float("inf")


def test_a_back_off_that_ends_while_a_round_is_committed_asks_for_another_round(
    retry_store: Store, database: Database
) -> None:
    fail(retry_store, "a")
    schedule(retry_store)
    execute(database, "UPDATE jobs SET retry_at = clock_timestamp()")
    assert retry_store.outlooks([C])[C].event_in_s == 0.0
    schedule(retry_store)
    assert retry_store.outlooks([C])[C].event_in_s == float("inf")


def test_a_back_off_asks_for_its_round_after_the_clock_was_set_back(
    retry_store: Store, database: Database
) -> None:
    fail(retry_store, "a")
    schedule(retry_store)
    hour_later = "to_jsonb(extract(epoch FROM clock_timestamp()) + 3600)"
    execute(
        database, f"UPDATE rounds SET summary = jsonb_set(summary, '{{created_s}}', {hour_later})"
    )
    assert 0 < retry_store.outlooks([C])[C].event_in_s <= 30.0


def test_a_released_job_is_retried_at_once(retry_store: Store, database: Database) -> None:
    fail(retry_store, "a")
    fail_again(retry_store, database)
    apply_event(retry_store, "a", JobEvent.HOLD)
    assert reason_of(retry_store).code is ReasonCode.HELD
    apply_event(retry_store, "a", JobEvent.RELEASE)
    assert (job(retry_store, "a").retry_s, job(retry_store, "a").reason) == (0.0, None)
    run(retry_store, a=[(A0, range(4))])
    fail(retry_store, "a")
    assert back_off_s(retry_store) <= 30.0


def test_a_held_job_says_that_a_user_holds_it_and_since_when(retry_store: Store) -> None:
    snapshot = retry_store.snapshot(C)
    commit(retry_store, snapshot, start(snapshot, "a", [(A0, range(4))]), wait(snapshot, "b"))
    assert reason_of(retry_store, "b").code is ReasonCode.NO_CAPACITY
    apply_event(retry_store, "b", JobEvent.HOLD)
    for decided in (False, True):
        if decided:
            schedule(retry_store)
        reason = reason_of(retry_store, "b")
        assert reason.code is ReasonCode.HELD
        assert str(reason.message).startswith("a user has held the job since 20")
        assert str(dict(reason.evidence)["since"]).startswith("20")
        assert reason.next_step == "release the job: `tessera release b`"
        assert job(retry_store, "b").reason_round == 0
    apply_event(retry_store, "b", JobEvent.RELEASE)
    assert job(retry_store, "b").reason is None  # it no longer waits because it was held


@pytest.mark.parametrize(
    ("event", "state"), [(JobEvent.CANCEL, JobState.CANCELLING), (JobEvent.HOLD, JobState.HOLDING)]
)
def test_a_job_that_leaves_does_not_repeat_why_it_was_suspended(
    retry_store: Store, event: JobEvent, state: JobState
) -> None:
    snapshot = retry_store.snapshot(C)
    commit(retry_store, snapshot, wait(snapshot, "a", DecisionKind.SUSPEND))
    assert (
        reason_of(retry_store).code is ReasonCode.NO_CAPACITY
    )  # this is the reason while the job stops
    apply_event(retry_store, "a", event)
    assert states(retry_store)["a"] is state
    expected = ReasonCode.HELD if state is JobState.HOLDING else ReasonCode.LEAVING
    assert reason_of(retry_store).code is expected
    assert "GPUs are being given back" in str(reason_of(retry_store).message)
    agents_report(retry_store)
    assert (job(retry_store, "a").reason is None) == (state is JobState.CANCELLING)


def test_a_job_that_runs_or_has_ended_has_no_reason(retry_store: Store) -> None:
    snapshot = retry_store.snapshot(C)
    commit(retry_store, snapshot, wait(snapshot, "b"))
    apply_event(retry_store, "b", JobEvent.CANCEL)
    assert job(retry_store, "b").reason is None
    assert job(retry_store, "a").reason is None
    apply_event(retry_store, "a", JobEvent.CANCEL)
    agents_report(retry_store)
    submit(retry_store, a_spec("c", max_retries=0))
    run(retry_store, c=[(A0, [0])])
    fail(retry_store, "c")
    record = job(retry_store, "c")
    assert (record.state, record.reason, record.retry_s) == (JobState.FAILED, None, 0.0)
