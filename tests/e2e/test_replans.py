"""A replan of a job that trains: a real server, agent and JAX program, on the very same GPUs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage, Precision
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtimes import JAX
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.convert import estimate_to_proto, job_spec_to_proto
from tessera.v1 import estimates_pb2, jobs_pb2, scheduler_pb2
from tests.support.program_runs import ProgramRun
from tests.support.system import until
from tests.support.training_lab import HOUR_S, TrainingLab, run_training_lab

GPT = str(Path(__file__).parents[2] / "docs" / "examples" / "train_jax_gpt.py")
GPUS, BATCH, LAYERS, ITERATIONS = 4, 16, 6, 60
OWN = Workload(model="tiny-gpt", params="1M", global_batch=BATCH)
TOLERANCE = 1e-5
"""The largest difference of losses between plans, at float32."""


def make_plan(dp: int, tp: int, accumulation: int) -> ExecutionPlan:
    return ExecutionPlan(
        stages=(PlanStage(start=0, end=LAYERS, dp=dp, tp=tp),),
        micro_batch=BATCH // accumulation,
        accumulation=accumulation,
        precision=Precision.F32,
    )


DATA, TENSOR = make_plan(4, 1, 1), make_plan(2, 2, 2)


@pytest.fixture
def lab() -> Iterator[TrainingLab]:
    """Yield a cluster with one agent that has four GPUs."""
    with run_training_lab("replans") as lab:
        lab.program_agent("n0", GPUS)
        yield lab


def estimate(lab: TrainingLab, plan: ExecutionPlan, iter_time_s: float) -> None:
    """Store the iteration time of a plan on the node's GPUs."""
    record = EstimateRecord(
        workload=OWN,
        cell=Cell(
            gpu_type="a40",
            gpus=GPUS,
            pipeline_degree=plan.pipeline_degree,
            plan=plan.digest,
            nodes=1,
        ),
        plan=plan,
        iter_time_s=iter_time_s,
        source=EstimateSource.PROFILED,
    )
    request = estimates_pb2.UpsertCellsRequest(parent=lab.parent, cells=[estimate_to_proto(record)])
    lab.user.insist(lambda r: r.estimates.UpsertCells(request))


def submit(lab: TrainingLab, name: str) -> None:
    spec = JobSpec(
        name="",
        workload=OWN,
        iterations=ITERATIONS,
        requested_gpus=GPUS,
        restart_s=0.0,
        command=(GPT, "--precision", "f32", "--pause-s", "0.1", "--every", "1000"),
        launch=LaunchSpec(runtime=JAX, stop_grace_s=HOUR_S),
    )
    request = jobs_pb2.SubmitJobRequest(
        parent=lab.parent, job_id=name, job=job_spec_to_proto("", spec)
    )
    lab.user.insist(lambda r: r.jobs.SubmitJob(request))


def events_of(lab: TrainingLab, name: str) -> list[str]:
    request = jobs_pb2.ListJobEventsRequest(parent=f"{lab.parent}/jobs/{name}")
    listed = lab.user.insist(lambda r: r.jobs.ListJobEvents(request))
    return [event.detail for event in listed.events]


def replan_of(lab: TrainingLab) -> scheduler_pb2.Decision | None:
    """Return the decision of a round that replanned a job, if there was one."""
    decisions = (d for number in lab.rounds() for d in number.decisions)
    return next((d for d in decisions if d.kind == "replan"), None)


def executions(job: Path) -> dict[int, tuple[list[int], float]]:
    """Return the samples and the loss of each iteration. None may have been executed twice."""
    samples: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for path in sorted((job / "ledger").iterdir()):
        for entry in map(json.loads, path.read_text().splitlines()):
            samples.setdefault(entry["iteration"], []).extend(entry["samples"])
            losses[entry["iteration"]] = entry["loss"]
    return {n: (sorted(samples[n]), losses[n]) for n in samples}


def test_a_replan_on_the_same_gpus_loses_and_repeats_no_sample_and_keeps_the_loss(
    lab: TrainingLab, tmp_path: Path
) -> None:
    estimate(lab, DATA, 1.0)
    estimate(lab, TENSOR, 2.0)
    submit(lab, "gpt")
    until(lambda: lab.job("gpt").iterations_done >= 5, "the job trains by data parallelism")
    before = lab.job("gpt").allocation
    assert before.execution_plan == DATA.to_json()

    estimate(lab, TENSOR, 1e-4)

    def replanned() -> scheduler_pb2.Decision | None:
        lab.schedule()
        return replan_of(lab)

    decision = until(replanned, "a round replans the job")
    after = decision.allocation
    assert (after.shares, after.generation) == (before.shares, before.generation + 1)
    assert decision.reason.code == "REPLANNED"
    why = decision.reason.message
    assert why.startswith(f"the plan {TENSOR.digest[:12]} is ")
    assert " x as fast on the same 4 GPUs; the restart of " in why
    assert f"replan: {why}" in events_of(lab, "gpt")

    job = lab.wait_for_state("gpt", jobs_pb2.SUCCEEDED)
    assert job.iterations_done == ITERATIONS
    assert lab.broken_rules() == []
    alone = tmp_path / "alone"
    alone.mkdir()
    argv = (sys.executable, GPT, "--precision", "f32")
    with ProgramRun(alone, 1, argv, ITERATIONS, batch=BATCH) as run:
        run.wait()
    ours, undisturbed = executions(lab.files("gpt")), executions(alone)
    assert sorted(ours) == sorted(undisturbed) == list(range(ITERATIONS))
    for number, (samples, loss) in undisturbed.items():
        assert ours[number][0] == samples
        assert ours[number][1] == pytest.approx(loss, abs=TOLERANCE)
    assert undisturbed[ITERATIONS - 1][1] < undisturbed[0][1]
    seen = Counter(sample for samples, _ in ours.values() for sample in samples)
    assert max(seen.values()) - min(seen.values()) <= 1
