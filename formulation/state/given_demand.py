"""The demands of jobs on Cells: those recorded when they were given their Cell, or those of estimates.

Estimates of a Cell's CPU cores and host memory may change while jobs run on it. A job that stays on
its Cell still needs what it was given with it, so that a new estimate cannot make it lose its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from tessera.formulation.base.resources import (
    GIVEN_PREFIX,
    NO_NEEDS,
    Demand,
    amounts_of,
    name_amounts,
)
from tessera.formulation.base.tables import Ints
from tessera.formulation.base.values import CellKey
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.host_tables import Demands
from tessera.formulation.state.snapshot import Estimates, Jobs, Snapshot

CellDemands: TypeAlias = Mapping[tuple[int, CellKey], tuple[int, ...]]
"""Amounts of host resources by workload and Cell. Cells that need none are absent."""


def demands_of_columns(jobs: Jobs, cells: Cells, job: Ints, cell: Ints) -> Demands:
    """Return the total demand of each column, whose job and Cell are int64[columns]."""
    demands = cells.demand.at(cell)
    given, current = jobs.is_given(), amounts_of(jobs, GIVEN_PREFIX)
    is_needed = any((amount[given] > 0).any() for amount in current)
    if not given.any() or (demands.of_gpus_alone and not is_needed):
        return demands
    stays = given[job]
    for current_name, name in zip(Jobs.CELL, Cells.CELL, strict=True):
        stays &= getattr(jobs, current_name)[job] == getattr(cells, name)[cell]
    pairs = zip(current, amounts_of(demands), strict=True)
    needs = name_amounts(np.where(stays, amount[job], need) for amount, need in pairs)
    return Demands(gpus=demands.gpus, **needs)


def demands_of_cells(estimates: Estimates) -> CellDemands:
    """Return the demands of Cells by estimates. Of a Cell's shapes, the one that needs most counts."""
    demands: dict[tuple[int, CellKey], tuple[int, ...]] = {}
    needs = np.stack(amounts_of(estimates), axis=1)
    for row in np.flatnonzero((needs > 0).any(axis=1)).tolist():
        key = int(estimates.workload[row]), estimates.key_at(row)
        demands[key] = tuple(map(max, demands.get(key, NO_NEEDS), needs[row].tolist()))
    return demands


def demand_on(snapshot: Snapshot, demands: CellDemands, job: int, cell: CellKey) -> Demand:
    """Return the total demand of a job on a Cell, with ``demands_of_cells(snapshot.estimates)``."""
    jobs = snapshot.jobs
    needs = demands.get((int(jobs.workload[job]), cell), NO_NEEDS)
    if jobs.is_given()[job] and jobs.key_at(job) == cell:
        needs = tuple(int(amount[job]) for amount in amounts_of(jobs, GIVEN_PREFIX))
    return Demand(gpus=cell.gpus, **name_amounts(needs))
