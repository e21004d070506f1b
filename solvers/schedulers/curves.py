"""The resource sensitivity curves of a round's jobs, as Morphling's scheduler climbs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.formulation.answer.sensitivity import (
    CurvePoint,
    SensitivityCurve,
    find_minimum,
    reaches,
    trace_points,
)
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.promises.launched import is_launched
from tessera.solvers.schedulers.base import SchedulerView


def curves_of(seen: SchedulerView, allowed: Bools) -> dict[int, SensitivityCurve]:
    """Return the curve of each job on the type that it shall use, from the columns ``allowed``.

    ``allowed`` is bool[columns]. ``Morphling`` describes the choice of the type. A job without such
    a column has no curve.
    """
    draft, columns = seen.draft, np.flatnonzero(allowed)
    starts = np.searchsorted(draft.job[columns], np.arange(len(draft.current) + 1))
    builder = _CurveBuilder(seen)
    curves = {}
    for job, (first, last) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ):
        if first < last:
            curves[job] = builder.build(job, columns[first:last])
    return curves


class _CurveBuilder:
    """The facts of jobs and columns that curves are built from."""

    def __init__(self, seen: SchedulerView) -> None:
        draft, jobs = seen.draft, seen.draft.snapshot.jobs
        self._draft, self._free = draft, seen.capacity.tolist()
        self._runs = (is_launched(draft.snapshot) & (jobs.current_gpus > 0)).tolist()
        self._demand = draft.demand
        self._plan = draft.cells.plan[draft.cell]

    def build(self, job: int, columns: Ints) -> SensitivityCurve:
        """Return the curve of ``job``, of its ``columns`` (int64[any], at least one)."""
        kind = self._draft.gpu_type[columns]
        gpu_type = self._type_of(job, columns, kind)
        current = self._current(job, columns)
        points = self._points(job, columns[kind == gpu_type], current)
        start = next((k for k, p in enumerate(points) if p.column == current), -1)
        minimum, enough, possible = -1, (True,) * len(points), True
        if self._draft.snapshot.jobs.guaranteed[job]:
            minimum, enough, possible = self._owed(job, columns[kind == gpu_type], points, start)
        return SensitivityCurve(
            gpu_type=gpu_type,
            points=points,
            start=start,
            minimum=minimum,
            enough=enough,
            possible=possible,
        )

    def _current(self, job: int, columns: Ints) -> int:
        """Return the column of ``columns`` that the job holds now, or -1."""
        if not self._runs[job]:
            return -1
        current, jobs = int(self._draft.current[job]), self._draft.snapshot.jobs
        if current >= 0:
            return current
        same = self._draft.gpu_type[columns] == jobs.current_type[job]
        same &= self._draft.gpus[columns] == jobs.current_gpus[job]
        return int(columns[same][0]) if same.any() else -1  # the fastest comes first

    def _type_of(self, job: int, columns: Ints, kind: Ints) -> int:
        jobs = self._draft.snapshot.jobs
        offered: set[int] = set(kind.tolist())
        current = self._current(job, columns)
        if current >= 0:
            return int(self._draft.gpu_type[current])
        wanted = int(jobs.requested_gpu_type[job])
        if wanted in offered:
            return wanted

        def steepness(t: int) -> tuple[bool, float, int]:
            first = columns[kind == t][0]
            gpus = int(self._draft.gpus[first])
            return gpus <= self._free[t], float(self._draft.rate[first]) / gpus, -t

        return max(offered, key=steepness)

    def _points(self, job: int, columns: Ints, current: int) -> tuple[CurvePoint, ...]:
        reference = float(self._draft.requested_rate[job])
        return trace_points(self._draft, columns, reference, current)

    def _owed(
        self, job: int, columns: Ints, points: Sequence[CurvePoint], start: int
    ) -> tuple[int, tuple[bool, ...], bool]:
        """Return (minimum, enough, possible) of a guaranteed job (minRes, section 5.2)."""
        jobs = self._draft.snapshot.jobs
        most_gpus = int(jobs.requested_gpus[job])
        most_cpus, target = float(jobs.requested_cpus[job] or np.inf), 0.0
        gpus, plan = self._draft.gpus[columns], int(jobs.submitted_plan[job])
        asked = columns[(gpus == most_gpus) & (self._plan[columns] == plan) & (plan >= 0)]
        if len(asked):  # the fastest comes first
            target = float(self._draft.rate[asked[0]]) / float(self._draft.requested_rate[job])
            own_cpus = int(self._demand.cpus[asked[0]])
            most_cpus = max(own_cpus, int(jobs.requested_cpus[job]))
        within = [
            k for k, p in enumerate(points) if p.held[0] <= most_gpus and p.held[1] <= most_cpus
        ]
        if not len(asked):
            target = max((points[k].rate for k in within), default=0.0)
        minimum = find_minimum(points, most_gpus, most_cpus, target)
        if minimum >= 0:
            least = points[minimum].held[0]
            enough = tuple(reaches(p, target) and p.held[0] >= least for p in points)
            return minimum, enough, True
        if start >= 0:
            return 0, (True,) * len(points), True
        return -1, (True,) * len(points), False
