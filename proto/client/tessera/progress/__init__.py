"""What a training program reports to Tessera, and what Tessera asks of it.

The agent puts this module on the PYTHONPATH of each program that it starts, so nothing has to be
installed. It needs only the standard library, of Python 3.8 or later. Outside of Tessera all
functions are harmless: reports go nowhere, and nobody asks for anything.

    from tessera import progress

    progress.catch_stop()
    start = progress.resume_iterations()
    if start:
        load(progress.resume_path())
    for iteration in range(start, progress.iterations_total(default=1000)):
        loss = train(iteration)
        progress.report(iteration + 1, loss=loss)
        stops = progress.stop_requested()  # once, so that every stop has its checkpoint
        if stops or progress.checkpoint_requested():
            path = progress.checkpoint_path(iteration + 1)
            save(path)
            progress.report_checkpoint(iteration + 1, path)
        if stops:
            break

A program with several ranks must agree on ``stop_requested`` and ``checkpoint_requested``, e.g. by
an all-reduce, because a request reaches the ranks at different iterations. Every rank may call
``report`` and ``report_checkpoint``: only the first rank reports. All ranks must have written their
part of a checkpoint before it is reported, because a reported checkpoint counts as complete.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

__all__ = [
    "begin_tuning",
    "catch_stop",
    "checkpoint_path",
    "checkpoint_requested",
    "end_tuning",
    "fail",
    "global_batch",
    "is_first_rank",
    "iterations_total",
    "job_dir",
    "plan",
    "report",
    "report_checkpoint",
    "report_plan",
    "resume_iterations",
    "resume_path",
    "stop_requested",
    "tuning",
]

REPORT_S = 0.2
"""The least number of seconds between two writes of the progress file."""

_LOCK = threading.Lock()


class _State:
    """What this process has reported, and what it was asked for."""

    stop = False
    checkpoints_asked = 0  # the last request that a checkpoint has answered
    written_s = float("-inf")
    problem = ""  # why the progress file could not be written the last time
    timer: threading.Timer | None = None  # writes what was reported since the last write
    latest: dict[str, Any] = {}  # noqa: RUF012 - the module's own


def is_first_rank() -> bool:
    """Return whether this process reports for the whole job (variable RANK, 0 if it is not set)."""
    return os.environ.get("RANK", os.environ.get("TESSERA_NODE_RANK", "0")) == "0"


def report(iterations: int, loss: float | None = None, memory_bytes: int | None = None) -> None:
    """Report that ``iterations`` are done, with the loss and the largest GPU memory in bytes."""
    with _LOCK:
        _State.latest["iterations"] = int(iterations)
        _State.latest["time_s"] = time.monotonic()
        if loss is not None:
            value = float(loss)
            _State.latest["loss"] = value if math.isfinite(value) else str(value)  # JSON has no NaN
        if memory_bytes is not None:
            _State.latest["memory_bytes"] = int(memory_bytes)
        wait_s = _State.written_s + REPORT_S - time.monotonic()
        if wait_s <= 0:
            _write_progress()
        elif _State.timer is None:
            _State.timer = threading.Timer(wait_s, _write_rest)
            _State.timer.daemon = True
            _State.timer.start()


def fail(reason: str, message: str) -> NoReturn:
    """End this process with status 1, and report why, in one sentence.

    ``reason`` is "refused" (the program cannot run this plan), "bad_checkpoint", "loss_not_finite",
    "out_of_memory" or "error". Tessera does not try a job again that was refused, or whose loss is
    not finite. Any rank may call it.
    """
    with _LOCK:
        if _State.timer is not None:
            _State.timer.cancel()
            _State.timer = None
        _write_progress()
        _write_failure(reason, message)
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    raise SystemExit(1)


def checkpoint_path(iterations: int) -> Path:
    """Return the path, the same on all ranks, for a checkpoint of ``iterations``.

    Nothing is there yet. It may become a file or a directory. The directory above it exists.
    """
    above = Path(os.environ.get("TESSERA_CHECKPOINT_DIR", "checkpoints"))
    above.mkdir(parents=True, exist_ok=True)
    return above / f"iteration-{int(iterations)}"


def report_checkpoint(iterations: int, path: os.PathLike[str]) -> None:
    """Report that the checkpoint of ``iterations`` at ``path`` is complete on all ranks.

    From now on, the job goes on from there after a failure or a move. Tessera keeps the latest
    checkpoints, and deletes older ones.
    """
    with _LOCK:
        _State.checkpoints_asked = _asked()
        checkpoint = {"iterations": int(iterations), "path": os.fspath(path)}
        _State.latest["checkpoint"] = checkpoint
        _State.latest.setdefault("iterations", int(iterations))
        _write_progress()


def resume_path() -> Path | None:
    """Return the checkpoint to go on from, or None if the job starts at the beginning."""
    path = os.environ.get("TESSERA_RESUME_FROM", "")
    return Path(path) if path else None


def resume_iterations() -> int:
    """Return the iterations that the checkpoint of ``resume_path`` holds. 0 without one."""
    return int(os.environ.get("TESSERA_RESUME_ITERATIONS", "0"))


def catch_stop() -> None:
    """Make SIGTERM a request to stop, which ``stop_requested`` returns. Call it in the main thread."""
    signal.signal(signal.SIGTERM, _note_stop)


def stop_requested() -> bool:
    """Return whether this process was asked to write a checkpoint and exit with status 0."""
    return _State.stop


def checkpoint_requested() -> bool:
    """Return whether a checkpoint was asked for since the last one. Then the program goes on."""
    return _asked() > _State.checkpoints_asked


def iterations_total(default: int) -> int:
    """Return the iterations of the whole job, or ``default`` outside of Tessera."""
    return int(float(os.environ.get("TESSERA_ITERATIONS", default)))


def global_batch(default: int) -> int:
    """Return the samples of an iteration of the whole job, or ``default`` outside of Tessera."""
    return int(os.environ.get("TESSERA_GLOBAL_BATCH", default))


def plan() -> dict[str, Any] | None:
    """Return the execution plan as JSON's plain values, or None if Tessera has not chosen one."""
    path = os.environ.get("TESSERA_PLAN_FILE", "")
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    return dict(value)


