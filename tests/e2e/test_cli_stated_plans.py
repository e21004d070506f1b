"""Jobs that are submitted with a file of their execution plan, through the real CLI and server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.benchmarks.service.fleet import Fleet
from tests.support.command_line import Tessera, read, submit
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SCRIPT = """
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 4 --use-distributed-optimizer)
torchrun --nproc_per_node 4 pretrain_gpt.py ${MODEL_PARALLEL_ARGS[@]} \\
    --micro-batch-size 8 --global-batch-size 256 --fp16
"""
SHORT = "tp4, ZeRO-1, f16, micro-batch 8 x 32"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return str(path)


def test_a_job_runs_by_the_plan_of_a_script_and_everyone_can_read_it(
    tessera: Tessera, fleet: Fleet, script: str
) -> None:
    submit(tessera, "own", "--plan", script)
    assert SHORT in tessera("job", "own").stdout

    def round_that_starts_it() -> str:
        decided = read(tessera, "round")
        return str(decided["name"]) if decided.get("started") else ""

    started = until(round_that_starts_it, "the plan is priced and the job runs")
    shown = tessera("job", "own").stdout
    assert shown.count(SHORT) == 2  # as stated, and as it runs
    assert SHORT in tessera("round", "show", started, "-o", "wide").stdout
    assert SHORT not in tessera("round", "show", started).stdout


def test_a_job_file_may_name_a_plan_next_to_it(
    tessera: Tessera, script: str, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(
        "name: own\nmodel: bert\nparams: 1.3B\nglobal_batch: 256\niterations: 1000\ngpus: 4\n"
        "plan: run.sh\nplan_first: true\n"
    )
    tessera("submit", "-f", str(jobs))
    job = read(tessera, "job", "own")
    assert job["stated_plan_first"]
    assert '"tp":4' in job["stated_plan"]


def test_wrong_plans_are_refused_with_the_field_of_the_file(
    tessera: Tessera, script: str, tmp_path: Path
) -> None:
    text = Path(script).read_text()
    options = ("submit", "j", "--model", "bert", "--params", "1.3B", "--iterations", "9")
    for wrong, more, said in (
        (text.replace("tensor-model", "tensor-modle"), ("--gpus", "4"), "--tensor-modle-parallel"),
        (text, ("--gpus", "6"), "GPUs"),
        (text.replace("size 256", "size 128"), ("--gpus", "4"), "--global-batch-size"),
    ):
        file = tmp_path / "wrong.sh"
        file.write_text(wrong)
        refused = tessera(*options, "--batch", "256", *more, "--plan", str(file), code=1).stderr
        assert refused.startswith("error: job.stated_plan: ")
        assert said in refused
    missing = tessera(*options, "--batch", "256", "--gpus", "4", "--plan", "nowhere", code=2)
    assert missing.stderr.startswith("error: --plan: nowhere cannot be read")
    assert read(tessera, "jobs")["jobs"] == []


def test_a_submitted_plan_techniques_and_cores_are_kept_and_shown(
    tessera: Tessera, fleet: Fleet, script: str
) -> None:
    assert fleet
    submit(
        tessera,
        "first",
        "--submitted-plan",
        script,
        "--techniques",
        "tp, zero1,accumulation",
        "--cpus",
        "96",
    )
    job = read(tessera, "job", "first")
    assert (job["techniques"], job["requested_cpus"]) == (["tp", "zero1", "accumulation"], 96)
    assert job["stated_plan"] == ""
    shown = tessera("job", "first").stdout
    assert SHORT in shown
    assert "tp, zero1, accumulation" in shown
    submit(tessera, "again", "--submitted-plan", job["submitted_plan"])  # as JSON
    assert read(tessera, "job", "again")["submitted_plan"] == job["submitted_plan"]


def test_cores_and_memory_of_a_cluster_file_are_shown_next_to_nodes_that_state_none(
    tessera: Tessera, tmp_path: Path
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(
        "gpu_types: {a100: 40GiB}\nnodes:\n"
        "  - {name: big, gpu_type: a100, gpus: 8, cpus: 96, host_memory: 1TiB}\n"
        "  - {name: plain, gpu_type: a100, gpus: 8}\n"
    )
    tessera("cluster", "apply", "-f", str(file))
    rows = tessera("nodes").stdout.splitlines()
    (big,) = (row for row in rows if row.startswith("big"))
    (plain,) = (row for row in rows if row.startswith("plain"))
    assert "96" in big
    assert "1,024 GiB" in big
    assert plain.count("not stated") == 2
