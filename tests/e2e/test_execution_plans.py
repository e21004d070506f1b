"""The execution plan of a job is the same everywhere, from its estimate to the node that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest

from tessera.estimator.architectures.published import published_models
from tessera.formulation.execution_plan import read_execution_plan
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.values import Workload
from tessera.service.cli.demo.stack import run_stack
from tessera.service.rpc.convert import job_spec_to_proto
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2
from tests.support.system import Agent, Lab, User, until

GPUS = 4

WORKLOADS = {
    f"job-{k}": Workload(model=model, params=params, global_batch=256)
    for k, (model, params) in enumerate(published_models())
}
"""A workload of each model of the catalogue, by job."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Yield a cluster with GPUs that are large enough for every model on four of them."""
    settings = {"TESSERA_ESTIMATE_COUNTS": "1"}
    with (
        run_stack(replicas=1, settings=settings) as stack,
        User(stack) as user,
        Lab(stack, user, "plans") as made,
    ):
        roomy = clusters_pb2.GpuType(name="a40", memory_bytes=1 << 43)
        cluster = clusters_pb2.Cluster(name=made.parent, gpu_types=[roomy])
        request = clusters_pb2.UpsertClusterRequest(cluster=cluster)
        user.insist(lambda r: r.clusters.UpsertCluster(request))
        yield made


def submit(lab: Lab, job: str, workload: Workload) -> None:
    spec = JobSpec(name="", workload=workload, iterations=10**9, requested_gpus=GPUS)
    request = jobs_pb2.SubmitJobRequest(
        parent=lab.parent, job_id=job, job=job_spec_to_proto("", spec)
    )
    lab.user.insist(lambda r: r.jobs.SubmitJob(request))


def estimated_plans(lab: Lab, workload: Workload) -> dict[str, str]:
    """Return the canonical JSON of the estimated execution plans by digest."""
    key = estimates_pb2.Workload(
        model=workload.model, params=workload.params, global_batch=workload.global_batch
    )
    request = estimates_pb2.ListCellsRequest(parent=lab.parent, workload=key)
    cells = lab.user.insist(lambda r: r.estimates.ListCells(request)).cells
    return {cell.cell.plan: cell.execution_plan for cell in cells}


def plan_in_file(agent: Agent, job: str) -> str:
    plan = agent.file_of(job, 1, "gang.json")["execution_plan"]
    assert isinstance(plan, str)
    return plan


def test_a_plan_is_the_same_byte_for_byte_from_its_estimate_to_the_node(lab: Lab) -> None:
    agent = lab.agent(("n0", 48), ("n1", 48))
    for job, workload in WORKLOADS.items():
        submit(lab, job, workload)

    def all_run() -> bool:
        lab.schedule()
        return len(lab.jobs(jobs_pb2.RUNNING)) == len(WORKLOADS)

    until(all_run, "all jobs run")
    decided, recorded = {}, dict[str, str]()
    for number in lab.rounds():
        recorded.update(number.execution_plans)
        for decision in number.decisions:
            if decision.HasField("allocation"):
                decided[decision.job.rpartition("/")[2]] = decision.allocation.cell
    for job, workload in WORKLOADS.items():
        text, held = plan_in_file(agent, job), lab.job(job).allocation
        assert held.execution_plan == recorded[held.cell.plan] == text
        assert decided[job].plan == held.cell.plan == sha256(text.encode()).hexdigest()
        assert estimated_plans(lab, workload)[held.cell.plan] == text
        plan = read_execution_plan("plan", text)
        layers = len(published_models()[workload.model, workload.params].graph)
        plan.check_fits("plan", workload, held.cell.gpus, layers)
        assert decided[job].pipeline_degree == held.cell.pipeline_degree == plan.pipeline_degree
