"""Sweeps in real processes: equal results, resumption, interrupts and failures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.provenance import ROOT
from tessera.simulator.sweeps import runner
from tessera.simulator.sweeps import tasks as module
from tessera.simulator.sweeps.runner import run_tasks
from tessera.simulator.sweeps.tasks import Task, TasksFailed, answer_call
from tests.support.patience import PATIENCE_S
from tests.support.sweeps import a_task
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep edits of the checkout during the tests from causing runs again."""
    monkeypatch.setattr(runner, "code_digest", lambda: "this code")


def run_here(tasks: list[Task]) -> dict[str, Any]:
    """Return the results of the tasks, computed in this process."""
    return {task.name: json.loads(answer_call(task.call)) for task in tasks}


def test_worker_processes_return_the_same_results_in_the_order_of_the_tasks() -> None:
    tasks = [a_task(f"seed {n}", seed=n) for n in (5, 1, 4, 2)]
    expected = run_here(tasks)
    for workers in (1, 2):
        results = run_tasks(tasks, workers=workers)
        assert results == expected
        assert list(results) == [task.name for task in tasks]
    assert expected["seed 5"]["no bound"] == math.inf


def test_zero_workers_start_no_process_and_refuse_to_store_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(runner, "measured_commit", lambda: "a commit")
    tasks = [a_task(f"seed {n}", seed=n) for n in (5, 1)]
    assert run_tasks(tasks, workers=0) == run_here(tasks)
    with pytest.raises(FileNotFoundError):
        run_tasks([a_task("lacks", "needs", file=str(tmp_path / "missing"), seed=2)], workers=0)
    with pytest.raises(InvalidInput, match="--workers"):
        run_tasks(tasks, folder=tmp_path, workers=0)


def test_a_sweep_that_failed_halfway_continues_where_it_was(tmp_path: Path) -> None:
    log, missing, folder = tmp_path / "log", tmp_path / "missing", tmp_path / "kept"
    tasks = [
        a_task("first", "counted", file=str(log), seed=1),
        a_task("lacks", "needs", file=str(missing), seed=2),
        a_task("last", "counted", file=str(log), seed=3),
    ]
    with pytest.raises(TasksFailed) as failed:
        run_tasks(tasks, folder=folder, workers=1)
    assert list(failed.value.failures) == ["lacks"]
    for text in ("1 of 3", "lacks", "looking for missing", "Traceback", "FileNotFoundError"):
        assert text in str(failed.value)
    assert log.read_text() == "1\n3\n"
    assert len(list(folder.iterdir())) == 2

    missing.write_text("here")
    results = run_tasks(tasks, folder=folder, workers=2)
    assert results == run_here(tasks[1:2]) | {"first": {"seed": 1}, "last": {"seed": 3}}
    assert list(results) == ["first", "lacks", "last"]
    assert log.read_text() == "1\n3\n"


def test_every_failure_is_reported_and_a_dying_process_affects_no_other_task() -> None:
    tasks = [
        a_task("leaves", "leaves", status=7),
        a_task("killed", "killed"),
        a_task("fine", seed=1),
        a_task("list", "a_list"),
        a_task("nowhere", "no_such_function"),
    ]
    with pytest.raises(TasksFailed) as failed:
        run_tasks(tasks, workers=2)
    failures = failed.value.failures
    assert set(failures) == {"leaves", "killed", "list", "nowhere"}
    assert "exit status 7" in failures["leaves"]
    assert "SIGKILL (possibly out of memory)" in failures["killed"]
    assert "must return a dictionary, not list" in failures["list"]
    assert "no_such_function" in failures["nowhere"]


