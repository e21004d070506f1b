"""The clock of a profiling task: the GPU-seconds that it has used, and whether it may go on.

The seconds of earlier processes of the task on this node count, too. They are in a file next to its
records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tessera.estimator.profiling.limits import ProfilingLimits
from tessera.service.agent.files import read_json, write_json

CLOCK_FILE: Final = "held.json"
"""The name of the file with the GPU-seconds of a task, in the folder of its records."""


@dataclass(kw_only=True)
class TaskClock:
    """The time that a task has used. ``left_s`` is what the workload has left at ``begun_s``.

    All times but ``earlier_s`` are those of ``clock``, whose seconds grow steadily. The task has one
    GPU, so its seconds are GPU-seconds.
    """

    path: str
    limits: ProfilingLimits
    clock: Callable[[], float]
    begun_s: float
    earlier_s: float
    left_s: float

    @classmethod
    def resume(
        cls, path: str, limits: ProfilingLimits, clock: Callable[[], float], begun_s: float
    ) -> TaskClock:
        """Return the clock of a process that began at ``begun_s``, after earlier ones.

        Raises:
            OSError: the file of earlier processes cannot be read.
            ValueError, TypeError: another program wrote it.
        """
        stored = read_json(path) or {}
        return cls(
            path=path,
            limits=limits,
            clock=clock,
            begun_s=begun_s,
            earlier_s=float(stored.get("held_s", 0.0)),
            left_s=limits.workload_s,
        )

    @property
    def held_s(self) -> float:
        """Return the GPU-seconds of the task so far."""
        return self.earlier_s + self.clock() - self.begun_s

    def set_left(self, left_s: float) -> None:
        """Note that the workload has ``left_s`` seconds left now."""
        self.left_s = left_s + self.clock() - self.begun_s

    def save(self) -> None:
        """Store the GPU-seconds for later processes. Raises OSError."""
        write_json(self.path, {"held_s": self.held_s})

    def stop_reason(self) -> str:
        """Return why the task has to end now, or "" if it may go on."""
        if self.held_s >= self.limits.task_gpu_s:
            return self.limits.gpu_reason()
        if self.clock() - self.begun_s >= self.left_s:
            return self.limits.time_reason()
        return ""
