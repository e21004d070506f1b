"""Refusals and warnings of submissions, over a real socket against PostgreSQL."""

from __future__ import annotations

import grpc.aio
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.db.store import PostgresStore
from tessera.v1 import jobs_pb2
from tests.support.api import INVALID, C, a_batch, a_submit, api, refusal_of
from tests.support.rpc import WALL_S

SOON = Timestamp(seconds=int(WALL_S) + 3600)


async def test_a_command_that_no_agent_can_run_is_refused_with_what_to_do(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        request = a_submit(command=["python", "train.py"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await a.jobs.SubmitJob(request)
        assert caught.value.details() == (
            "job.command: this release's agents replay jobs and train nothing, so they cannot run"
            " 'python train.py'; submit the job without a command"
        )
        assert (await refusal_of(a.jobs.SubmitJob(request)))[::2] == (INVALID, ["job.command"])
        batch = a_batch(a_submit("a"), a_submit("b", command=["python", "train.py"]))
        code, _, wrong = await refusal_of(a.jobs.SubmitJobs(batch))
        assert (code, wrong) == (INVALID, ["requests[1].job.command"])
        assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs
        await a.jobs.SubmitJob(a_submit(command=["fail-at", "7"]))


async def test_a_deadline_that_the_standing_policy_ignores_produces_a_warning(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, request_id="r"))
        (warning,) = job.warnings
        assert "promises no new deadline" in warning
        assert "--objective 'deadline then throughput'" in warning
        assert "TESSERA_POLICY=" in warning
        again = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, request_id="r"))
        assert again == job
        answer = await a.jobs.SubmitJobs(a_batch(a_submit("b", deadline=SOON), a_submit("c")))
        assert [list(j.warnings) for j in answer.jobs] == [[warning], []]
        change = jobs_pb2.UpdateJobRequest(
            job=jobs_pb2.Job(name=f"{C}/jobs/c", deadline=SOON, weight=2.0),
            update_mask=FieldMask(paths=["deadline"]),
        )
        assert list((await a.jobs.UpdateJob(change)).warnings) == [warning]
        change.update_mask.paths[:] = ["weight"]
        assert not (await a.jobs.UpdateJob(change)).warnings
        assert not (await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=job.name))).warnings


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("objective: deadline then throughput", ""),
        ("deadlines: myopic", ""),
        ("deadlines: planned", ""),
        ("deadlines: ignore", "(deadlines: ignore)"),
        ("scheduler: fcfs", "the scheduler 'fcfs' decides rounds"),
        ("{scheduler: fcfs, deadlines: look-ahead}", "the scheduler 'fcfs' decides rounds"),
    ],
)
async def test_warnings_follow_the_standing_policy(
    store: PostgresStore, policy: str, message: str
) -> None:
    async with api(store, policy=policy) as a:
        job = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, validate_only=True))
    assert len(job.warnings) == bool(message)
    assert all(message in warning for warning in job.warnings)
