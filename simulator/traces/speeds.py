"""The speeds of jobs as requested, according to profiles, and the Cells that fit a cluster."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Floats
from tessera.formulation.base.values import Workload
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.simulator.traces.trace import Arrival

Cell = tuple[str, int]
"""A GPU type and a number of GPUs."""


@dataclass(frozen=True, slots=True)
class ClusterRoom:
    """The capacity of a cluster by GPU type: GPUs, nodes, and GPUs of the largest node."""

    gpus: Mapping[str, int]
    nodes: Mapping[str, int]
    largest: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Iterable[NodeSpec]) -> ClusterRoom:
        """Return the capacity of a cluster of these nodes."""
        gpus: dict[str, int] = defaultdict(int)
        count: dict[str, int] = defaultdict(int)
        largest: dict[str, int] = defaultdict(int)
        for node in nodes:
            gpus[node.gpu_type] += node.gpus
            count[node.gpu_type] += 1
            largest[node.gpu_type] = max(largest[node.gpu_type], node.gpus)
        return cls(dict(gpus), dict(count), dict(largest))

    @property
    def total_gpus(self) -> int:
        """Return the number of GPUs of all types."""
        return sum(self.gpus.values())

    def holds(self, record: EstimateRecord) -> bool:
        """Return whether the empty cluster has the GPUs and nodes of an estimate's shape."""
        cell, kind = record.cell, record.cell.gpu_type
        if cell.gpus > self.gpus.get(kind, 0):
            return False
        if not cell.nodes:  # the fewest nodes that the cluster allows
            return True
        share = math.ceil(cell.gpus / cell.nodes)
        return cell.nodes <= self.nodes[kind] and share <= self.largest[kind]


class Speeds:
    """The fastest shape, degree and plan of each workload on each GPU type and count in ``room``.

    If ``room`` is None, the capacity is unlimited.
    """

    def __init__(self, profiles: Iterable[EstimateRecord], room: ClusterRoom | None = None) -> None:
        self.room = room
        self._profiles = tuple(profiles)
        self._cells: dict[Workload, dict[Cell, float]] = defaultdict(dict)
        self._tried: set[tuple[Workload, str, int]] = set()
        for record in self._profiles:
            cells = self._cells[record.workload]
            key = (record.cell.gpu_type, record.cell.gpus)
            self._tried |= {(record.workload, *key), (record.workload, "", record.cell.gpus)}
            if math.isfinite(record.iter_time_s) and (room is None or room.holds(record)):
                cells[key] = min(record.iter_time_s, cells.get(key, math.inf))

    def anywhere(self) -> Speeds:
        """Return the speeds on a cluster on which everything fits."""
        return Speeds(self._profiles)

    def workloads(self) -> list[Workload]:
        """Return the workloads that run on some Cell, in the order of the profiles."""
        return [work for work, cells in self._cells.items() if cells]

    def knows(self, workload: Workload) -> bool:
        """Return whether a workload has any estimate, including one that it does not run."""
        return workload in self._cells

    def tried(self, workload: Workload, gpu_type: str, gpus: int) -> bool:
        """Return whether a workload has an estimate on a Cell, including one that it does not run.

        If ``gpu_type`` is "", the estimate may be for any type.
        """
        return (workload, gpu_type, gpus) in self._tried

    def cells(self, workload: Workload) -> Mapping[Cell, float]:
        """Return the seconds of an iteration on each Cell that runs.

        An unknown workload has no Cells.
        """
        return self._cells.get(workload, {})

    def iter_time_s(self, spec: JobSpec) -> float:
        """Return the seconds of an iteration as requested.

        A job that names no GPU type is assumed to run on the fastest one. If the job does not run as
        requested, or has no estimate, return inf.
        """
        cells, gpus = self.cells(spec.workload), spec.requested_gpus
        if spec.requested_gpu_type:
            return cells.get((spec.requested_gpu_type, gpus), math.inf)
        return min((s for (_, n), s in cells.items() if n == gpus), default=math.inf)

    def requested_s(self, arrivals: Sequence[Arrival]) -> Floats:
        """Return each job's seconds as requested, float64[jobs].

        A job that does not run as requested has inf.
        """
        return np.array([a.spec.iterations * self.iter_time_s(a.spec) for a in arrivals], float)


def gpu_seconds(arrivals: Sequence[Arrival], speeds: Speeds) -> Floats:
    """Return each job's GPU-seconds as requested, float64[jobs].

    A job that does not run as requested has inf.
    """
    gpus: Floats = np.array([a.spec.requested_gpus for a in arrivals], float)
    return speeds.requested_s(arrivals) * gpus


def requested_load(arrivals: Sequence[Arrival], speeds: Speeds, gpus: int) -> float:
    """Return the GPU-seconds that arrive, divided by those of ``gpus`` GPUs until the last arrival.

    Jobs that do not run as requested are not counted. If all jobs arrive at time 0, the load is
    inf.
    """
    work = gpu_seconds(arrivals, speeds)
    span_s = max((a.arrival_s for a in arrivals), default=0.0)
    done = float(work[np.isfinite(work)].sum())
    return done / (gpus * span_s) if span_s > 0 else math.inf
