"""Refusals and warnings of submissions, over a real socket against PostgreSQL."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.db.store import PostgresStore
from tessera.formulation.values import Workload
from tessera.v1 import estimates_pb2, jobs_pb2, launch_pb2
from tests.support.api import (
    INVALID,
    C,
    a_batch,
    a_cell,
    a_submit,
    a_workload,
    api,
    refusal_of,
    some_cells,
)
from tests.support.execution_plans import a_plan
from tests.support.launches import WHOLE_MESSAGE
from tests.support.rpc import WALL_S

SOON = Timestamp(seconds=int(WALL_S) + 3600)


async def test_a_command_that_the_runtime_cannot_run_is_refused_with_what_to_do(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        wrong_job: dict[str, Any] = {
            "command": ["python", "train.py"],
            "launch": {"runtime": "replay"},
        }
        request = a_submit(**wrong_job)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await a.jobs.SubmitJob(request)
        assert caught.value.details() == (
            "job.command: the replay runtime trains nothing, so it cannot run 'python train.py'; submit"
            " the job with the runtime 'command', or without a command"
        )
        assert (await refusal_of(a.jobs.SubmitJob(request)))[::2] == (INVALID, ["job.command"])
        batch = a_batch(a_submit("a"), a_submit("b", **wrong_job))
        code, _, wrong = await refusal_of(a.jobs.SubmitJobs(batch))
        assert (code, wrong) == (INVALID, ["requests[1].job.command"])
        assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs
        await a.jobs.SubmitJob(a_submit(command=["fail-at", "7"]))


async def test_each_runtime_takes_a_job_and_answers_show_what_was_stated(
    store: PostgresStore,
) -> None:
    commands = {
        "replay": ["fail-at", "7"],
        "command": ["python", "train.py"],
        "torchrun": ["train.py", "--epochs", "3"],
        "deepspeed": ["-m", "train"],
        "megatron": ["pretrain_gpt.py"],
    }
    launch = launch_pb2.Launch()
    launch.CopyFrom(WHOLE_MESSAGE)
    async with api(store) as a:
        for runtime, command in commands.items():
            launch.runtime, launch.until_exit = runtime, runtime != "replay"
            job = await a.jobs.SubmitJob(a_submit(runtime, command=command, launch=launch))
            assert (job.launch, list(job.command)) == (launch, command)
            assert await a.jobs.GetJob(jobs_pb2.GetJobRequest(name=job.name)) == job
        for name, command in commands.items():
            implied = await a.jobs.SubmitJob(a_submit(f"{name}-implied", command=command))
            runtime = "replay" if name == "replay" else "command"
            assert implied.launch == launch_pb2.Launch(runtime=runtime)


async def test_a_launch_that_cannot_be_is_refused_by_its_field_and_nothing_is_stored(
    store: PostgresStore,
) -> None:
    plan = a_plan(Workload(model="own", params="1.3B", global_batch=256), 4)
    refused: dict[str, dict[str, Any]] = {
        "launch.runtime": {"runtime": "slurm"},
        "launch.environment[A]": {"environment": {"A": "tessera_token_" + 12 * "a"}},
        "stated_plan": {"runtime": "torchrun"},
        "command": {"runtime": "replay"},
    }
    async with api(store) as a:
        for field, launch in refused.items():
            request = a_submit(
                workload=a_workload("own"),
                command=["train.py"],
                launch=launch,
                stated_plan=plan.to_json(),
            )
            answer = await refusal_of(a.jobs.SubmitJob(request))
            assert answer[::2] == (INVALID, [f"job.{field}"])
        assert not (await a.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs
        request.job.launch.Clear()
        await a.jobs.SubmitJob(request)
        idle = a_submit("a", launch=launch_pb2.Launch(until_exit=True))
        answer = await refusal_of(a.jobs.SubmitJob(idle))
        assert answer[::2] == (INVALID, ["job.launch.until_exit"])


async def test_the_launch_of_a_submitted_job_cannot_change(store: PostgresStore) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit("a", command=["train.py"], launch=WHOLE_MESSAGE))
        changed = jobs_pb2.Job(
            name=job.name, weight=2.0, launch=launch_pb2.Launch(runtime="command")
        )
        request = jobs_pb2.UpdateJobRequest(job=changed, update_mask=FieldMask(paths=["launch"]))
        code, _, wrong = await refusal_of(a.jobs.UpdateJob(request))
        assert (code, wrong) == (INVALID, ["update_mask"])
        updated = await a.jobs.UpdateJob(jobs_pb2.UpdateJobRequest(job=changed))
        assert (updated.weight, updated.launch) == (2.0, WHOLE_MESSAGE)


async def test_a_deadline_that_the_standing_policy_ignores_produces_a_warning(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        job = await a.jobs.SubmitJob(a_submit("a", deadline=SOON, request_id="r"))
        (warning,) = job.warnings
        assert "promises no new deadline" in warning
        assert "`tessera policy set --objective 'deadline then throughput'`" in warning
        assert "`tessera round --objective 'deadline then throughput'`" in warning
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


TYPED = {"requested_gpu_type": "a100"}


async def test_a_misspelt_model_of_a_job_that_needs_an_estimate_is_refused(
    store: PostgresStore,
) -> None:
    mine = a_cell(1)
    mine.workload.model, mine.workload.params = "mine", "2B"
    meant = {
        ("bertt", "1.3B"): "bert/1.3B (--model bert --params 1.3B)",
        ("bert", "1.3"): "bert/1.3B",
        ("BERT", "1.3B"): "bert/1.3B",
        ("bert/1.3B", ""): "bert/1.3B",
        ("lama7", "7B"): "llama7/7B",
        ("minee", "2B"): "mine/2B",  # it has an estimate
    }
    async with api(store) as a:
        await a.estimates.UpsertCells(some_cells(mine))
        for number, ((model, params), name) in enumerate(meant.items()):
            workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
            with pytest.raises(grpc.aio.AioRpcError, match=r"job\.workload\.model") as refused:
                await a.jobs.SubmitJob(a_submit("a", workload=workload))
            assert f"did you mean {name}" in str(refused.value.details())
            batch = a_batch(a_submit("a"), a_submit("b", workload=workload))
            fields = (await refusal_of(a.jobs.SubmitJobs(batch)))[2]
            assert fields == ["requests[1].job.workload.model"]
            job = a_submit(f"typed-{number}", workload=workload, **TYPED)
            (warning,) = (await a.jobs.SubmitJob(job)).warnings
            assert f"did you mean {name}" in warning


async def test_a_model_of_ones_own_may_be_submitted_before_it_is_described(
    store: PostgresStore,
) -> None:
    async with api(store) as a:
        for model, params in (("bert-mine", "1.3B"), ("bert", "1.4B"), ("mlp", "")):
            workload = estimates_pb2.Workload(model=model, params=params, global_batch=256)
            (warning,) = (await a.jobs.SubmitJob(a_submit("", workload=workload))).warnings
            assert "the job waits until somebody does: `tessera models add`" in warning
            assert not (await a.jobs.SubmitJob(a_submit("", workload=workload, **TYPED))).warnings
        for model, message in (
            ("bert", r"bert needs its size.* state its params .* one of 1.3B, 15B"),
            ("gpt-2", r"gpt-2 is not known; did you mean gpt2\? .* one of 1.5B"),
        ):
            workload = estimates_pb2.Workload(model=model, global_batch=256)
            with pytest.raises(grpc.aio.AioRpcError, match=message):
                await a.jobs.SubmitJob(a_submit("", workload=workload))
