"""A double of ``tessera.progress``, for programs that tests start without an agent.

It has the same functions, and reads and writes the same variables and files.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

_state: dict[str, Any] = {}
_signals: list[int] = []


def report(iterations: int, loss: float | None = None, memory_bytes: int | None = None) -> None:
    given = {"loss": loss, "memory_bytes": memory_bytes, "time_s": time.monotonic()}
    _state.update({"iterations": iterations, **{k: v for k, v in given.items() if v is not None}})
    _write()


def checkpoint_path(iterations: int) -> Path:
    return Path(os.environ.get("TESSERA_CHECKPOINT_DIR", ".")) / f"iteration-{iterations}"


def report_checkpoint(iterations: int, path: Path) -> None:
    _state["checkpoint"] = {"iterations": iterations, "path": str(path)}
    _write()


def resume_path() -> Path | None:
    path = os.environ.get("TESSERA_RESUME_FROM")
    return Path(path) if path else None


def resume_iterations() -> int:
    return int(os.environ.get("TESSERA_RESUME_ITERATIONS", "0"))


def catch_stop() -> None:
    signal.signal(signal.SIGTERM, lambda number, _frame: _signals.append(number))


def stop_requested() -> bool:
    return bool(_signals)


def checkpoint_requested() -> bool:
    control = os.environ.get("TESSERA_CONTROL_FILE")
    if not control or not Path(control).exists():
        return False
    asked: int = json.loads(Path(control).read_text())["checkpoint"]
    answered: int = _state.get("checkpoint", {}).get("iterations", -1)
    return asked > 0 and answered < _state.get("iterations", 0)


def iterations_total(default: int) -> int:
    return int(os.environ.get("TESSERA_ITERATIONS", default))


def global_batch(default: int) -> int:
    return int(os.environ.get("TESSERA_GLOBAL_BATCH", default))


def plan() -> dict[str, Any] | None:
    path = os.environ.get("TESSERA_PLAN_FILE")
    if not path:
        return None
    values: dict[str, Any] = json.loads(Path(path).read_text())
    return values


def job_dir(default: Path) -> Path:
    return Path(os.environ.get("TESSERA_JOB_DIR", default))


def _write() -> None:
    path = os.environ.get("TESSERA_PROGRESS_FILE")
    if path and "iterations" in _state:
        partial = Path(f"{path}.partial")
        partial.write_text(json.dumps(_state))
        partial.rename(path)