def test_an_interrupt_keeps_finished_results_and_kills_running_tasks(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "kept"
    tasks = [
        a_task("before", "counted", file=str(log), seed=1),
        a_task("at", "interrupts", pid=os.getpid(), kept=str(folder)),
        a_task("after", "counted", file=str(log), seed=2),
    ]
    with pytest.raises(KeyboardInterrupt):
        run_tasks(tasks, folder=folder, workers=1)
    assert log.read_text() == "1\n"
    assert [json.loads(file.read_text())["name"] for file in folder.iterdir()] == ["before"]
    run_tasks(tasks[::2], folder=folder, workers=1)
    assert log.read_text() == "1\n2\n"


def test_no_process_outlives_a_killed_sweep(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "from tessera.simulator.sweeps.runner import run_tasks\n"
        "from tests.support.sweeps import a_task\n"
        f"run_tasks([a_task('a', 'hangs', file={str(file)!r})])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as sweep:

        def begun() -> bool:
            assert sweep.poll() is None
            return file.exists()

        until(begun, "the task has begun")
        worker = psutil.Process(int(file.read_text()))
        sweep.kill()
    ended, _ = psutil.wait_procs([worker], timeout=PATIENCE_S)
    assert ended == [worker]


def test_tasks_that_differ_in_name_alone_run_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = [a_task(name, "counted", file=str(log), seed=9) for name in ("one", "other")]
    tasks.append(a_task("a", "noisy", seed=4))  # its output is not its result
    expected = {"one": {"seed": 9}, "other": {"seed": 9}, "a": {"seed": 4}}
    assert run_tasks(tasks, workers=2) == expected
    assert log.read_text() == "9\n"


def test_a_result_is_used_again_only_for_the_same_options_files_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, data, folder = tmp_path / "log", tmp_path / "data", tmp_path / "kept"
    data.write_text("some")
    task = replace(a_task("a", "counted", file=str(log), seed=1), files=(data,))

    def runs(variant: Task) -> int:
        """Run a task, and return the number of runs so far."""
        run_tasks([variant], folder=folder, workers=1)
        return len(log.read_text().splitlines())

    assert runs(task) == 1
    assert runs(replace(task, name="renamed")) == 1
    assert runs(replace(task, options={**task.options, "seed": 2})) == 2
    data.write_text("other")
    assert runs(task) == 3
    monkeypatch.setattr(runner, "code_digest", lambda: "other code")
    assert runs(task) == 4


def test_the_code_digest_changes_with_the_code_but_not_with_code_that_only_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in (*module.PACKAGES, "v1", "simulator/report"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("1")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "_DRAWING", tmp_path / "simulator" / "report")
    before = module.code_digest()
    (tmp_path / "simulator" / "report" / "a.py").write_text("2")
    (tmp_path / "solvers" / "notes.md").write_text("2")
    assert module.code_digest() == before
    (tmp_path / "solvers" / "a.py").rename(tmp_path / "solvers" / "b.py")
    renamed = module.code_digest()
    (tmp_path / "solvers" / "b.py").write_text("2")
    assert len({before, renamed, module.code_digest()}) == 3


def test_progress_is_one_line_per_run_without_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = [a_task(f"[bold] {n}", seed=n) for n in (1, 2)]
    run_tasks(tasks[:1], folder=tmp_path, workers=1)
    run_tasks(tasks, folder=tmp_path, workers=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "1/1 [bold] 1",
        "1 of 2 runs had been done before",
        "2/2 [bold] 2",
    ]


def test_a_file_that_no_sweep_wrote_duplicate_names_and_options_that_json_lacks_are_refused(
    tmp_path: Path,
) -> None:
    task = a_task("a", seed=1)
    run_tasks([task], folder=tmp_path, workers=1)
    [file] = tmp_path.iterdir()
    file.write_text("{")
    with pytest.raises(InvalidInput, match="delete it") as refused:
        run_tasks([task], folder=tmp_path, workers=1)
    assert str(file) in str(refused.value)
    with pytest.raises(InvalidInput, match="unique"):
        run_tasks([a_task("a", seed=1), a_task("a", seed=2)])
    with pytest.raises(InvalidInput, match="options of a: must be JSON"):
        run_tasks([a_task("a", seed={1, 2})])
    assert run_tasks([]) == {}
