"""The notebooks and the Python client of the documents, run in order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tessera.benchmarks.service.fleet import Fleet
from tessera.client import PLAIN_TEXT, Client
from tests.support.command_line import Tessera, address, fleet, tessera
from tests.support.documents import Block, blocks
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


NOTEBOOKS = ROOT / "docs" / "notebooks"


JOBS = re.compile(r"(?<=^JOBS, LOAD, SEED = )\d+|(?<=^JOBS, LOAD, SEEDS = )\d+", re.MULTILINE)


@pytest.fixture(autouse=True)
def _figures_in_memory() -> Iterator[None]:
    mpl.use("agg")
    yield
    plt.close("all")


def run_cells(name: str, jobs: int) -> dict[str, Any]:
    """Run a notebook's code with ``jobs`` jobs, and return its variables."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sized = 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            code, found = JOBS.subn(str(jobs), "".join(cell["source"]))
            sized += found
            exec(compile(code, f"{name}, cell {number}", "exec"), namespace)  # as Jupyter does
    assert sized == 1
    assert namespace["JOBS"] == jobs
    return namespace


def test_the_comparison_of_policies_runs_and_draws_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_cells("compare-policies", jobs=5)
    figures = names["figures"]
    assert list(figures) == names["POLICIES"]
    assert all(row["completed"] == 5 for row in figures.values())
    bound_s = names["bound_s"]
    assert all(row["jct_mean_s"] >= bound_s * (1 - 1e-9) for row in figures.values())
    table = capsys.readouterr().out
    assert all(f"\n{policy} " in table for policy in figures)
    labels = [plt.figure(k).axes[0].get_legend_handles_labels()[1] for k in plt.get_fignums()]
    assert len(labels) == 3
    assert all(set(names["POLICIES"]) <= set(of_figure) for of_figure in labels)


def test_the_experiment_on_deadlines_runs_and_breaks_no_promise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_cells("deadlines", jobs=5)
    figures = names["figures"]
    assert len(figures) == len(names["POLICIES"]) * len(names["TIGHTNESS"])
    assert all(row["deadlines"] == 5 for runs in figures.values() for row in runs)
    for tightness in names["TIGHTNESS"]:
        (row,) = figures["look-ahead", tightness]
        assert row["deadlines_missed_admitted"] == 0
        assert row["deadlines_met"] == row["deadlines_admitted"]
    met = {key: runs[0]["deadlines_met"] for key, runs in figures.items()}
    tightest, loosest = names["TIGHTNESS"][0], names["TIGHTNESS"][-1]
    assert all(met[name, loosest] >= met[name, tightest] for name in names["POLICIES"])
    assert met["fcfs", tightest] == 0  # a job that starts pays for its start
    assert "0.0 broken" in capsys.readouterr().out


def test_notebooks_are_kept_without_outputs() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "notebooks.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


__all__ = ["address", "fleet", "tessera"]  # fixtures


PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"


@pytest.fixture
def trained(fleet: Fleet) -> Iterator[None]:
    """Let jobs train in the background, a minute at a time."""
    ended = threading.Event()

    def train() -> None:
        while not ended.wait(0.1):
            fleet.advance(60.0)

    thread = threading.Thread(target=train)
    thread.start()
    yield
    ended.set()
    thread.join(PATIENCE_S)


def examples() -> list[Block]:
    return list(blocks(PAGE.read_text(encoding="utf-8")))


def test_the_examples_of_the_page_run_in_order(
    address: str, trained: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TESSERA_CLUSTER", "c")
    names: dict[str, Any] = {}
    outputs = []
    for block in examples():
        code = "\n".join(["\n" * (block.line - 1), *block.lines])
        exec(compile(code.replace("127.0.0.1:7070", address), str(PAGE), "exec"), names)
        outputs.append(capsys.readouterr().out)
    shown = "".join(outputs)
    assert "1 jobs run, 0 wait" in shown
    assert "RUNNING" in shown
    assert "CANCELLED" in shown
    assert "NO_ESTIMATE" in shown
    assert names["answer"].now.unchanged_jobs + len(names["answer"].now.jobs) > 0
    assert "INVALID_INPUT job.iterations" in shown
    assert "clusters/c/jobs/absent" in shown
    assert "sweep-100" in shown
    assert names["job"].weight == 2.0
    assert "Cells are estimated" in shown


def test_a_job_of_many_is_found_in_pages_and_changed_once(address: str, tessera: Tessera) -> None:
    with Client(address, "c", settings=PLAIN_TEXT) as client:
        stored = client.submit(
            name="j", model="bert", params="1.3B", batch=256, iterations=9, gpus=4
        )
        assert [job.name for job in client.list_jobs()] == [stored.name]
        assert client.get_server().schema
        assert client.get_caller().subject == "local"
        (event,) = {event.event for event in client.list_events(client.hold(stored))} & {"hold"}
        assert event == "hold"
        assert client.drain(["n0"], "new fans")[0].drain_reason == "new fans"
        assert not client.undrain(["n0"])[0].drain_reason
