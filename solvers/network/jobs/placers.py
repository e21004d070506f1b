"""Plain rules for the placement of a gang, and the record of the free GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from tessera.formulation.errors import InvalidInput
from tessera.formulation.placement import Gang
from tessera.formulation.topologies.topology import Topology

Free: TypeAlias = Sequence[Sequence[int]]
"""The free GPUs of each host, as rising indices; hosts are those of the topology."""


class Placer(Protocol):
    """A rule that decides where a gang goes."""

    def __call__(self, free: Free, gpus: int) -> Gang | None:
        """Return free GPUs for the whole gang, or None if it must wait."""


def first_fit(free: Free, gpus: int) -> Gang | None:
    """Return GPUs of the first host that holds the gang, else free GPUs in the order of hosts."""
    return _taken(free, gpus, range(len(free)))


class RandomSpread:
    """A placer that takes a random host among those that hold the gang.

    Larger gangs take hosts at random, idle ones first.
    """

    def __init__(self, seed: int = 0) -> None:
        self._chance = np.random.default_rng(seed)

    def __call__(self, free: Free, gpus: int) -> Gang | None:
        """Return the GPUs of the gang, or None if it must wait."""
        order = self._chance.permutation(len(free)).tolist()
        return _taken(
            free, gpus, sorted(order, key=lambda h: -len(free[h])) if gpus > _most(free) else order
        )


def _most(free: Free) -> int:
    return max((len(indices) for indices in free), default=0)


def _taken(free: Free, gpus: int, hosts: Iterable[int]) -> Gang | None:
    """Return GPUs of the first of ``hosts`` that holds the gang, else free GPUs in their order."""
    require_positive(gpus)
    hosts = list(hosts)
    for host in hosts:
        if len(free[host]) >= gpus:
            return Gang(members=((host, tuple(free[host][:gpus])),))
    if sum(len(indices) for indices in free) < gpus:
        return None
    members = []
    for host in hosts:
        if part := tuple(free[host][:gpus]):
            members.append((host, part))
            gpus -= len(part)
    return Gang(members=tuple(sorted(members)))


def require_positive(gpus: int) -> None:
    """Refuse a gang without GPUs.

    Raises:
        InvalidInput: ``gpus`` is below 1.
    """
    if gpus < 1:
        raise InvalidInput("gpus", f"is {gpus}; it must be at least 1")


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
