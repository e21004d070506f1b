"""The GPUs of a cluster, and the jobs that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.resources import NO_NEEDS
from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import NO_CELL, CellKey, Hold
from tessera.formulation.state.snapshot import Allocations, Nodes


class InvariantBroken(AssertionError):
    """An error for a world that contradicts itself, because of a defect of the simulator or a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationChange:
    """A change that a round made to a job's GPUs. If ``gang`` is None, the job no longer has GPUs."""

    job: int  # index into the scenario's arrivals
    kind: DecisionKind
    cell: CellKey = NO_CELL
    gang: Gang | None = None
    needs: tuple[int, ...] = NO_NEEDS
    """The CPU cores and the bytes of host memory that the job is given with ``cell``."""


class HeldGpus:
    """The holders of GPUs, which are ordered by node and then by their index on it.

    ``owner`` is int64[GPUs], the job that holds each, or -1. ``gangs`` has the GPUs of each job that
    holds some. Jobs are indices into the scenario's arrivals.
    """

    def __init__(self, nodes: Nodes) -> None:
        """Begin with GPUs that nobody holds."""
        self._first = np.append(0, np.cumsum(nodes.gpus))  # of each node
        self._node = np.repeat(np.arange(len(nodes)), nodes.gpus)
        self.owner = np.full(int(self._first[-1]), -1, dtype=np.int64)
        self.gangs: dict[int, Gang] = {}
        self._places: dict[int, Ints] = {}  # of each job in ``owner``

    def take(self, job: int, cell: CellKey, gang: Gang, nodes: Nodes, name: str) -> None:
        """Give a job the GPUs of ``gang``. ``nodes`` are those of now, and ``name`` is the job's.

        Raises:
            InvariantBroken: a GPU does not exist, is held, is away, or is not one of the Cell.
        """
        node = np.repeat([n for n, _ in gang.members], [len(g) for _, g in gang.members])
        gpus = np.concatenate([np.array(g, dtype=np.int64) for _, g in gang.members])
        if (gpus < 0).any() or (gpus >= nodes.gpus[node]).any():
            raise InvariantBroken(f"{name} was given GPUs that do not exist")
        places = self._first[node] + gpus
        if len(np.unique(places)) < len(places) or (self.owner[places] >= 0).any():
            raise InvariantBroken(f"{name} was given a GPU that is already held")
        if not nodes.schedulable[node].all():
            raise InvariantBroken(f"{name} was placed on a node that is away")
        if len(places) != cell.gpus or (nodes.gpu_type[node] != cell.gpu_type).any():
            raise InvariantBroken(f"{name} was given GPUs other than those of its Cell")
        self.owner[places] = job
        self.gangs[job], self._places[job] = gang, places

    def release(self, job: int) -> None:
        """Take back the GPUs of a job that holds some."""
        self.owner[self._places.pop(job)] = -1
        del self.gangs[job]

    def table(self, local: Ints, generation: Ints) -> Allocations:
        """Return who holds what. ``local`` and ``generation`` are int64[jobs].

        They are the index of each job in the snapshot, and the number of its allocation.
        """
        held = np.flatnonzero(self.owner >= 0)
        job, node = self.owner[held], self._node[held]
        return Allocations(
            job=local[job],
            node=node,
            gpu=held - self._first[node],
            hold=np.full(len(held), int(Hold.HELD), dtype=np.int64),
            generation=generation[job],
        )
