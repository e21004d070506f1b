"""The ways to start waiting jobs: their columns, and the nodes that they may run on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.tables import Ints, concatenate_ranges
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.rates import work_left
from tessera.formulation.round.starts.holds import holds_of
from tessera.formulation.round.starts.pools import Pools
from tessera.formulation.round.starts.timeline import StartShape, shape_of
from tessera.formulation.state.last_round import PlannedStarts


@dataclass(frozen=True, slots=True)
class StartWay:
    """A way to start a job: a column, its shape, and the time for which it runs there."""

    column: int
    shape: StartShape
    lasts_s: float


class WayFinder:
    """The ways to start the jobs of a draft, with what these take of limits on tenants and arrays."""

    def __init__(self, draft: Draft, pools: Pools) -> None:
        self._draft, self._jobs, self._pools = draft, draft.snapshot.jobs, pools
        self.models = _models_of_members(draft)
        """Member of an array without columns -> another one, whose columns it uses."""
        self._work = work_left(draft.snapshot)
        self._ways: dict[int, list[StartWay]] = {}

    def of_job(self, job: int) -> list[StartWay]:
        """Return the way to start a job as it asked, for each GPU type on which it has columns.

        If it has no column with its request's GPUs, it is the most GPUs below, or else the fewest above.
        """
        if job not in self._ways:
            self._ways[job] = self._find(job)
        return self._ways[job]

    def _find(self, job: int) -> list[StartWay]:
        draft = self._draft
        columns = np.array(draft.columns_of(self.models.get(job, job)), dtype=np.int64)
        types, gpus = draft.gpu_type[columns], draft.gpus[columns]
        request = int(self._jobs.requested_gpus[job])
        best = []
        for gpu_type in np.unique(types).tolist():
            rows = np.flatnonzero(types == gpu_type)
            smaller = rows[gpus[rows] <= request]
            count = int(gpus[smaller].max()) if len(smaller) else int(gpus[rows].min())
            candidates = columns[rows[gpus[rows] == count]]
            nodes = draft.cells.nodes[draft.cell[candidates]]
            compact = candidates[nodes == nodes.min()]
            best.append(int(compact[np.argmax(draft.rate[compact])]))
        ways = self.on_columns(np.array(best, dtype=np.int64))
        return [self.in_array(job, way) for way in ways]

    def in_array(self, job: int, way: StartWay) -> StartWay:
        """Return the way with its use of the limit of the job's array.

        If the way is another member's, it lasts as long as the job itself.
        """
        pool = self._pools.number_of_array.get(int(self._jobs.array[job]))
        if pool is None:
            return way
        lasts_s = way.lasts_s
        if job in self.models:
            lasts_s = float(self._work[job]) / float(self._draft.rate[way.column])
            lasts_s = min(lasts_s + self._jobs.restart_s[job], self._jobs.run_left_s[job])
        pools = (*way.shape.pools, (pool, 1))
        return StartWay(way.column, replace(way.shape, pools=pools), lasts_s)

    def on_columns(self, column: Ints) -> list[StartWay]:
        """Return the way to start on each of the columns (int64[any])."""
        draft, holds = self._draft, holds_of(self._draft, column)
        nodes = draft.cells.nodes[draft.cell[column]]
        facts = (column, draft.gpu_type[column], draft.gpus[column], nodes, holds.part_until_s)
        return [
            StartWay(
                c,
                replace(shape_of(gpu_type, gpus, spread), pools=uses),
                max(0.0, until_s - draft.snapshot.now_s),
            )
            for c, gpu_type, gpus, spread, until_s, uses in zip(
                *(f.tolist() for f in facts), self._pools.uses_of(column), strict=True
            )
        ]


def columns_of_starts(draft: Draft, starts: PlannedStarts) -> Ints:
    """Return the column of each planned start, int64[starts]. It is -1 if the round has none."""
    position, count = draft.job_start[starts.job], np.diff(draft.job_start)[starts.job]
    column, start = concatenate_ranges(position, count), np.repeat(np.arange(len(starts)), count)
    is_cell = np.ones(len(column), dtype=np.bool_)
    for name in starts.CELL:
        is_cell &= getattr(draft.cells, name)[draft.cell[column]] == getattr(starts, name)[start]
    column, start = column[is_cell], start[is_cell]
    order = np.lexsort((-draft.cells.nodes[draft.cell[column]], start))
    result = np.full(len(starts), -1, dtype=np.int64)
    result[start[order]] = column[order]  # the one on the fewest nodes is written last
    return result


def _models_of_members(draft: Draft) -> dict[int, int]:
    """Return, for members of arrays that only wait for other members to end, one with columns."""
    jobs = draft.snapshot.jobs
    if not (jobs.array >= 0).any():
        return {}
    waits = (jobs.array >= 0) & jobs.may_run() & ~draft.has_columns & (draft.weight > 0)
    waits &= ~jobs.among(ACTIVE) & (jobs.retry_s <= draft.snapshot.now_s)
    models: dict[tuple[int, int], int] = {}
    for job in np.flatnonzero((jobs.array >= 0) & draft.has_columns).tolist():
        models[int(jobs.array[job]), int(jobs.workload[job])] = job
    return {
        job: models[key]
        for job in np.flatnonzero(waits).tolist()
        if (key := (int(jobs.array[job]), int(jobs.workload[job]))) in models
    }
