"""Jobs that state plans, techniques or cores: submitted over a socket, priced, decided and recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from tessera.db.store.store import Store
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    PlanStage,
    Precision,
    read_execution_plan,
)
from tessera.formulation.job.techniques import Technique, techniques_of
from tessera.service.server.estimates.deriver import CellDeriver
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2
from tests.support.api import (
    INVALID,
    Api,
    C,
    a_batch,
    a_cluster,
    a_round,
    a_submit,
    connect_agent,
    refusal_of,
)
from tests.support.rpc import error_details, serving

MEGATRON = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    " --global-batch-size 256 --fp16 --use-distributed-optimizer"
)


TENSORS = "--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --fp16"
WHOLE = ExecutionPlan(
    stages=(PlanStage(start=0, end=26, dp=1, tp=4),),
    micro_batch=4,
    accumulation=64,
    precision=Precision.F16,
    model="bert/1.3B",
)


@pytest.fixture
async def calls(store: Store) -> AsyncIterator[Api]:
    """Yield a server whose cluster has one node of 8 GPUs and no estimates."""
    async with serving(store) as (channel, _):
        found = Api(channel)
        await found.clusters.UpsertCluster(a_cluster())
        connect_agent(store, "n1")
        yield found


def derive(store: Store) -> None:
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
        (WHOLE.to_json(), str(WHOLE)),
    ],
)
async def test_a_job_runs_by_the_plan_in_the_file_that_it_was_submitted_with(
    store: Store, calls: Api, text: str, expected: str
) -> None:
    job = await calls.jobs.SubmitJob(a_submit("own", plan=text))
    derive(store)
    recorded = await run_round(calls)
    assert str(plan_of(recorded, "own")) == expected
    held = (await get_job(calls, "own")).allocation
    assert held.execution_plan == job.plan == recorded.execution_plans[held.cell.plan]
    assert held.rate > 0


async def test_a_plan_that_is_only_the_first_one_makes_way_for_a_better_one(
    store: Store, calls: Api
) -> None:
    await calls.jobs.SubmitJobs(
        a_batch(
            a_submit("only", plan=TENSORS, requested_gpus=4),
            a_submit("first", plan=TENSORS, plan_first=True, requested_gpus=4),
        )
    )
    derive(store)
    begun = await run_round(calls)
    assert plan_of(begun, "only") == plan_of(begun, "first")
    await calls.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{C}/jobs/only"))
    later = await calls.scheduler.Schedule(
        a_round(restart_horizon={"seconds": 10**6}, replan_spacing=0.0, change_spacing=0.0)
    )
    changed = plan_of(later, "first")
    assert changed != plan_of(begun, "first")
    assert (await get_job(calls, "first")).plan == plan_of(begun, "first").to_json()


async def test_equal_plans_are_stored_once_and_a_round_lists_them_once(
    store: Store, calls: Api
) -> None:
    batch = [a_submit(f"j{i}", plan=MEGATRON, requested_gpus=4) for i in range(2)]
    await calls.jobs.SubmitJobs(a_batch(*batch))
    derive(store)
    recorded = await run_round(calls)
    assert len(recorded.decisions) == 2
    assert len(recorded.execution_plans) == 1
    brief = await calls.scheduler.GetRound(
        scheduler_pb2.GetRoundRequest(name=recorded.name, summary_only=True)
    )
    assert not brief.execution_plans


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"plan": "--tensor-model-paralel-size 2"}, "plan", "paralel-size"),
    ({"plan": '{"zero_optimization": {"stage": 1}}'}, "plan", "not a field of a plan"),
    ({"plan_first": True}, "plan", "plan"),
    (
        {"submitted_plan": TENSORS, "techniques": ["dp"]},
        "submitted_plan",
        "uses tp, accumulation, and the job's techniques are dp",
    ),
    (
        {"plan": TENSORS, "techniques": ["tp"]},
        "plan",
        "uses accumulation, and the job's techniques are tp; state another plan, or name all",
    ),
    (
        {"submitted_plan": TENSORS, "launch": {"runtime": "torchrun"}, "command": ["train.py"]},
        "submitted_plan",
        "the runtime 'torchrun' cannot run it",
    ),
    ({"techniques": ["dp", "zero4"]}, "techniques", "'zero4'"),
    ({"requested_cpus": -1}, "requested_cpus", "0"),
]


"""Fields of a job that contradict each other, the wrong one, and what the refusal says."""


async def test_contradictions_are_refused_and_nothing_is_stored(calls: Api) -> None:
    for changes, field, said in CONTRADICTIONS:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await calls.jobs.SubmitJob(a_submit(**changes))
        assert error_details(refused.value)[1][0].startswith(f"job.{field}")
    assert not (await calls.jobs.ListJobs(jobs_pb2.ListJobsRequest(parent=C))).jobs


GIB = 2**30


async def test_a_job_is_offered_only_plans_of_its_techniques(store: Store, calls: Api) -> None:
    await calls.jobs.SubmitJobs(
        a_batch(
            a_submit("few", techniques=["dp", "checkpointing", "accumulation"]),
            a_submit(
                "torch",
                techniques=["dp", "zero3", "checkpointing", "accumulation"],
                launch={"runtime": "torchrun"},
                command=["train.py"],
            ),
        )
    )
    derive(store)
    runtimes = store.snapshot("c").runtimes
    assert runtimes.name == ("", "torchrun")
    assert runtimes.techniques == (
        "dp, checkpointing, accumulation",
        "dp, zero3, checkpointing, accumulation",
    )
    assert not runtimes.pipelines.any()
    await run_round(calls)
    for name in ("few", "torch"):
        job = await get_job(calls, name)
        plan = read_execution_plan("plan", job.allocation.execution_plan)
        assert techniques_of(plan) <= set(map(Technique, job.techniques))


async def test_nodes_and_cells_carry_cores_and_host_memory(calls: Api) -> None:
    node = clusters_pb2.Node(
        name=f"{C}/nodes/n1", gpu_type="a100", gpus=8, cpus=0, host_bytes=512 * GIB
    )
    await calls.clusters.UpsertNodes(clusters_pb2.UpsertNodesRequest(parent=C, nodes=[node]))
    request = clusters_pb2.ListNodesRequest(parent=C)
    (stored,) = (await calls.clusters.ListNodes(request)).nodes
    assert (stored.HasField("cpus"), stored.cpus, stored.host_bytes) == (True, 0, 512 * GIB)
    assert not stored.HasField("reported_cpus")
    node.host_bytes = -1
    code, _, wrong = await refusal_of(
        calls.clusters.UpsertNodes(clusters_pb2.UpsertNodesRequest(parent=C, nodes=[node]))
    )
    assert (code, wrong) == (INVALID, ["nodes[0].host_bytes"])
    estimate = estimates_pb2.CellEstimate(
        workload=a_submit().job.workload,
        cell=estimates_pb2.Cell(gpu_type="a100", gpus=4),
        nodes=1,
        iter_time_s=1.0,
        source=estimates_pb2.MEASURED,
        cpus=12,
        host_bytes=3 * GIB,
    )
    await calls.estimates.UpsertCells(estimates_pb2.UpsertCellsRequest(parent=C, cells=[estimate]))
    (cell,) = (await calls.estimates.ListCells(estimates_pb2.ListCellsRequest(parent=C))).cells
    assert (cell.cpus, cell.host_bytes) == (12, 3 * GIB)
