"""The record of the GPUs that jobs have, and a plain rule for the placement of a gang."""

from __future__ import annotations

from typing import Protocol

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.topology import Topology
from tessera.solvers.network.jobs.hived import Free


class Placer(Protocol):
    """A rule that decides where a gang goes."""

    def __call__(self, free: Free, gpus: int) -> Gang | None:
        """Return free GPUs for the whole gang, or None if it must wait."""


def first_fit(free: Free, gpus: int) -> Gang | None:
    """Return GPUs of the first host that holds the gang, else free GPUs in the order of hosts."""
    for host, indices in enumerate(free):
        if len(indices) >= gpus:
            return Gang(members=((host, tuple(indices[:gpus])),))
    if sum(len(indices) for indices in free) < gpus:
        return None
    members = []
    for host, indices in enumerate(free):
        if part := tuple(indices[:gpus]):
            members.append((host, part))
            gpus -= len(part)
    return Gang(members=tuple(members))


class Occupancy:
    """The record of the free GPUs, and of the jobs that have the others.

    A placer decides where a gang goes.
    """

    def __init__(self, topology: Topology, placer: Placer) -> None:
        self._placer = placer
        self._free = [set(range(len(topology.gpus_of(h)))) for h in range(len(topology.hosts))]
        self._gangs: dict[str, Gang] = {}

    @property
    def free(self) -> list[list[int]]:
        """Return the free GPUs of each host."""
        return [sorted(indices) for indices in self._free]

    def allocate(self, job: str, gpus: int) -> Gang | None:
        """Give the job its gang and return it.

        If there is no place now, return None and change nothing.

        Raises:
            InvalidInput: the job has a gang already, or requests no GPUs.
        """
        if job in self._gangs:
            raise InvalidInput("job", f"{job} has GPUs already; release them first")
        gang = self._placer(self.free, gpus)
        if gang is not None:
            for host, indices in gang.members:
                self._free[host].difference_update(indices)
            self._gangs[job] = gang
        return gang

    def release(self, job: str) -> None:
        """Take the job's gang back.

        Raises:
            InvalidInput: the job has no gang.
        """
        if job not in self._gangs:
            raise InvalidInput("job", f"{job} has no GPUs to release")
        for host, indices in self._gangs.pop(job).members:
            self._free[host].update(indices)
