"""Resource sensitivity curves (Morphling section 5.1).

A curve is the rate of a job's best execution plan at each number of GPUs and CPU cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from tessera.formulation.base.resources import amounts_of
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.promises.guarantee import ROUNDING


class Resource(IntEnum):
    """A resource that jobs take from each other, in the order of Algorithm 1, line 9."""

    GPUS = 0
    CPUS = 1


class CurvePoint(NamedTuple):
    """The least resources at which a job reaches a rate, in shares of its reference rate."""

    held: tuple[int, int]  # GPUs and CPU cores
    other_needs: tuple[int, ...]  # amounts of the other host resources, e.g. bytes of host memory
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

    def gain(self, at: int, to: int, resource: Resource) -> float:
        """Return the slope from position ``at`` to ``to``: the change of rate per unit of ``resource``.

        It is 0 if the step takes no more of the resource.
        """
        takes = self.held(to)[resource] - self.held(at)[resource]
        return (self.worth(to) - self.worth(at)) / takes if takes > 0 else 0.0

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


def trace_points(
    draft: Draft, columns: Ints, reference: float, current: int = -1
) -> tuple[CurvePoint, ...]:
    """Return the points of a curve, of ``columns`` (int64[any]) of one job on one GPU type.

    Rates are shares of ``reference`` (samples/s). The column ``current`` is always a point.
    """
    demand = draft.demand
    every = [
        CurvePoint((gpus, cpus), tuple(other_needs), rate / reference, column)
        for rate, column, gpus, cpus, *other_needs in zip(
            draft.rate[columns].tolist(),
            columns.tolist(),
            demand.gpus[columns].tolist(),
            *(needs[columns].tolist() for needs in amounts_of(demand)),
            strict=True,
        )
    ]
    every.sort(key=lambda p: (p.held, p.column != current, -p.rate, p.other_needs))
    return tuple(_undominated(every, current))


def reaches(point: CurvePoint, target: float) -> bool:
    """Return whether a point is as fast as ``target``, a share of the reference rate."""
    return point.rate >= target * (1 - ROUNDING)


def find_minimum(
    points: Sequence[CurvePoint], most_gpus: float, most_cpus: float, target: float
) -> int:
    """Return the position of the minimum demand (minRes, section 5.2), or -1 without one.

    It has the fewest GPUs, then the fewest CPU cores, then the least host memory, of the points as
    fast as ``target`` within ``most_gpus`` and ``most_cpus``.
    """
    reach = [
        k
        for k, point in enumerate(points)
        if point.held[0] <= most_gpus and point.held[1] <= most_cpus and reaches(point, target)
    ]
    return min(reach, key=lambda k: (points[k].held, points[k].other_needs), default=-1)


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
