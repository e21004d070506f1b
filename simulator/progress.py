"""The progress of running jobs, which is linear between changes of their speed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.base.values import Cell
from tessera.simulator.store.gpus import AllocationChange


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job that holds GPUs. Its progress is linear between the breakpoints (``at_s``, ``done``).

    Its start does work until ``ready_s``.
    """

    change: AllocationChange
    cell: Cell  # the Cell of the change, by names
    gang: Gang
    start_s: float  # the start of the segment that is not yet logged
    ready_s: float
    stamp: int  # changes with its speed; events of an earlier one have no effect
    speed: float = 0.0  # iterations/s, including the slowdown
    slowdown: float = 1.0
    network: float = 1.0  # the network's part of the slowdown
    at_s: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)

    def done_at(self, now_s: float) -> float:
        """Return the iterations trained by ``now_s``. Before the start there is no progress."""
        if len(self.at_s) == 1:  # the usual case, needed for every job in every round
            return self.done[0] + self.speed * max(0.0, now_s - self.at_s[0])
        i = max(0, bisect_right(self.at_s, now_s) - 1)
        speed = self.speed
        if i + 1 < len(self.at_s):
            speed = (self.done[i + 1] - self.done[i]) / (self.at_s[i + 1] - self.at_s[i])
        return self.done[i] + speed * max(0.0, now_s - self.at_s[i])


class Progress:
    """The progress of running jobs after their last breakpoint, as arrays by job."""

    def __init__(self, jobs: int) -> None:
        self.at_s, self.done = np.zeros(jobs), np.zeros(jobs)  # of the last breakpoint
        self.speed = np.zeros(jobs)
        self.ready_s = np.zeros(jobs)
        self.began = np.zeros(jobs)  # iterations trained before the segment that is not yet logged
        self.gpus = np.zeros(jobs, dtype=np.int64)

    def take(self, job: int, run: RunningJob) -> None:
        """Record the run's last breakpoint, speed, start and GPUs."""
        self.at_s[job], self.done[job], self.speed[job] = run.at_s[-1], run.done[-1], run.speed
        self.ready_s[job], self.began[job] = run.ready_s, run.done_at(run.start_s)
        self.gpus[job] = run.cell.gpus

    def done_at(self, jobs: Ints, now_s: float) -> Floats:
        """Return the iterations trained by ``now_s`` of running jobs, float64[jobs].

        Before its last breakpoint a job makes no progress.
        """
        return self.done[jobs] + self.speed[jobs] * np.maximum(0.0, now_s - self.at_s[jobs])
