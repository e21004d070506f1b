"""A job's latest checkpoint, fenced by generation: once a newer one has opened it, an older cannot write.

A directory a job, on a file system that all of the job's nodes share (with working ``flock``). It holds
``lock``, ``fence.json`` (the newest generation that opened it) and ``checkpoint.json``. Imported by the
jobs' processes, so it stays light: hence also an error outside of ``formulation.errors``.
"""

from __future__ import annotations

import fcntl
import os

from service.agent.files import read_json, write_json


class StaleGeneration(RuntimeError):
    """A newer generation of the job has opened its checkpoint, so this one must end."""

    def __init__(self, generation: int, fence: int) -> None:
        super().__init__(
            f"generation {generation} may not touch the checkpoint any more:"
            f" generation {fence} has taken it over"
        )
        self.generation = generation
        self.fence = fence


def open_generation(directory: str, generation: int) -> int:
    """Shut out all older generations; return the iterations of the latest checkpoint, 0 where none.

    Raises:
        StaleGeneration: a newer generation was here before.
        ValueError: a file of the store does not hold what this module writes.
    """
    os.makedirs(directory, exist_ok=True)
    lock = _lock(directory)
    try:
        if generation > _checked_fence(directory, generation):
            write_json(_fence_path(directory), {"generation": generation}, durable=True)
        latest = read_json(_checkpoint_path(directory))
    finally:
        os.close(lock)
    return int(latest["iterations"]) if latest else 0


def save(directory: str, generation: int, iterations: int) -> None:
    """Replace the checkpoint, durably.

    Raises:
        StaleGeneration: a newer generation has opened it; nothing was written.
    """
    lock = _lock(directory)
    try:
        _checked_fence(directory, generation)
        write_json(
            _checkpoint_path(directory),
            {"generation": generation, "iterations": iterations},
            durable=True,
        )
    finally:
        os.close(lock)


def _checked_fence(directory: str, generation: int) -> int:
    """Return the newest generation that opened the store, under its lock. Raises StaleGeneration."""
    stored = read_json(_fence_path(directory))
    fence = int(stored["generation"]) if stored else 0
    if generation < fence:
        raise StaleGeneration(generation, fence)
    return fence


def _lock(directory: str) -> int:
    """Return a descriptor that holds the store's lock until it is closed."""
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _fence_path(directory: str) -> str:
    return os.path.join(directory, "fence.json")


def _checkpoint_path(directory: str) -> str:
    return os.path.join(directory, "checkpoint.json")
