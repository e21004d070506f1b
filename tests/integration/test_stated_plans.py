"""Jobs that state their execution plan: submitted over a socket, priced, decided and recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tessera.db.store import PostgresStore
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.records.clusters import NodeSpec
from tessera.service.cells.deriver import CellDeriver
from tessera.v1 import jobs_pb2, scheduler_pb2
from tests.support.api import INVALID, Api, C, a_batch, a_cluster, a_round, a_submit, refusal_of
from tests.support.rpc import serving

MEGATRON = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    " --global-batch-size 256 --fp16 --use-distributed-optimizer"
)
DEEPSPEED = json.dumps(
    {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3},
    }
)


@pytest.fixture
async def calls(store: PostgresStore) -> AsyncIterator[Api]:
    """Yield a server whose cluster has one node of 8 GPUs and no estimates."""
    async with serving(store) as (channel, _):
        found = Api(channel)
        await found.clusters.UpsertCluster(a_cluster())
        store.hello("c", "agent", "first", [NodeSpec(name="n1", gpu_type="a100", gpus=8)])
        yield found


def derive(store: PostgresStore) -> None:
    CellDeriver(store, catalogue_of(), (1.0,)).derive("c")


async def run_round(calls: Api) -> scheduler_pb2.Round:
    """Decide and commit a round, and return it as it was recorded."""
    decided = await calls.scheduler.Schedule(a_round())
    assert decided.outcome == "committed"
    name = scheduler_pb2.GetRoundRequest(name=decided.name)
    recorded: scheduler_pb2.Round = await calls.scheduler.GetRound(name)
    assert recorded.execution_plans == decided.execution_plans
    return recorded


async def get_job(calls: Api, name: str) -> jobs_pb2.Job:
    job: jobs_pb2.Job = await calls.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{C}/jobs/{name}"))
    return job


def plan_of(recorded: scheduler_pb2.Round, job: str) -> ExecutionPlan:
    """Return the execution plan of a job's decision, by the digest in its Cell."""
    (mine,) = (d for d in recorded.decisions if d.job == f"{C}/jobs/{job}")
    digest = mine.allocation.cell.plan
    plan = read_execution_plan("plan", recorded.execution_plans[digest])
    assert plan.digest == digest
    return plan


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MEGATRON, "2 x tp2, 1F1B, ZeRO-1, f16, micro-batch 4 x 64"),
        (DEEPSPEED, "dp4, ZeRO-3, full recomputation, f16, micro-batch 8 x 8"),
    ],
)
async def test_a_job_runs_by_the_plan_in_the_file_that_it_was_submitted_with(
    store: PostgresStore, calls: Api, text: str, expected: str
) -> None:
    job = await calls.jobs.SubmitJob(a_submit("own", stated_plan=text))
    derive(store)
    recorded = await run_round(calls)
    assert str(plan_of(recorded, "own")) == expected
    held = (await get_job(calls, "own")).allocation
    assert held.execution_plan == job.stated_plan == recorded.execution_plans[held.cell.plan]
    assert held.rate > 0


async def test_a_plan_that_is_only_the_first_one_makes_way_for_a_better_one(
    store: PostgresStore, calls: Api
) -> None:
    slow = "--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --fp16"
    await calls.jobs.SubmitJobs(
        a_batch(
            a_submit("only", stated_plan=slow, requested_gpus=4),
            a_submit("first", stated_plan=slow, stated_plan_first=True, requested_gpus=4),
        )
    )
    derive(store)
    begun = await run_round(calls)
    assert plan_of(begun, "only") == plan_of(begun, "first")
    await calls.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{C}/jobs/only"))
    later = await calls.scheduler.Schedule(
        a_round(restart_horizon={"seconds": 10**6}, replan_spacing=0.0)
    )
    changed = plan_of(later, "first")
    assert changed != plan_of(begun, "first")
    assert (await get_job(calls, "first")).stated_plan == plan_of(begun, "first").to_json()


async def test_equal_plans_are_stored_once_and_a_round_lists_them_once(
    store: PostgresStore, calls: Api
) -> None:
    batch = [a_submit(f"j{i}", stated_plan=MEGATRON, requested_gpus=4) for i in range(2)]
    await calls.jobs.SubmitJobs(a_batch(*batch))
    derive(store)
    recorded = await run_round(calls)
    assert len(recorded.decisions) == 2
    assert len(recorded.execution_plans) == 1
    brief = await calls.scheduler.GetRound(
        scheduler_pb2.GetRoundRequest(name=recorded.name, summary_only=True)
    )
    assert not brief.execution_plans


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stated_plan": "--tensor-model-paralel-size 2"}, "--tensor-model-paralel-size"),
        ({"stated_plan": MEGATRON, "requested_gpus": 6}, "6"),
        ({"stated_plan": MEGATRON.replace("size 256", "size 512")}, "256"),
        ({"stated_plan": '{"zero_optimisation": {"stage": 1}}'}, "zero_optimization"),
        ({"stated_plan_first": True}, "stated_plan"),
    ],
)
async def test_a_plan_that_cannot_be_the_jobs_is_refused_and_nothing_is_stored(
    calls: Api, changes: dict[str, Any], said: str
) -> None:
    code, _, wrong = await refusal_of(calls.jobs.SubmitJob(a_submit(**changes)))
    assert code == INVALID
    assert wrong[0].startswith("job.stated_plan")
    with pytest.raises(Exception, match=said):
        await calls.jobs.SubmitJob(a_submit(**changes))
    assert not (await calls.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs
