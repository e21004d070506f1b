"""Resource sensitivity curves (Morphling section 5.1).

A curve is the rate of a job's best execution plan at each number of GPUs and CPU cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tessera.formulation.promises.guarantee import ROUNDING
from tessera.formulation.promises.launched import is_launched
from tessera.formulation.tables import Bools, Ints
from tessera.solvers.schedulers.base import SchedulerView


class Resource(IntEnum):
    """A resource that jobs take from each other, in the order of Algorithm 1, line 9."""

    GPUS = 0
    CPUS = 1


class CurvePoint(NamedTuple):
    """The least resources at which a job reaches a rate, in shares of its reference rate."""

    held: tuple[int, int]  # GPUs and CPU cores
    host_bytes: int
    rate: float
    column: int  # of the draft


class StepDown(NamedTuple):
    """A step of a job to fewer resources, and its loss of rate for each unit."""

    to: int
    slope: float


NO_STEP_DOWN = StepDown(-1, float("inf"))
_NOTHING = (0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class SensitivityCurve:
    """The points of one job on one type at which its rate rises, and the point that it runs at.

    No point needs as many GPUs and CPU cores as another, and is no faster. Between points the curve
    is flat: no execution plan runs there, or none is faster. A position is an index of ``points``;
    -1 means no GPUs. Points are sorted by GPUs, then by CPU cores.
    """

    gpu_type: int
    points: tuple[CurvePoint, ...]
    start: int  # the present position; -1 if the job has no GPUs of this type
    minimum: int  # position of the least demand that it is owed; -1 for best-effort jobs
    enough: tuple[bool, ...]  # whether it may end at each position
    possible: bool = True  # false if the job is guaranteed, and has no Cell within its request

    def held(self, at: int) -> tuple[int, int]:
        """Return the GPUs and CPU cores at position ``at``."""
        return self.points[at].held if at >= 0 else _NOTHING

    def worth(self, at: int) -> float:
        """Return the rate at position ``at``, in shares of the reference rate."""
        return self.points[at].rate if at >= 0 else 0.0

    def may_end(self, at: int) -> bool:
        """Return whether the job has all that it is owed at position ``at``."""
        return self.enough[at] if at >= 0 else self.minimum < 0

    def step_up(self, at: int, resource: Resource, idle_cpus: float) -> int:
        """Return the next position with more of ``resource`` that is faster, or -1.

        It needs no more of the other resource than the job holds, and ``idle_cpus`` for a step to
        more GPUs. A job below its minimum steps to the minimum.
        """
        if not self.may_end(at):
            return self.minimum
        (gpus, cpus), worth = self.held(at), self.worth(at)
        most = cpus + idle_cpus
        best, least, rate = -1, 0, 0.0
        for k, point in enumerate(self.points):
            if point.rate <= worth or not self.enough[k]:
                continue
            if resource is Resource.GPUS:
                within, amount = point.held[0] > gpus and point.held[1] <= most, point.held[0]
            else:
                within, amount = point.held[0] <= gpus and point.held[1] > cpus, point.held[1]
            if within and (best < 0 or (amount, -point.rate) < (least, -rate)):
                best, least, rate = k, amount, point.rate
        return best

    def step_down(self, at: int, resource: Resource) -> StepDown:
        """Return the step to the most of ``resource`` below what the job holds, and no more of another.

        A best-effort job may step down to nothing. ``NO_STEP_DOWN`` means that there is no step.
        """
        return self._steps_down[resource][at] if at >= 0 else NO_STEP_DOWN

    @cached_property
    def _steps_down(self) -> tuple[tuple[StepDown, ...], ...]:
        return tuple(
            tuple(self._find_step_down(at, resource) for at in range(len(self.points)))
            for resource in Resource
        )

    def _find_step_down(self, at: int, resource: Resource) -> StepDown:
        here = self.points[at]
        lower = [
            (point.held[resource], point.rate, k)
            for k, point in enumerate(self.points)
            if self.enough[k]
            and point.held[resource] < here.held[resource]
            and point.held[1 - resource] <= here.held[1 - resource]
        ]
        if lower:
            left, rate, to = max(lower)
            return StepDown(to, (here.rate - rate) / (here.held[resource] - left))
        if self.minimum >= 0 or not here.held[resource]:
            return NO_STEP_DOWN
        return StepDown(-1, here.rate / here.held[resource])


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
        wanted = int(jobs.requested_type[job])
        if wanted in offered:
            return wanted

        def steepness(t: int) -> tuple[bool, float, int]:
            first = columns[kind == t][0]
            gpus = int(self._draft.gpus[first])
            return gpus <= self._free[t], float(self._draft.rate[first]) / gpus, -t

        return max(offered, key=steepness)

    def _points(self, job: int, columns: Ints, current: int) -> tuple[CurvePoint, ...]:
        reference = float(self._draft.requested_rate[job])
        every = [
            CurvePoint((gpus, cpus), host_bytes, rate / reference, column)
            for gpus, cpus, host_bytes, rate, column in zip(
                self._demand.gpus[columns].tolist(),
                self._demand.cpus[columns].tolist(),
                self._demand.host_bytes[columns].tolist(),
                self._draft.rate[columns].tolist(),
                columns.tolist(),
                strict=True,
            )
        ]
        every.sort(key=lambda p: (p.held, p.column != current, -p.rate, p.host_bytes))
        return tuple(_undominated(every, current))

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
        reach = [k for k in within if points[k].rate >= target * (1 - ROUNDING)]
        if reach:
            minimum = min(reach, key=lambda k: (points[k].held, points[k].host_bytes))
            least = points[minimum].held[0]
            enough = tuple(p.rate >= target * (1 - ROUNDING) and p.held[0] >= least for p in points)
            return minimum, enough, True
        if start >= 0:
            return 0, (True,) * len(points), True
        return -1, (True,) * len(points), False


def _undominated(every: Iterable[CurvePoint], current: int) -> list[CurvePoint]:
    """Return the points that are faster than all others with as little, and the current one.

    ``every`` is sorted by GPUs, then by CPU cores.
    """
    kept: list[CurvePoint] = []
    for point in every:
        beaten = any(p.held[1] <= point.held[1] and p.rate >= point.rate for p in kept)
        if not beaten or point.column == current:
            kept.append(point)
    return kept
