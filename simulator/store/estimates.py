"""The estimates that rounds see, which grow as models are profiled and jobs are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tessera.formulation.base.resources import HOST_NAMES, NO_NEEDS, amounts_of
from tessera.formulation.base.tables import Bools
from tessera.formulation.base.values import PROFILING, CellKey, EstimateSource, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.given_demand import demands_of_cells
from tessera.formulation.state.snapshot import Estimates, Nodes
from tessera.simulator.measured_times import find_shapes, with_measured_time
from tessera.simulator.store.names import Names


class VisibleEstimates:
    """The estimates that rounds see, and those that they will see once models are profiled.

    ``table`` has the visible ones. ``are_known`` is bool[workloads]: whether a workload has
    estimates, visible or hidden.
    """

    def __init__(self, profiles: Sequence[EstimateRecord], names: Names, nodes: Nodes) -> None:
        """Let rounds see all of ``profiles``."""
        self._names = names
        self.table = tabulate_estimates(profiles, names, nodes)
        self.are_known: Bools = np.zeros(len(names.workloads), dtype=np.bool_)
        self.are_known[self.table.workload] = True
        self._hidden = self.table.at(np.zeros(0, dtype=np.int64))
        self._demands = demands_of_cells(self.table)  # measuring a time changes none

    def hide(self) -> None:
        """Hide the estimates of all jobs from rounds, except for those of profiling tasks."""
        tasks = np.array([w.model == PROFILING for w in self._names.workloads], dtype=np.bool_)
        shown = tasks[self.table.workload]
        self._hidden, self.table = self.table.at(~shown), self.table.at(shown)

    def show(self, covers: Callable[[Workload, str], bool]) -> None:
        """Let rounds see the hidden estimates of the workloads and GPU types that were profiled."""
        hidden, names = self._hidden, self._names
        pairs = list(zip(hidden.workload.tolist(), hidden.gpu_type.tolist(), strict=True))
        covered = {
            (workload, kind)
            for workload, kind in set(pairs)
            if covers(names.workloads[workload], names.gpu_types[kind].name)
        }
        shown = np.array([pair in covered for pair in pairs], dtype=np.bool_)
        self._hidden = hidden.at(~shown)
        self.table = self.table.followed_by(hidden.at(shown)).in_order()

    def measure(self, workload: int, cell: CellKey, nodes: int, iter_time_s: float) -> None:
        """Record the iteration time of a Cell on ``nodes`` nodes. It is inf if it does not run."""
        e = self.table
        if (find_shapes(e, workload, cell) & (e.nodes == nodes)).any():
            self.table = with_measured_time(e, workload, cell, nodes, iter_time_s)
            return
        known = {"iter_time_s": iter_time_s, "source": int(EstimateSource.MEASURED)}
        row = {"workload": workload, **cell._asdict(), "nodes": nodes} | known
        self.table = e.followed_by(Estimates.from_rows([row])).in_order()
        self.are_known[workload] = True

    def needs(self, workload: int, cell: CellKey) -> tuple[int, ...]:
        """Return the amounts of host resources that a job on a Cell needs."""
        return self._demands.get((workload, cell), NO_NEEDS)


def tabulate_estimates(profiles: Sequence[EstimateRecord], names: Names, nodes: Nodes) -> Estimates:
    """Return the profiles of the cluster's GPU types as a table of a snapshot.

    A profile without a number of nodes holds for the fewest nodes that the cluster's node sizes
    allow.
    """
    types = names.type_indices()
    work = {w: i for i, w in enumerate(names.workloads)}
    plan = {name: i for i, name in enumerate(names.plans)}
    size = np.ones(len(names.gpu_types), dtype=np.int64)  # of the largest node of each type
    np.maximum.at(size, nodes.gpu_type, nodes.gpus)
    rows = sorted(
        (
            work[e.workload],
            types[c.gpu_type],
            c.gpus,
            c.pipeline_degree,
            plan[c.plan],
            c.nodes or math.ceil(c.gpus / int(size[types[c.gpu_type]])),
            e.iter_time_s,
            int(e.source),
            math.nan if e.sd is None else e.sd,
            e.complete,
            *amounts_of(e),
        )
        for e in profiles
        if types.get((c := e.cell).gpu_type, -1) >= 0
    )
    columns = (*Estimates.ORDER, "iter_time_s", "source", "sd", "complete", *HOST_NAMES)
    return Estimates.from_rows([dict(zip(columns, row, strict=True)) for row in rows])
