"""The client of training programs: harmless outside of Tessera, exact within."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tessera.progress
from tests.support.waiting import until

SOURCE = Path(tessera.progress.__file__)


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module as a program loads it first, outside of Tessera."""
    for name in list(os.environ):
        if name.startswith("TESSERA_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("fresh_progress", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: ModuleType) -> Path:
    """Return the progress file of a program under a keeper."""
    monkeypatch.setenv("TESSERA_PROGRESS_FILE", str(tmp_path / "progress.json"))
    monkeypatch.setenv("TESSERA_CONTROL_FILE", str(tmp_path / "control.json"))
    monkeypatch.setenv("TESSERA_CHECKPOINT_DIR", str(tmp_path / "generation-1"))
    return tmp_path / "progress.json"


def written(file: Path) -> dict[str, Any]:
    stored = json.loads(file.read_text())
    assert isinstance(stored, dict)
    return stored


def test_it_is_one_module_for_python_3_8_on_the_standard_library_alone() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {str(name).partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)
    assert not any(isinstance(node, ast.Match | ast.TryStar) for node in ast.walk(tree))
    first = next(node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert first.module == "__future__"  # dict[str, Any] would be an error in Python 3.8


def test_outside_of_tessera_nothing_happens(
    progress: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    progress.report(3, loss=0.5, memory_bytes=7)
    progress.report_checkpoint(3, tmp_path / "x")
    assert (progress.resume_iterations(), progress.resume_path(), progress.plan()) == (
        0,
        None,
        None,
    )
    assert (progress.iterations_total(default=9), progress.global_batch(default=4)) == (9, 4)
    assert not progress.stop_requested()
    assert not progress.checkpoint_requested()
    assert progress.job_dir() == Path()
    assert list(tmp_path.iterdir()) == []
    assert progress.checkpoint_path(5) == Path("checkpoints/iteration-5")
    assert (tmp_path / "checkpoints").is_dir()


def test_the_contract_of_the_environment_is_read(
    progress: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.tuning() is None
    (tmp_path / "plan.json").write_text('{"micro_batches": 2}')
    (tmp_path / "tuning.json").write_text('{"budget_s": 60.0, "plans": [{"micro_batch": 8}]}')
    for name, value in {
        "ITERATIONS": "200",
        "GLOBAL_BATCH": "32",
        "RESUME_FROM": "/c/iteration-40",
        "RESUME_ITERATIONS": "40",
        "PLAN_FILE": str(tmp_path / "plan.json"),
        "JOB_DIR": "/c/files",
        "TUNING_FILE": str(tmp_path / "tuning.json"),
    }.items():
        monkeypatch.setenv(f"TESSERA_{name}", value)
    assert (progress.iterations_total(default=1), progress.global_batch(default=1)) == (200, 32)
    assert (progress.resume_path(), progress.resume_iterations()) == (Path("/c/iteration-40"), 40)
    assert (progress.plan(), progress.job_dir()) == ({"micro_batches": 2}, Path("/c/files"))
    assert progress.tuning() == {"budget_s": 60.0, "plans": [{"micro_batch": 8}]}


def test_the_plan_by_which_a_program_runs_is_reported_at_once_with_the_time_of_its_search(
    progress: ModuleType, file: Path
) -> None:
    progress.begin_tuning()
    began = written(file)["tuning"]
    assert set(began) == {"began_s"}
    progress.report_plan({"micro_batch": 8}, 0.5, math.inf)
    progress.end_tuning()
    tuning = written(file)["tuning"]
    assert tuning["began_s"] == began["began_s"] <= tuning.pop("ended_s")
    assert tuning == began | {"plan": {"micro_batch": 8}, "iteration_s": 0.5, "planned_s": None}
    assert "iterations" not in written(file)


def test_a_report_is_written_with_its_time_and_checkpoint(progress: ModuleType, file: Path) -> None:
    progress.report(3, loss=0.5, memory_bytes=7)
    stored = written(file)
    assert isinstance(stored.pop("time_s"), float)
    assert stored == {"iterations": 3, "loss": 0.5, "memory_bytes": 7}
    path = progress.checkpoint_path(3)
    progress.report_checkpoint(3, path)  # at once, although a report was just written
    assert written(file)["checkpoint"] == {"iterations": 3, "path": str(path)}
    assert not list(file.parent.glob("*.tmp"))


def test_the_last_of_many_quick_reports_is_written_by_the_timer(
    progress: ModuleType, file: Path
) -> None:
    for iteration in range(1, 501):
        progress.report(iteration)
    until(lambda: written(file)["iterations"] == 500, "the last report")


def test_what_was_reported_last_is_written_when_the_program_ends(file: Path) -> None:
    program = "from tessera import progress\nfor k in range(1, 301): progress.report(k)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert written(file)["iterations"] == 300


def test_reports_of_several_threads_never_leave_half_a_file(
    progress: ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPORT_S", 0.0)
    progress.report(0)
    go, seen = threading.Barrier(5), []

    def report_many(offset: int) -> None:
        go.wait()
        for k in range(100):
            progress.report(offset + k, loss=float(k))

    threads = [threading.Thread(target=report_many, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    go.wait()
    while any(thread.is_alive() for thread in threads):
        seen.append(written(file)["iterations"])
    for thread in threads:
        thread.join()
    assert written(file)["iterations"] in {1000 * n + 99 for n in range(4)}
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("ranks", "writes"),
    [
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"TESSERA_NODE_RANK": "1"}, False),
        ({"TESSERA_NODE_RANK": "0", "RANK": "3"}, False),  # the launcher's comes first
    ],
)
def test_only_the_first_rank_reports(
    progress: ModuleType,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: dict[str, str],
    writes: bool,
) -> None:
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert progress.is_first_rank() == writes
    progress.report(3)
    assert file.exists() == writes


def test_a_request_for_a_checkpoint_lasts_until_one_is_reported(
    progress: ModuleType, file: Path
) -> None:
    control = file.parent / "control.json"
    assert not progress.checkpoint_requested()
    for count in (1, 3):
        control.write_text(json.dumps({"checkpoint": count}))
        assert progress.checkpoint_requested()
        assert progress.checkpoint_requested()
        progress.report_checkpoint(count, progress.checkpoint_path(count))
        assert not progress.checkpoint_requested()
    for damaged in ("{", "{}", "[]", '{"checkpoint": null}'):
        control.write_text(damaged)
        assert not progress.checkpoint_requested()


def test_a_caught_stop_is_a_request_and_no_end(progress: ModuleType) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        progress.catch_stop()
        signal.raise_signal(signal.SIGTERM)
        assert progress.stop_requested()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("loss", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0.5, 0.5)]
)
def test_a_loss_that_is_no_number_is_written_as_a_word(
    loss: float, shown: object, progress: ModuleType, file: Path
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not in JSON's grammar")

    progress.report(3, loss=loss)
    assert json.loads(file.read_text(), parse_constant=refuse)["loss"] == shown


def test_a_program_that_states_why_it_ends_reports_its_last_iteration_first(
    progress: ModuleType, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.report(1, loss=2.0)
    progress.report(2, loss=math.nan)
    with pytest.raises(SystemExit) as ended:
        progress.fail("loss_not_finite", "the loss of iteration 2 is nan; lower the learning rate")
    assert ended.value.code == 1
    assert written(file)["iterations"] == 2
    assert written(file.parent / "failure.json") == {
        "reason": "loss_not_finite",
        "message": "the loss of iteration 2 is nan; lower the learning rate",
    }
    assert capsys.readouterr().err.startswith("error: the loss of iteration 2 is nan")


def test_the_first_rank_that_states_an_end_counts_and_any_rank_may(
    progress: ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    for reason in ("refused", "error"):
        with pytest.raises(SystemExit):
            progress.fail(reason, f"says {reason}")
    assert written(file.parent / "failure.json")["reason"] == "refused"
    assert not file.exists(), "only the first rank reports progress"


def test_a_statement_that_cannot_be_written_ends_the_program_all_the_same(
    progress: ModuleType,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TESSERA_PROGRESS_FILE", str(file.parent / "gone" / "progress.json"))
    with pytest.raises(SystemExit):
        progress.fail("error", "no disk")
    assert "the failure cannot be reported" in capsys.readouterr().err
    monkeypatch.delenv("TESSERA_PROGRESS_FILE")
    with pytest.raises(SystemExit):
        progress.fail("error", "outside of Tessera")
    assert capsys.readouterr().err == "error: outside of Tessera\n"
