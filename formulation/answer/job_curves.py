"""The sensitivity curves of one job, for people: GPUs, CPU cores, host memory, shapes.

Points, slopes and minima are those of ``formulation.answer.sensitivity``, which schedulers use, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

import numpy as np

from tessera.formulation.answer.sensitivity import (
    Resource,
    SensitivityCurve,
    find_minimum,
    trace_points,
)
from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.formulation.base.resources import Demand, amounts_of, name_amounts
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.columns import draft_of_shapes
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.promises import PHYSICAL
from tessera.formulation.round.promises.guarantee import request_rate
from tessera.formulation.state.cells import most_compact_by_job
from tessera.formulation.state.runnable_plans import offer_runnable_plans
from tessera.formulation.state.snapshot import Snapshot

IDLE_CPUS: Final = math.inf
"""CPU cores that are idle for a step to more GPUs: a job's curve does not know what others hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCell:
    """A Cell on a shape that a job may run on."""

    gpu_type: int  # index into Snapshot.gpu_types
    demand: Demand
    nodes: int
    pipeline_degree: int
    plan: int  # index into Snapshot.plans
    rate: float  # samples/s


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveStep:
    """The best that a job can do with an amount of a resource."""

    amount: int  # GPUs, CPU cores or bytes of host memory
    cell: CurveCell  # the fastest with exactly this amount
    best_rate: float  # samples/s of the fastest with this amount or less
    gain: float
    """Slope from ``cell`` to the next amount with a faster Cell, samples/s per GPU or CPU core.

    It is 0 if no Cell is faster, and for host memory, for which schedulers compute no slope.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeCurves:
    """The curves of a job on a GPU type. All but ``gpus`` are for ``at_gpus`` GPUs.

    ``host`` has the steps of each host resource, by name. They are empty if the estimates there state
    no need. ``minimum`` is the minimum demand: the least with which the job is as fast as guaranteed.
    It is None if the job cannot be.
    """

    gpu_type: int
    gpus: tuple[CurveStep, ...]
    at_gpus: int
    host: Mapping[str, tuple[CurveStep, ...]]
    shapes: tuple[CurveCell, ...]  # the fastest Cell on each number of nodes
    cells: tuple[CurveCell, ...]  # every Cell on every shape
    minimum: CurveCell | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCurves:
    """The sensitivity curves of a job. Rates are in samples/s.

    ``reference_rate`` is the best of its request (Eq. 6c), by which schedulers divide slopes.
    ``guaranteed_rate`` is what the job is owed if it is guaranteed (Eq. 32), or NaN if no Cell
    matches its request.
    """

    types: tuple[TypeCurves, ...]
    reference_rate: float
    guaranteed_rate: float
    current: CurveCell | None  # where the job runs now


def curves_of_job(snapshot: Snapshot, policy: Policy, gpus: int = 0) -> JobCurves:
    """Return the curves of the only job of ``snapshot`` (see ``focus_on``).

    Curves of other resources are for ``gpus`` GPUs. If it is 0, they are for as many as the job
    holds or else requests, or for the nearest number below or above that a type has Cells for.

    Raises:
        InvalidInput: the job may not run on ``gpus`` GPUs of any type.
        NotAllowed: the job has no Cell that it may run on.
    """
    draft = _possible(snapshot, policy)
    if not len(draft.cell):
        raise _no_curve(draft)
    if gpus and gpus not in draft.gpus:
        known = ", ".join(str(n) for n in np.unique(draft.gpus).tolist())
        raise InvalidInput("gpus", f"the job has no Cell of {gpus} GPUs; it has those of {known}")
    found = _Curves(draft)
    held, jobs = int(draft.current[0]), draft.snapshot.jobs
    wanted = gpus or (int(draft.gpus[held]) if held >= 0 else int(jobs.requested_gpus[0]))
    types = np.unique(draft.gpu_type[draft.gpus == gpus] if gpus else draft.gpu_type)
    nodes = int(draft.snapshot.nodes_owned()[0])
    return JobCurves(
        types=tuple(found.of_type(gpu_type, wanted) for gpu_type in types.tolist()),
        reference_rate=found.reference,
        guaranteed_rate=found.guaranteed,
        current=None if held < 0 else found.cell(held, nodes),
    )


def _possible(snapshot: Snapshot, policy: Policy) -> Draft:
    """Return the columns that a round may give the job, as if it had all nodes for it alone."""
    draft = draft_of_shapes(offer_runnable_plans(snapshot), policy)
    for rule in PHYSICAL:
        draft = rule(draft)
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    for use in draft.rows:
        keep[use.column[use.amount > use.row.capacity]] = False
    return draft.only(keep)


def _no_curve(draft: Draft) -> NotAllowed:
    snapshot = draft.snapshot
    key = snapshot.workloads[int(snapshot.jobs.workload[0])].key
    if (reason := draft.absent.get(0)) is not None:
        return NotAllowed(f"{reason.message}; {reason.next_step}")
    if not len(snapshot.estimates):
        return NotAllowed(
            f"{key} has no estimates, so nothing is known of its sensitivity; wait until it is"
            " estimated or measured, or add Cells of it"
        )
    return NotAllowed(
        f"no Cell of {key} fits the schedulable nodes of the cluster; bring nodes back, or add Cells"
        " of fewer GPUs"
    )


class _Curves:
    """The facts of the job's columns that curves are built from."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self._demand = draft, draft.demand
        self.reference = float(draft.requested_rate[0])
        jobs = replace(draft.snapshot.jobs, guaranteed=np.ones(1, np.bool_))
        as_guaranteed = replace(draft, snapshot=replace(draft.snapshot, jobs=jobs))
        self.guaranteed = float(request_rate(as_guaranteed)[0])

    def cell(self, column: int, nodes: int = 0) -> CurveCell:
        """Return the Cell of a column, on ``nodes`` nodes if it is not 0."""
        cells, row = self._draft.cells, int(self._draft.cell[column])
        return CurveCell(
            gpu_type=int(cells.gpu_type[row]),
            demand=self._demand.of(column),
            nodes=nodes or int(cells.nodes[row]),
            pipeline_degree=int(cells.pipeline_degree[row]),
            plan=int(cells.plan[row]),
            rate=cells.rate_on(row, nodes) if nodes else float(cells.rate[row]),
        )

    def of_type(self, gpu_type: int, wanted: int) -> TypeCurves:
        """Return the curves on a type, for ``wanted`` GPUs where the number matters."""
        draft = self._draft
        columns = np.flatnonzero(draft.gpu_type == gpu_type)
        own = most_compact_by_job(draft.cells, draft.cell[columns], draft.job[columns])
        compact = columns[own]
        counts = np.unique(draft.gpus[columns])
        at_gpus = int(max(counts[counts <= wanted], default=counts[0]))
        here, all_here = (some[draft.gpus[some] == at_gpus] for some in (compact, columns))
        d = self._demand
        return TypeCurves(
            gpu_type=gpu_type,
            gpus=self._steps(compact, d.gpus, Resource.GPUS),
            at_gpus=at_gpus,
            host=name_amounts(
                self._steps(here, needs, resource) if needs[here].any() else ()
                for needs, resource in zip_longest(amounts_of(d), (Resource.CPUS,))
            ),
            shapes=tuple(
                self.cell(column)
                for column in self._fastest(all_here, draft.cells.nodes[draft.cell[all_here]])
            ),
            cells=tuple(self.cell(column) for column in all_here.tolist()),
            minimum=self._minimum(compact),
        )

    def _steps(self, columns: Ints, amounts: Ints, by: Resource | None) -> tuple[CurveStep, ...]:
        """Return the steps of a resource, of ``amounts`` (int64[columns of the draft])."""
        steps, best = [], 0.0
        for column in self._fastest(columns, amounts[columns]):
            cell = self.cell(column)
            best = max(best, cell.rate)
            gain = 0.0 if by is None else self._gain(columns, column, by)
            steps.append(
                CurveStep(amount=int(amounts[column]), cell=cell, best_rate=best, gain=gain)
            )
        return tuple(steps)

    def _gain(self, columns: Ints, column: int, resource: Resource) -> float:
        """Return the slope of the step up that a scheduler sees for a job on ``column``."""
        points = trace_points(self._draft, columns, self.reference, column)
        curve = SensitivityCurve(
            gpu_type=int(self._draft.gpu_type[column]),
            points=points,
            start=next(k for k, point in enumerate(points) if point.column == column),
            minimum=-1,
            enough=(True,) * len(points),
        )
        to = curve.step_up(curve.start, resource, IDLE_CPUS)
        return curve.gain(curve.start, to, resource) * self.reference if to >= 0 else 0.0

    def _fastest(self, columns: Ints, amounts: Ints) -> list[int]:
        """Return the fastest column of each amount (int64[columns]), by rising amount.

        Of equally fast ones, it is that with the least demand.
        """
        d = self._demand
        keys = (*(needs[columns] for needs in reversed(amounts_of(d))), d.gpus[columns])
        order = np.lexsort((*keys, -self._draft.rate[columns], amounts))
        _, first = np.unique(amounts[order], return_index=True)
        fastest: list[int] = columns[order[first]].tolist()
        return fastest

    def _minimum(self, columns: Ints) -> CurveCell | None:
        """Return the minimum demand on the type of ``columns`` (Morphling section 5.2)."""
        if math.isnan(self.guaranteed):
            return None
        jobs = self._draft.snapshot.jobs
        points = trace_points(self._draft, columns, self.reference)
        target = self.guaranteed / self.reference
        at = find_minimum(points, int(jobs.requested_gpus[0]), self._most_cpus(), target)
        return self.cell(points[at].column) if at >= 0 else None

    def _most_cpus(self) -> float:
        """Return the CPU cores of the request, or those that the submitted plan needs on it."""
        draft, jobs = self._draft, self._draft.snapshot.jobs
        stated, plan = int(jobs.requested_cpus[0]), int(jobs.submitted_plan[0])
        wanted = int(jobs.requested_gpu_type[0])
        asked: Sequence[int] = self._demand.cpus[
            (draft.gpus == jobs.requested_gpus[0])
            & (draft.cells.plan[draft.cell] == plan)
            & ((wanted < 0) | (draft.gpu_type == wanted))
        ].tolist()
        if plan >= 0 and asked:
            return max(stated, *asked)
        return stated or math.inf
