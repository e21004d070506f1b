"""Muri on a trace, adapted to whole GPUs: a job without free GPUs shares those of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.formulation.network.contention import Contention, demand_of
from tessera.formulation.placement import Gang
from tessera.formulation.tables import Floats
from tessera.solvers.network.jobs.muri import EFFICIENCY_THRESHOLD, group_efficiency, interleaved_s
from tessera.solvers.network.jobs.placers import Occupancy


@dataclass(slots=True)
class _SharedGang:
    """A gang with the jobs on it. Its GPUs are booked under ``key``, the first of these jobs."""

    key: str
    gang: Gang
    jobs: list[str] = field(default_factory=list)


class MuriPlaces:
    """A placer that pairs an arriving job with a running one if no GPUs are free.

    Muri's rule considers the jobs that run alone on the same number of GPUs. It picks the job with
    which the pair is most efficient, provided that this efficiency is above lambda. Jobs are never
    moved, so a pair lasts until one of its jobs ends. ``met`` makes the contention of a single job
    on a gang.
    """

    def __init__(self, book: Occupancy, met: Callable[[str, Gang], Contention]) -> None:
        self._book, self._met = book, met
        self._seat: dict[str, _SharedGang] = {}
        self._changed: set[str] = set()
        self._stage: dict[tuple[str, Gang], Floats] = {}
        self.owner: dict[str, str] = {}
        """The first job of the group in which each job ran, for every job that ever started."""

    def allocate(self, job: str, gpus: int) -> Gang | None:
        """Return free GPUs for the job, or those of another job, or None if neither is possible."""
        gang = self._book.allocate(job, gpus)
        if gang is not None:
            self._seat[job] = _SharedGang(job, gang, [job])
            self.owner[job] = job
            return gang
        seat = self._partner(job, gpus)
        if seat is None:
            return None
        seat.jobs.append(job)
        self._seat[job] = seat
        self._changed |= set(seat.jobs)
        self.owner[job] = seat.key
        return seat.gang

    def release(self, job: str) -> None:
        """Take the job off its GPUs, which become free if no other job runs on them."""
        seat = self._seat.pop(job)
        seat.jobs.remove(job)
        self._changed.discard(job)
        if seat.jobs:
            self._changed |= set(seat.jobs)
        else:
            self._book.release(seat.key)

    def changed(self) -> Mapping[str, Contention]:
        """Return the contentions of jobs whose group has changed since the last call."""
        names, self._changed = sorted(self._changed), set()
        return {name: self._together(name) for name in names}

    def _partner(self, job: str, gpus: int) -> _SharedGang | None:
        alone = [s for s in self._seat.values() if len(s.jobs) == 1 and s.gang.gpus == gpus]
        if not alone:
            return None
        pairs = np.stack(
            [np.stack([self._stages(s.jobs[0], s.gang), self._stages(job, s.gang)]) for s in alone]
        )
        worth = group_efficiency(pairs)
        best = int(np.argmax(worth))
        return alone[best] if worth[best] > EFFICIENCY_THRESHOLD * (1 + 1e-9) else None

    def _stages(self, job: str, gang: Gang) -> Floats:
        """Return the job's seconds on the GPU and on the network per iteration, (2,)."""
        if (job, gang) not in self._stage:
            part = self._met(job, gang)
            first = demand_of(part, np.zeros(len(part.bundle_bytes), np.int64))
            self._stage[job, gang] = np.array([part.compute_s[0], first.comm_s[0]])
        return self._stage[job, gang]

    def _together(self, job: str) -> Contention:
        """Return the job's contention within its group.

        Apart from network delays, its iterations take as long as those of the group.
        """
        seat = self._seat[job]
        part = self._met(job, seat.gang)
        if len(seat.jobs) == 1:
            return part
        stages = np.stack([self._stages(name, seat.gang) for name in seat.jobs])
        together_s = float(interleaved_s(stages[None])[0])
        start_s = max(0.0, together_s - float(self._stages(job, seat.gang)[1]))
        return replace(part, compute_s=np.array([together_s]), start_s=np.array([start_s]))
