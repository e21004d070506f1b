"""The demands of jobs on Cells: those recorded when they were given their Cell, or those of estimates.

Estimates of a Cell's CPU cores and host memory may change while jobs run on it. A job that stays on
its Cell still needs what it was given with it, so that a new estimate cannot make it lose its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import CellKey
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.demand import NOT_STATED, Demand, Demands
from tessera.formulation.state.snapshot import Estimates, Jobs, Snapshot

CellDemands: TypeAlias = Mapping[tuple[int, CellKey], tuple[int, int]]
"""(CPU cores, bytes of host memory) by workload and Cell. Cells that need neither are absent."""


def demands_of_columns(jobs: Jobs, cells: Cells, job: Ints, cell: Ints) -> Demands:
    """Return the total demand of each column, whose job and Cell are int64[columns]."""
    demands = cells.demand.at(cell)
    given = jobs.current_cpus != NOT_STATED
    is_needed = (jobs.current_cpus[given] > 0).any() or (jobs.current_host_bytes[given] > 0).any()
    if not given.any() or (demands.of_gpus_alone and not is_needed):
        return demands
    stays = given[job]
    for current, name in zip(Jobs.CELL, Cells.CELL, strict=True):
        stays &= getattr(jobs, current)[job] == getattr(cells, name)[cell]
    return Demands(
        gpus=demands.gpus,
        cpus=np.where(stays, jobs.current_cpus[job], demands.cpus),
        host_bytes=np.where(stays, jobs.current_host_bytes[job], demands.host_bytes),
    )


def demands_of_cells(estimates: Estimates) -> CellDemands:
    """Return the demands of Cells by estimates. Of a Cell's shapes, the one that needs most counts."""
    demands: dict[tuple[int, CellKey], tuple[int, int]] = {}
    for row in np.flatnonzero((estimates.cpus > 0) | (estimates.host_bytes > 0)).tolist():
        key = int(estimates.workload[row]), estimates.key_at(row)
        cpus, host_bytes = demands.get(key, (0, 0))
        demands[key] = (
            max(cpus, int(estimates.cpus[row])),
            max(host_bytes, int(estimates.host_bytes[row])),
        )
    return demands


def demand_on(snapshot: Snapshot, demands: CellDemands, job: int, cell: CellKey) -> Demand:
    """Return the total demand of a job on a Cell, with ``demands_of_cells(snapshot.estimates)``."""
    jobs = snapshot.jobs
    cpus, host_bytes = demands.get((int(jobs.workload[job]), cell), (0, 0))
    if jobs.current_cpus[job] != NOT_STATED and jobs.key_at(job) == cell:
        cpus, host_bytes = int(jobs.current_cpus[job]), int(jobs.current_host_bytes[job])
    return Demand(gpus=cell.gpus, cpus=cpus, host_bytes=host_bytes)
