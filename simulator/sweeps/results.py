"""A folder of results with one file for each task, so that an interrupted sweep can be resumed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.formulation.errors import InvalidInput
from tessera.simulator.sweeps.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results in ``folder`` by key. If ``folder`` is None, nothing is kept."""

    folder: Path | None
    commit: str

    def load(self, key: str) -> dict[str, Any] | None:
        """Return the result of the task with this ``key``. If it is not there, return None."""
        if self.folder is None or not (file := self.folder / f"{key}.json").exists():
            return None
        try:
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["result"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                str(file), f"is not a result that a sweep wrote ({error}); delete it"
            ) from error
        return result

    def save(self, key: str, task: Task, result: dict[str, Any]) -> None:
        """Write a result atomically: the file is complete or absent, even after a crash."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "name": task.name,
            "function": task.function,
            "options": dict(task.options),
            "files": [str(file) for file in task.files],
            "commit": self.commit,
            "result": result,
        }
        partial = self.folder / f"{key}.{os.getpid()}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / f"{key}.json")
