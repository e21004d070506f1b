"""A job that tunes at launch: real server, agent and keeper, and a program that picks a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, read_execution_plan
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtimes import JAX
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.convert import job_spec_to_proto
from tessera.v1 import estimates_pb2, jobs_pb2
from tests.support.programs import train
from tests.support.system import until
from tests.support.training_lab import HOUR_S, TrainingLab, run_training_lab

GPUS = 4
OWL = Workload(model="owl", params="1B", global_batch=64)
OWL_MODEL = estimates_pb2.Model(
    model=OWL.model,
    params=OWL.params,
    architecture='{"architecture": "transformer", "layers": 14, "hidden": 2048, "heads": 16,'
    ' "sequence": 1024, "vocabulary": 32000, "dtype": "bf16"}',
)
PICKS_THE_LAST = """
import json
from tessera import progress
tuning = progress.tuning()
with open(progress.job_dir() / "starts.json", "a") as file:
    print(json.dumps({"plan": progress.plan(), "tuning": tuning}), file=file)
if tuning is not None:
    progress.begin_tuning()
    progress.report_plan(tuning["plans"][-1], 0.5, 1.0)
"""
"""A program that notes each of its starts, and runs by the last of the plans that it may try."""

WAIT = "import time; time.sleep(0.02)"


@pytest.fixture
def lab() -> Iterator[TrainingLab]:
    """Yield a cluster with one agent, whose Cells the server estimates."""
    with run_training_lab("tuning", TESSERA_ESTIMATE_COUNTS="1") as lab:
        models = estimates_pb2.UpsertModelsRequest(parent=lab.parent, models=[OWL_MODEL])
        lab.user.insist(lambda r: r.estimates.UpsertModels(models))
        lab.program_agent("n0", GPUS)
        yield lab


def starts(lab: TrainingLab, name: str) -> list[dict[str, object]]:
    """Return what the program noted at each of its starts."""
    path = lab.files(name) / "starts.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan_of(lab: TrainingLab, name: str) -> ExecutionPlan:
    return read_execution_plan("plan", lab.job(name).allocation.execution_plan)


def test_the_plan_that_a_program_picked_is_the_jobs_and_that_of_its_next_start(
    lab: TrainingLab, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PICKS_THE_LAST + train(WAIT))
    spec = JobSpec(
        name="",
        workload=OWL,
        iterations=10**9,
        requested_gpus=GPUS,
        min_gpus=GPUS,
        max_gpus=GPUS,
        restart_s=0.0,
        command=(str(script),),
        launch=LaunchSpec(runtime=JAX, tuning_space="full", stop_grace_s=HOUR_S),
    )
    request = jobs_pb2.SubmitJobRequest(
        parent=lab.parent, job_id="tunes", job=job_spec_to_proto("", spec)
    )
    lab.user.insist(lambda r: r.jobs.SubmitJob(request))
    first = until(lambda: starts(lab, "tunes"), "the program has started")[0]
    assert isinstance(first["tuning"], dict)
    plans = [read_execution_plan("plan", json.dumps(plan)) for plan in first["tuning"]["plans"]]
    own = read_execution_plan("plan", json.dumps(first["plan"]))
    assert plans[-1] != own
    until(lambda: plan_of(lab, "tunes") == plans[-1], "the server knows the plan")
    lab.hold("tunes")
    lab.release("tunes")
    second = until(lambda: starts(lab, "tunes")[1:], "the program has started again")[0]
    assert second["tuning"] is None
    assert read_execution_plan("plan", json.dumps(second["plan"])) == plans[-1]
    assert lab.broken_rules() == []
