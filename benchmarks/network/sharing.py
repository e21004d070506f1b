"""Muri on a trace, read for whole GPUs: a job that finds no place shares those of another, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.formulation.network.contention import Contention, demand_of
from tessera.formulation.placement import Gang
from tessera.formulation.tables import Floats
from tessera.solvers.network.jobs.muri import IN_TURN, efficiency, interleaved_s
from tessera.solvers.network.jobs.placers import Occupancy


@dataclass(slots=True)
class _Seat:
    """Who holds a gang; GPUs are booked under ``key``, its first job."""

    key: str
    gang: Gang
    jobs: list[str] = field(default_factory=list)


class MuriPlaces:
    """Places gangs as its book says, and where there is no room pairs the job with a running one.

    Muri's rule at a job's arrival: of the jobs with as many GPUs that run alone the one with which the pair
    is most efficient, if that is above lambda. Nobody is moved, so a pair lasts until one of it ends. ``met``
    makes a job's part of the contention on a gang, alone.
    """

    def __init__(self, book: Occupancy, met: Callable[[str, Gang], Contention]) -> None:
        self._book, self._met = book, met
        self._seat: dict[str, _Seat] = {}
        self._changed: set[str] = set()
        self._stage: dict[tuple[str, Gang], Floats] = {}
        self.owner: dict[str, str] = {}
        """Of every job that ever started, the first job of the company that it was in."""

    def allocate(self, job: str, gpus: int) -> Gang | None:
        """Give the job GPUs of its own, or those of another; None: neither can be."""
        gang = self._book.allocate(job, gpus)
        if gang is not None:
            self._seat[job] = _Seat(job, gang, [job])
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
        """Take the job off its GPUs; they are free when nobody else is on them."""
        seat = self._seat.pop(job)
        seat.jobs.remove(job)
        self._changed.discard(job)
        if seat.jobs:
            self._changed |= set(seat.jobs)
        else:
            self._book.release(seat.key)

    def changed(self) -> Mapping[str, Contention]:
        """Return the parts of jobs whose company is another since the last call."""
        names, self._changed = sorted(self._changed), set()
        return {name: self._together(name) for name in names}

    def _partner(self, job: str, gpus: int) -> _Seat | None:
        alone = [s for s in self._seat.values() if len(s.jobs) == 1 and s.gang.gpus == gpus]
        if not alone:
            return None
        pairs = np.stack(
            [np.stack([self._stages(s.jobs[0], s.gang), self._stages(job, s.gang)]) for s in alone]
        )
        worth = efficiency(pairs)
        best = int(np.argmax(worth))
        return alone[best] if worth[best] > IN_TURN * (1 + 1e-9) else None

    def _stages(self, job: str, gang: Gang) -> Floats:
        """Return seconds on the GPU and on the network, (2,)."""
        if (job, gang) not in self._stage:
            part = self._met(job, gang)
            first = demand_of(part, np.zeros(len(part.bundle_bytes), np.int64))
            self._stage[job, gang] = np.array([part.compute_s[0], first.comm_s[0]])
        return self._stage[job, gang]

    def _together(self, job: str) -> Contention:
        """Return the job's part in its company: its iterations take as long as the group's, network aside."""
        seat = self._seat[job]
        part = self._met(job, seat.gang)
        if len(seat.jobs) == 1:
            return part
        stages = np.stack([self._stages(name, seat.gang) for name in seat.jobs])
        together_s = float(interleaved_s(stages[None])[0])
        start_s = max(0.0, together_s - float(self._stages(job, seat.gang)[1]))
        return replace(part, compute_s=np.array([together_s]), start_s=np.array([start_s]))
