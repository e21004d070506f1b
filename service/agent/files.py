"""JSON files that are never seen half written; imported by the jobs' processes too, so it stays light."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # importing typing would be a sixth of a job's start
if TYPE_CHECKING:
    from typing import Any


def write_json(path: str, value: dict[str, Any], *, durable: bool = False) -> None:
    """Replace the file at ``path`` in one step. ``durable``: it also survives a power failure."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        _sync_directory(os.path.dirname(path))


def read_json(path: str) -> dict[str, Any] | None:
    """Return what ``write_json`` wrote; None where there is no such file.

    Raises:
        ValueError: the file is not a JSON object, so something else wrote it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; remove it")
    return value


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
