"""Programs of every runtime get the execution plan that the round decided, on the cluster of `up`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.formulation.execution_plan import Precision, read_execution_plan
from tessera.formulation.runtimes import (
    ALPA,
    COMMAND,
    DEEPSPEED,
    JAX,
    MEGATRON,
    RUNTIMES,
    TORCHRUN,
)
from tests.support.framework_python import make_framework_python
from tests.support.up_process import make_home, read_json, run_client, run_up
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
"""The beginning of a user's program: it notes what it was given, in the folder that its command names."""

REPORT: Final = """
from tessera import progress
if rank == "0":
    progress.report(progress.iterations_total(0))
"""
RUN_JAX: Final = """
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
REST: Final = {JAX: RUN_JAX, ALPA: BUILD_ALPA}
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
    more = f"--min-gpus 2 --max-gpus 2 --runtime {runtime} --env JAX_PLATFORMS=cpu"
    run_client_words(
        address, "submit", name, *work.split(), *more.split(), "--command", command, *options
    )


def run_client_words(address: str, *words: str) -> str:
    return run_client(address, list(words))


def decided_cell(address: str, name: str) -> tuple[dict[str, Any], str]:
    """Return the Cell that a round gives a job, and the execution plan that the server lists for it."""

    def allocation() -> Any:
        run_client(address, "round")
        return read_json(address, f"job {name}").get("allocation")

    cell: dict[str, Any] = until(allocation, f"a round starts {name}")["cell"]
    listed = read_json(address, f"cells --model {MODEL}/{PARAMS} --batch {BATCH}")["cells"]
    plans = {c["execution_plan"] for c in listed if c["cell"] == cell}
    assert len(plans) == 1, (cell, listed)
    return cell, plans.pop()


def end_of(address: str, name: str) -> dict[str, Any]:
    """Return a job when it has ended, which must be a success."""
    ended = ("SUCCEEDED", "FAILED", "CANCELLED")

    def job() -> Any:
        shown = read_json(address, f"job {name}")
        return shown if shown["state"] in ended or shown.get("retries") else None

    shown: dict[str, Any] = until(
        job, lambda: f"{name} ends: {read_json(address, f'job {name}')}", within_s=100
    )
    assert shown["state"] == "SUCCEEDED", json.dumps(shown)
    return shown


@pytest.mark.parametrize("runtime", [COMMAND, TORCHRUN, DEEPSPEED, MEGATRON, JAX, ALPA])
def test_a_program_gets_the_plan_of_the_cell_that_the_round_decided(
    address: str, home: Path, runtime: str
) -> None:
    notes, script = home / f"notes-{runtime}", home / f"train-{runtime}.py"
    notes.mkdir()
    script.write_text(NOTE + REST.get(runtime, REPORT))
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

    noted = {path.name: json.loads(path.read_text()) for path in notes.iterdir()}
    assert {facts["plan"] for facts in noted.values()} == {listed_text}
    plan = read_execution_plan("plan", listed_text)
    assert (plan.digest, plan.pipeline_degree, plan.gpus) == (
        cell["plan"],
        cell["pipeline_degree"],
        cell["gpus"],
    )
    assert (plan.gpus, plan.pipeline_degree) == (2, 2 if is_pipeline else 1)
    assert plan.precision is (Precision.BF16 if runtime == JAX else Precision.F16)
    if RUNTIMES[runtime].ranks_are_gpus:
        assert set(noted) == {"0", "1"}
        assert {facts["ranks"] for facts in noted.values()} == {"2"}
    given = noted["0"]["words"]
    if runtime == COMMAND:
        assert given == ["--degree", "2"]
    if runtime == MEGATRON:
        assert given[given.index("--pipeline-model-parallel-size") + 1] == "2"
    if runtime == DEEPSPEED:
        assert given[-2:-1] == ["--deepspeed_config"]
