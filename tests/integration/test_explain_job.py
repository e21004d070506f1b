"""ExplainJob over a socket, on rounds that are stored in PostgreSQL."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.service.loop import RoundLoop
from tessera.v1 import jobs_pb2
from tests.support.api import (
    Api,
    C,
    a_round,
    a_submit,
    api_with_agent,
    refusal_of,
)
from tests.support.stored_cluster import execute

JOB = f"{C}/jobs/weak"


@pytest.fixture
def store(database: Database) -> PostgresStore:
    """Return a store whose agents do not expire, however slow the machine is."""
    return PostgresStore(database, lease_s=3600.0)


async def submit_three(a: Api) -> None:
    """Submit three jobs of 8 GPUs for two nodes: the third waits."""
    for name, weight in (("one", 5.0), ("two", 5.0), ("weak", 1.0)):
        await a.jobs.SubmitJob(a_submit(name, weight=weight, requested_gpus=8, min_gpus=8))


def a_request(name: str = JOB, **more: object) -> jobs_pb2.ExplainJobRequest:
    return jobs_pb2.ExplainJobRequest(name=name, **more)  # type: ignore[arg-type]


async def test_a_waiting_job_is_explained_and_the_step_works_in_the_next_round(
    store: PostgresStore,
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        await a.scheduler.Schedule(a_round(objective="throughput"))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.kind) == ("", "wait")
        assert (explained.reason.code, explained.cause) == ("OUTPRICED", "capacity")
        assert explained.complete
        assert explained.rounds_tried > 0
        assert {d.job for d in explained.displaced_by} <= {f"{C}/jobs/one", f"{C}/jobs/two"}
        assert [d.by for d in explained.displaced_by] == ["VALUE"]
        assert explained.displaced_by[0].value_per_gpu > explained.value_per_gpu
        step = explained.steps[0]
        assert (step.actor, step.claim, step.changes[0].kind) == ("user", "RUNS", "WEIGHT")
        assert explained.reason.next_step == step.message
        job = jobs_pb2.Job(name=JOB, weight=step.changes[0].amount)
        await a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=job))
        await a.scheduler.Schedule(a_round(objective="throughput"))
        now = await a.jobs.ExplainJob(a_request(without_steps=True))
        assert (now.round, now.kind, now.reason.code) == (f"{C}/rounds/2", "start", "STARTED")
        spans = [(s.first_round, s.last_round, s.kind, s.cause, s.cell) for s in now.history]
        assert spans == [(2, 2, "start", "", "8 x a100"), (1, 1, "wait", "capacity", "")]


async def test_equal_rounds_are_one_span_and_an_earlier_round_is_explained_as_it_was(
    store: PostgresStore,
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        for _ in range(3):
            await a.scheduler.Schedule(a_round(objective="throughput"))
        explained = await a.jobs.ExplainJob(a_request(round=2))
        assert explained.round == f"{C}/rounds/2"
        (span,) = explained.history
        assert (span.first_round, span.last_round, span.code) == (1, 2, "OUTPRICED")


async def test_a_job_that_no_round_has_seen_is_held_or_has_ended_is_explained_as_of_now(
    store: PostgresStore,
) -> None:
    async with api_with_agent(store) as a:
        await a.jobs.SubmitJob(a_submit("weak"))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.kind, explained.reason.code) == ("", "start", "STARTED")
        assert (await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=JOB))).state == jobs_pb2.QUEUED
        await a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=JOB))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.round, explained.reason.code) == ("", "HELD")
        assert explained.reason.message.startswith("a user has held the job since")
        assert explained.steps[0].changes[0].kind == "RELEASE"
        assert explained.steps[0].claim == "RUNS"
        assert not explained.history
        await a.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=JOB))
        explained = await a.jobs.ExplainJob(a_request())
        assert (explained.kind, explained.note) == ("", "the job has ended")


async def test_without_the_snapshot_the_stored_reason_is_left(
    store: PostgresStore, database: Database
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        await a.scheduler.Schedule(a_round(objective="throughput"))
        before = await a.jobs.ExplainJob(a_request(round=1))
        execute(database, "UPDATE rounds SET snapshot = NULL, base = NULL")  # as retention does
        after = await a.jobs.ExplainJob(a_request(round=1))
        assert (after.kind, after.reason.code) == (before.kind, before.reason.code)
        assert not after.steps
        assert not after.complete
        assert "is no longer kept" in after.note


async def test_unknown_jobs_and_rounds_are_refused(store: PostgresStore) -> None:
    invalid, missing = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
    async with api_with_agent(store) as a:
        await a.scheduler.Schedule(a_round())  # round 1 is before the job
        await a.jobs.SubmitJob(a_submit("weak"))
        for name, number, code in (
            (f"{C}/jobs/none", 0, missing),
            (JOB, 9, missing),
            (JOB, 1, invalid),
            (JOB, -1, invalid),
            ("weak", 0, invalid),
        ):
            assert (await refusal_of(a.jobs.ExplainJob(a_request(name, round=number))))[0] is code
        for number, code in ((9, missing), (-1, invalid)):
            request = a_request(round=number, recorded_only=True)
            assert (await refusal_of(a.jobs.ExplainJob(request)))[0] is code


async def test_what_is_recorded_is_reported_without_deciding_a_round(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_with_agent(store) as a:
        await submit_three(a)
        new = await a.jobs.ExplainJob(a_request(recorded_only=True))
        assert (new.round, new.kind, new.reason.code, len(new.history)) == ("", "", "", 0)
        for _ in range(2):
            await a.scheduler.Schedule(a_round(objective="throughput"))
        monkeypatch.setattr(RoundLoop, "decide", None)  # a call of it would fail
        waits = await a.jobs.ExplainJob(a_request(recorded_only=True))
        stored = await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=JOB))
        assert (waits.round, waits.kind, waits.cause) == (f"{C}/rounds/2", "wait", "capacity")
        assert waits.reason == stored.reason
        assert not waits.steps
        assert not waits.displaced_by
        assert waits.complete
        earlier = await a.jobs.ExplainJob(a_request(recorded_only=True, round=1))
        assert (earlier.round, earlier.reason.code) == (f"{C}/rounds/1", "OUTPRICED")
        runs = await a.jobs.ExplainJob(a_request(f"{C}/jobs/one", recorded_only=True))
        assert (runs.round, runs.kind, runs.reason.code) == (f"{C}/rounds/2", "keep", "")
        await a.jobs.HoldJob(jobs_pb2.HoldJobRequest(name=JOB))
        held = await a.jobs.ExplainJob(a_request(recorded_only=True))
        assert (held.round, held.kind, held.reason.code) == ("", "wait", "HELD")
