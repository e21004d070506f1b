"""The holds of a job's GPUs, as its history on a server tells them."""

from __future__ import annotations

from tessera.benchmarks.schedulers.server_records import first_start_s, read_holds
from tessera.formulation.job.lifecycle import JobEvent, JobState, advance_state
from tessera.formulation.records.jobs import JobEventRecord


def a_history(*events: tuple[JobEvent, float]) -> list[JobEventRecord]:
    """Return the history of a job with these events at these times."""
    state, records = JobState.QUEUED, []
    for event, at_s in events:
        state = advance_state(state, event)
        records.append(JobEventRecord(at_s=at_s, event=event.value, state=state, detail=""))
    return records


def test_a_hold_lasts_until_a_round_or_the_job_itself_ends_it() -> None:
    events = a_history(
        (JobEvent.START, 10.0),
        (JobEvent.RAN, 13.0),
        (JobEvent.SUSPEND, 20.0),
        (JobEvent.GONE, 21.0),
        (JobEvent.START, 30.0),
        (JobEvent.MOVE, 45.0),
        (JobEvent.RAN, 47.0),
        (JobEvent.FINISH, 60.0),
    )
    holds = list(read_holds(events, restart_s=2.0))
    assert [(hold.start_s, hold.ready_s, hold.end_s) for hold in holds] == [
        (10.0, 12.0, 20.0),
        (30.0, 32.0, 45.0),
        (45.0, 47.0, 60.0),
    ]
    assert [hold.is_stopped for hold in holds] == [True, True, False]
    assert [hold.is_short(spacing=4.5) for hold in holds] == [True, False, False]
    assert first_start_s(events) == 10.0


def test_a_hold_that_a_failure_ends_was_not_stopped_by_a_round() -> None:
    events = a_history((JobEvent.START, 0.0), (JobEvent.LOST, 1.0), (JobEvent.GONE, 2.0))
    (hold,) = read_holds(events, restart_s=2.0)
    assert not hold.is_stopped


def test_a_job_that_never_started_has_no_hold_and_no_start() -> None:
    events = a_history((JobEvent.HOLD, 0.0), (JobEvent.CANCEL, 1.0))
    assert list(read_holds(events, restart_s=2.0)) == []
    assert first_start_s(events) == float("inf")
