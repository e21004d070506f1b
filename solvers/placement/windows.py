"""The nodes that windows of reservations and maintenance close to jobs."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from tessera.formulation.round.problem import Problem
from tessera.formulation.round.rates import work_left
from tessera.formulation.state.snapshot import Snapshot

_NOTHING: Final[frozenset[int]] = frozenset()


class ClosedWindows:
    """The nodes that windows close to each job. One in the future matters to columns that reach it."""

    def __init__(self, snapshot: Snapshot, problem: Problem) -> None:
        """Index the nodes by reservation, and the reservations by job."""
        self._snapshot, self._problem = snapshot, problem
        bars, own = snapshot.excluded_jobs, snapshot.reserved_nodes
        self._active: list[bool] = snapshot.reservations.are_active(snapshot.now_s).tolist()
        self._start_s: list[float] = snapshot.reservations.start_s.tolist()
        self._nodes = [
            frozenset(own.node[own.reservation == r].tolist()) for r in range(len(self._start_s))
        ]
        self._barred: defaultdict[int, list[int]] = defaultdict(list)
        for r, job in zip(
            bars.reservation[bars.by_node].tolist(), bars.job[bars.by_node].tolist(), strict=True
        ):
            self._barred[job].append(r)
        self._of_windows: dict[tuple[int, ...], frozenset[int]] = {}
        self._work = work_left(snapshot) if len(bars) else np.zeros(0)

    def closed(self, job: int, column: int) -> frozenset[int]:
        """Return the nodes that are closed to ``job`` with ``column``."""
        barred = self._barred.get(job)
        if not barred:
            return _NOTHING
        key = tuple([r for r in barred if self._active[r] or self._reaches(job, column, r)])
        if key not in self._of_windows:
            self._of_windows[key] = _NOTHING.union(*(self._nodes[r] for r in key))
        return self._of_windows[key]

    def _reaches(self, job: int, column: int, reservation: int) -> bool:
        """Return whether the job would still run on ``column`` when the window begins."""
        problem, jobs = self._problem, self._snapshot.jobs
        restart_s = 0.0 if int(problem.current[job]) == column else float(jobs.restart_s[job])
        lasts_s = float(self._work[job]) / float(problem.cells.rate[problem.cell[column]])
        return self._snapshot.now_s + restart_s + lasts_s > self._start_s[reservation]
