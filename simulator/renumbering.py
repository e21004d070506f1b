"""Tables of jobs for a snapshot that has only some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tessera.formulation.base.tables import Ints
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.permissions import AllowedGpuTypes, AvoidedNodes
from tessera.formulation.state.reserved import Entitlements

_OfJobs = TypeVar("_OfJobs", AllowedGpuTypes, AvoidedNodes, Entitlements, ScheduleSegments)


def renumber_jobs(table: _OfJobs, local: Ints) -> _OfJobs:
    """Return the rows of the jobs in a snapshot, with their indices in it.

    ``local`` is int64[jobs], the index of each job in the snapshot, or -1.
    """
    if not len(table):
        return table
    shown = table.at(local[table.job] >= 0)
    return replace(shown, job=local[shown.job])
