"""A job's latest checkpoint, fenced by generation.

Once a newer generation has opened the checkpoint, an older one cannot write it. Each job has a
directory on a file system that all of the job's nodes share (with working ``flock``). The directory
holds ``lock``, ``fence.json`` (the newest job of the name and its newest generation that opened it)
and ``checkpoint.json``.

The jobs' processes import this module, so it stays light. This is why its error is defined outside
of ``tessera.formulation.base.errors``.
"""

from __future__ import annotations

import fcntl
import os
import time

from tessera.service.agent.files import (
    make_private,
    open_private,
    read_json,
    remove_file,
    write_json,
)

TYPE_CHECKING = False  # importing typing would be a sixth of a job's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOCK_S, LOCK_PAUSE_S = 60.0, 0.05
"""Seconds for which a process waits for the lock of a store, and between two attempts."""


class StaleGeneration(RuntimeError):
    """A newer generation of the job has opened its checkpoint, so this one must end."""

    def __init__(self, generation: int, fence: int) -> None:
        super().__init__(
            f"generation {generation} can no longer use the checkpoint:"
            f" generation {fence} has taken it over"
        )
        self.generation = generation
        self.fence = fence


def open_generation(directory: str, generation: int, job: int) -> int:
    """Shut out all older generations; return the iterations of the latest checkpoint, or 0.

    ``job`` is the job's number, which rises with each job. The files of an earlier job of the same
    name are removed, and that job is shut out.

    Raises:
        StaleGeneration: a newer generation, or a newer job of this name, was here before.
        ValueError: a file of the store does not hold what this module writes.
    """
    make_private(directory)
    lock = _lock(directory)
    try:
        fenced_job, fence = _checked_fence(directory, generation, job)
        if fenced_job and job != fenced_job:
            remove_file(_checkpoint_path(directory))  # before the fence names this job as the owner
        if (job, generation) != (fenced_job, fence):
            value = {"generation": generation, "job": job}
            write_json(_fence_path(directory), value, durable=True)
        latest = read_json(_checkpoint_path(directory))
    finally:
        os.close(lock)
    return _whole(_checkpoint_path(directory), latest, "iterations") if latest else 0


def save_checkpoint(directory: str, generation: int, iterations: int, job: int) -> None:
    """Replace the checkpoint, durably.

    Raises:
        StaleGeneration: a newer generation, or a newer job of this name, has opened it; nothing was
            written.
    """
    lock = _lock(directory)
    try:
        _checked_fence(directory, generation, job)
        write_json(
            _checkpoint_path(directory),
            {"generation": generation, "iterations": iterations},
            durable=True,
        )
    finally:
        os.close(lock)


def rewrite_json(
    directory: str,
    name: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    generation: int,
    job: int,
) -> None:
    """Replace a file of the store by ``change`` of its contents ({} if it is absent), durably.

    Raises:
        StaleGeneration: a newer generation, or a newer job of this name, has opened the store;
            nothing was written.
        ValueError: the file does not hold a JSON object.
    """
    lock = _lock(directory)
    try:
        _checked_fence(directory, generation, job)
        path = os.path.join(directory, name)
        write_json(path, change(read_json(path) or {}), durable=True)
    finally:
        os.close(lock)


def _checked_fence(directory: str, generation: int, job: int) -> tuple[int, int]:
    """Return the newest job and generation that opened the store. Raises StaleGeneration.

    Both are 0 if none did. The caller holds the store's lock.
    """
    path = _fence_path(directory)
    stored = read_json(path)
    if not stored:
        return 0, 0
    fenced_job, fence = _whole(path, stored, "job"), _whole(path, stored, "generation")
    if (job, generation) < (fenced_job, fence):
        raise StaleGeneration(generation, fence)
    return fenced_job, fence


def _lock(directory: str) -> int:
    """Return a descriptor that holds the store's lock until it is closed.

    Raises:
        TimeoutError: another process holds it for too long. It may be frozen, even on another node.
    """
    path = os.path.join(directory, "lock")
    descriptor = open_private(path, keep=True)
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until_s:
                time.sleep(LOCK_PAUSE_S)
                continue
            os.close(descriptor)
            raise TimeoutError(
                f"another process has held {path} for {LOCK_S:g} s; is one of this job frozen on some node?"
            ) from None
        return descriptor


def _whole(path: str, stored: dict[str, object], name: str) -> int:
    """Return a number from a stored object. Raises ValueError if it is missing or meaningless."""
    value = stored.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ValueError(
            f"{path} is broken: {name} is {value!r}; remove it, or put back an older one"
        )
    return int(value)


def _fence_path(directory: str) -> str:
    return os.path.join(directory, "fence.json")


def _checkpoint_path(directory: str) -> str:
    return os.path.join(directory, "checkpoint.json")
