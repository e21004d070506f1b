"""Programs of every runtime get the execution plan that the round decided, on the cluster of `up`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.job.execution_plan import Precision, read_execution_plan
from tessera.formulation.job.runtimes import (
    ALPA,
    COMMAND,
    DEEPSPEED,
    JAX,
    MEGATRON,
    RUNTIMES,
    TORCHRUN,
)
from tessera.service.cli.main import app
from tests.support.framework_python import make_framework_python
from tests.support.torch_python import find_torch_python
from tests.support.up_process import make_home, read_json, run_client, run_up, wait_for_cells
from tests.support.waiting import until

EXAMPLES: Final = Path(__file__).parents[2] / "docs" / "examples"
MODEL, PARAMS, BATCH, ITERATIONS = "vit", "86M", 32, 3

NOTE: Final = """
import json, os, sys
from pathlib import Path
rank = os.environ.get("RANK") or os.environ["TESSERA_NODE_RANK"]
text = Path(os.environ["TESSERA_PLAN_FILE"]).read_text()
facts = {"words": sys.argv[2:], "plan": text, "ranks": os.environ.get("WORLD_SIZE", "")}
Path(sys.argv[1], rank).write_text(json.dumps(facts))
"""
"""The beginning of a user's program: it notes its plan and its words, in the folder of its command."""

REPORT: Final = """
from tessera import progress
if rank == "0":
    progress.report(progress.iterations_total(0))
"""
RUN_SCRIPT: Final = """
import runpy
script = sys.argv[2]
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""
BUILD_ALPA: Final = """
def build(plan):
    given = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    assert given == text, (given, text)
    return (lambda state, batch: ({"w": 0.5 * state["w"]}, state["w"])), {"w": 1.0}, float