def tuning() -> dict[str, Any] | None:
    """Return the plans to try at this start, or None if the program should not tune.

    ``budget_s`` has the seconds for it, and ``plans`` the plans as JSON's plain values, the one with
    the best estimate first.
    """
    path = os.environ.get("TESSERA_TUNING_FILE", "")
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    return dict(value)


def begin_tuning() -> None:
    """Report that plans are tried from now on, so that this counts neither as a hang nor as a start."""
    with _LOCK:
        _State.latest["tuning"] = {"began_s": time.monotonic()}
        _write_progress()


def end_tuning() -> None:
    """Report that no more plans are tried. The program runs by the plan that Tessera chose."""
    with _LOCK:
        _end_tuning()
        _write_progress()


def report_plan(plan: dict[str, Any], iteration_s: float, planned_s: float | None = None) -> None:
    """Report the plan by which the program really runs, after it has tried some.

    ``iteration_s`` has the measured seconds of its iteration. ``planned_s`` has those of the plan
    that Tessera chose: infinity if it was tried and does not run, None if it was not tried. From
    now on, Tessera starts the job by the faster one.
    """
    with _LOCK:
        _end_tuning()
        report = _State.latest["tuning"]
        report.update({"plan": dict(plan), "iteration_s": float(iteration_s)})
        if planned_s is not None:
            report["planned_s"] = float(planned_s) if planned_s < math.inf else None
        _write_progress()


def _end_tuning() -> None:
    """Note when the tuning ended. The caller holds the lock."""
    now_s = time.monotonic()
    _State.latest.setdefault("tuning", {"began_s": now_s}).setdefault("ended_s", now_s)


def job_dir(default: str = ".") -> Path:
    """Return the directory that all nodes and all starts of the job share."""
    return Path(os.environ.get("TESSERA_JOB_DIR", default))


def _note_stop(_number: int, _frame: FrameType | None) -> None:
    _State.stop = True


def _asked() -> int:
    """Return the number of the latest request for a checkpoint."""
    path = os.environ.get("TESSERA_CONTROL_FILE", "")
    if not path:
        return 0
    try:
        with open(path, encoding="utf-8") as file:
            return int(json.load(file)["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # it is not there yet, or of a later release


def _write_progress() -> None:
    """Replace the progress file in one step. The caller holds the lock."""
    path = os.environ.get("TESSERA_PROGRESS_FILE", "")
    _State.written_s = time.monotonic()
    if not path or not is_first_rank():
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(_State.latest, file)
        os.replace(temporary, path)
    except OSError as error:  # e.g. a full disk: the training itself goes on
        if str(error) != _State.problem:
            sys.stderr.write(f"tessera.progress: the progress cannot be reported: {error}\n")
        _State.problem = str(error)


def _write_failure(reason: str, message: str) -> None:
    """Write why this process ends, next to the progress file. The first rank that fails counts."""
    path = os.environ.get("TESSERA_PROGRESS_FILE", "")
    if not path:
        return
    try:
        with open(
            os.path.join(os.path.dirname(path), "failure.json"), "x", encoding="utf-8"
        ) as file:
            json.dump({"reason": reason, "message": message}, file)
    except FileExistsError:
        pass  # another rank failed before
    except OSError as error:
        sys.stderr.write(f"tessera.progress: the failure cannot be reported: {error}\n")


def _write_rest() -> None:
    """Write what was reported since the last write."""
    with _LOCK:
        if _State.timer is not None:
            _State.timer.cancel()
            _State.timer = None
            _write_progress()


atexit.register(_write_rest)