"""
PROGRAM_ENDS: Final = {JAX: RUN_SCRIPT, ALPA: BUILD_ALPA}
"""What follows in the program of a runtime. Others only report that they are done."""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with make_home() as folder:
        yield folder


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    """Yield the server of an `up` whose agents find every framework, or a stand-in."""
    programs = make_framework_python(home / "frameworks")
    with run_up(home, PATH=f"{programs}:{os.environ['PATH']}") as (address, _):
        yield address


def submit(address: str, name: str, runtime: str, command: str, *options: str) -> None:
    """Submit a job of a published model on two GPUs. Options in ``options`` have precedence."""
    work = f"--model {MODEL} --params {PARAMS} --batch {BATCH} --iterations {ITERATIONS} --gpus 2"
    resources = f"--min-gpus 2 --max-gpus 2 --runtime {runtime} --env JAX_PLATFORMS=cpu"
    words = ["submit", name, *work.split(), *resources.split(), "--command", command, *options]
    run_client(address, words)


def decided_cell(address: str, name: str) -> tuple[dict[str, Any], str]:
    """Return the Cell that a round gives a job, and the execution plan that the server lists for it."""

    def allocation() -> Any:
        run_client(address, "round")
        return read_json(address, f"job {name}").get("allocation")

    cell: dict[str, Any] = until(allocation, f"a round starts {name}")["cell"]
    cells = read_json(address, f"cells --model {MODEL}/{PARAMS} --batch {BATCH}")["cells"]
    plans = {c["execution_plan"] for c in cells if c["cell"] == cell}
    assert len(plans) == 1, (cell, cells)
    return cell, plans.pop()


def end_of(address: str, name: str) -> dict[str, Any]:
    """Return a job when it has ended, which must be a success."""
    last_states = ("SUCCEEDED", "FAILED", "CANCELLED")

    def job() -> Any:
        job_facts = read_json(address, f"job {name}")
        return job_facts if job_facts["state"] in last_states or job_facts.get("retries") else None

    job_facts: dict[str, Any] = until(
        job, lambda: f"{name} ends: {read_json(address, f'job {name}')}"
    )
    assert job_facts["state"] == "SUCCEEDED", json.dumps(job_facts)
    return job_facts


def validate_bert(address: str, options: str) -> Result:
    """Return the result of a submission of a BERT that is only checked."""
    job = "--model bert --params 1.3B --iterations 10 --runtime torchrun --command train.py"
    words = ["submit", "w", *job.split(), *options.split(), "--validate-only"]
    return CliRunner().invoke(app, words, env={"TESSERA_SERVER": address})


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (
            "--batch 251 --gpus 8",
            "torchrun can run no plan of bert/1.3B/251 on 4, 8 or 16 GPUs, so the job will wait; submit"
            " it with a batch that the GPUs divide evenly, e.g. 248, or the runtime command, megatron,"
            " jax or alpa",
        ),
        (
            "--batch 4 --gpus 16 --min-gpus 8",
            "torchrun can run no plan of bert/1.3B/4 on 8, 16 or 32 GPUs, so the job will wait; submit"
            " it with a batch that the GPUs divide evenly, e.g. 16, or the runtime command, megatron,"
            " jax or alpa",
        ),
        ("--batch 251 --gpus 8 --min-gpus 1", ""),
        ("--batch 256 --gpus 12 --max-gpus 16", ""),
    ],
)
def test_a_submission_warns_if_the_runtime_can_run_no_plan(
    address: str, options: str, warning: str
) -> None:
    result = validate_bert(address, options)
    assert result.exit_code == 0, result.stderr
    lines = [text for text in result.stderr.splitlines() if "can run no plan" in text]
    assert lines == ([f"warning: {warning}"] if warning else [])


def test_more_gpus_than_the_cluster_or_any_has_are_refused(address: str) -> None:
    result = validate_bert(address, "--batch 256 --gpus 65536")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: jobs/w.requested_gpus: asks for 65536 GPUs, but the whole cluster has 32; request fewer"
        " [INVALID_INPUT]\n",
    )
    result = validate_bert(address, "--batch 256 --gpus 100000")
    assert result.exit_code == 2
    assert "Input should be less than or equal to 65536" in result.stderr


def test_a_gpt_of_a_batch_of_64_starts_on_eight_gpus_of_the_sample_cluster(address: str) -> None:
    run_client(
        address, "submit gpt-a --model gpt2 --params 1.5B --batch 64 --iterations 9 --gpus 8"
    )
    cells = wait_for_cells(address, "gpt2/1.5B", 64)
    feasible = [cell for cell in cells if not cell.get("infeasible")]
    assert {cell["cell"]["gpu_type"] for cell in feasible} == {"a100", "v100"}
    assert all(cell["execution_plan"] for cell in feasible)
    run_client(address, "round")
    assert read_json(address, "job gpt-a")["allocation"]["cell"]["gpus"] >= 8
    run_client(address, "cancel gpt-a")


@pytest.mark.parametrize("runtime", [COMMAND, TORCHRUN, DEEPSPEED, MEGATRON, JAX, ALPA])
def test_a_program_gets_the_plan_of_the_cell_that_the_round_decided(
    address: str, home: Path, runtime: str
) -> None:
    notes, script = home / f"notes-{runtime}", home / f"train-{runtime}.py"
    notes.mkdir()
    script.write_text(NOTE + PROGRAM_ENDS.get(runtime, REPORT))
    words = [str(script), str(notes)]
    if runtime == COMMAND:
        words = ["python3", *words, "--degree", "{plan.pp}"]
    if runtime == JAX:
        gpt = str(EXAMPLES / "train_jax_gpt.py")
        words += [gpt, "--precision", "plan", "--layers", "{plan.layers}", "--width", "8"]
    is_pipeline = RUNTIMES[runtime].pipelines
    options = ("--techniques", "pp") if is_pipeline else ()
    submit(address, runtime, runtime, " ".join(words), *options)
    cell, listed_text = decided_cell(address, runtime)
    end_of(address, runtime)

    notes_by_rank = {path.name: json.loads(path.read_text()) for path in notes.iterdir()}
    assert {facts["plan"] for facts in notes_by_rank.values()} == {listed_text}
    plan = read_execution_plan("plan", listed_text)
    assert (plan.digest, plan.pipeline_degree, plan.gpus) == (
        cell["plan"],
        cell["pipeline_degree"],
        cell["gpus"],
    )
    assert (plan.gpus, plan.pipeline_degree) == (2, 2 if is_pipeline else 1)
    assert plan.precision is (Precision.BF16 if runtime == JAX else Precision.F16)
    if RUNTIMES[runtime].ranks_are_gpus:
        assert set(notes_by_rank) == {"0", "1"}
        assert {facts["ranks"] for facts in notes_by_rank.values()} == {"2"}
    rank_words = notes_by_rank["0"]["words"]
    if runtime == COMMAND:
        assert rank_words == ["--degree", "2"]
    if runtime == MEGATRON:
        assert rank_words[rank_words.index("--pipeline-model-parallel-size") + 1] == "2"
    if runtime == DEEPSPEED:
        assert rank_words[-2:-1] == ["--deepspeed_config"]


def test_pytorch_trains_by_the_plan_of_the_cell_that_the_round_decided() -> None:
    programs = Path(find_torch_python("numpy")).parent  # skips the test without PyTorch
    with make_home() as home, run_up(home, PATH=f"{programs}:{os.environ['PATH']}") as (address, _):
        notes, script = home / "notes", home / "train.py"
        notes.mkdir()
        script.write_text(NOTE + RUN_SCRIPT)
        submit(address, "gpt", TORCHRUN, f"{script} {notes} {EXAMPLES / 'train_gpt.py'}")
        cell, listed_text = decided_cell(address, "gpt")
        end_of(address, "gpt")
        notes_by_rank = {path.name: json.loads(path.read_text()) for path in notes.iterdir()}
    assert {name: facts["plan"] for name, facts in notes_by_rank.items()} == {
        "0": listed_text,
        "1": listed_text,
    }
    assert read_execution_plan("plan", listed_text).digest == cell["plan"]
