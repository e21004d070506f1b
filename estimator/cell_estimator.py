"""The estimator of Cells, from models, GPU types and measurements, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.calibration import Calibration, Estimate, Measurement, Subject
from tessera.estimator.cells import (
    Setting,
    data_sheet_setting,
    degrees_of,
    execution_plan_of,
    plan_cells,
)
from tessera.estimator.hardware import Hardware
from tessera.estimator.measured_cells import measured_cells
from tessera.estimator.memory import States, memory_without
from tessera.estimator.models import Model
from tessera.estimator.plans import PricedPlan, Shape, shape_on, shapes_of
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.profiling.tasks import Profile
from tessera.estimator.profiling.totals import ProfiledTotals
from tessera.estimator.times import CellTimes
from tessera.estimator.traffic import traffic_of
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan, model_name
from tessera.formulation.records.estimates import EstimateRecord, MeasurementRecord
from tessera.formulation.values import Cell, EstimateSource, Workload

MAX_LEARNED: Final = 64
"""Largest number of measured Cells in a calibration. The latest ones are used. Each takes some
tenths of a second."""

MAX_PROVENANCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSubject(Subject):
    """A Cell as a calibration subject. Its plan is the best of its pipeline degree."""

    workload: Workload
    pipeline_degree: int
    shape: Shape
    memory_bytes: int | None = None  # of a GPU; None for that of the GPU type


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEstimate:
    """An estimate with its priced plan. If nothing fits, the plan is None."""

    record: EstimateRecord
    plan: PricedPlan | None


class Estimator:
    """An estimator of the Cells of some models on a cluster's GPU types.

    Measurements from the cluster correct its estimates.
    """

    def __init__(
        self,
        hardware: Mapping[str, Hardware],
        models: Mapping[Workload, Model],
        measurements: Sequence[MeasurementRecord] = (),
    ) -> None:
        """Learn from the measured Cells, which takes some tenths of a second for each.

        Cells of other models and GPU types are left out.
        """
        self.hardware, self._models = hardware, dict(models)
        times = CellTimes(self._setting, _degrees)
        learned = self._measurements(measurements)
        self._calibration = Calibration(times, learned)
        self.learned = len(learned)

    def cells(
        self,
        workload: Workload,
        gpu_type: str,
        gpus: int,
        degrees: Sequence[int] | None = None,
        cancelled: Callable[[], bool] = never_cancelled,
        *,
        nodes: int | None = None,
        exhausted: Collection[Cell] = (),
    ) -> list[CellEstimate]:
        """Return the Cell of each shape and pipeline degree, whether or not it fits.

        Shapes are those of :func:`tessera.estimator.plans.shapes_of` on up to ``nodes`` nodes. If
        ``degrees`` is None, they are 1, 2, 4 ... up to the number of GPUs. ``exhausted`` are Cells
        on shapes by execution plans that ran out of memory, although they should have fitted. In
        their place, the best plan that needs less memory is returned.

        Raises:
            DeadlineTooShort: it was cancelled.
        """
        wanted = sorted({d for d in degrees or degrees_of(gpus) if d <= gpus})
        shapes = shapes_of(gpus, self.hardware[gpu_type].gpus_per_node, nodes) if wanted else []
        return [
            estimate
            for shape in shapes
            for estimate in self._cells_on(workload, gpu_type, shape, wanted, cancelled, exhausted)
        ]

    def _cells_on(
        self,
        workload: Workload,
        gpu_type: str,
        shape: Shape,
        wanted: Sequence[int],
        cancelled: Callable[[], bool],
        exhausted: Collection[Cell],
    ) -> list[CellEstimate]:
        """Return the Cell of each wanted pipeline degree on a shape."""
        of_degree = {
            d: Cell(gpu_type=gpu_type, gpus=shape.gpus, pipeline_degree=d, nodes=shape.nodes)
            for d in wanted
        }
        subjects = {d: self._subject(workload, cell, shape) for d, cell in of_degree.items()}
        setting = self._setting(next(iter(subjects.values())))
        plans = plan_cells(setting, wanted, cancelled=cancelled)
        left_out = {
            degree: {other.plan for other in exhausted if replace(other, plan="") == cell}
            for degree, cell in of_degree.items()
        }
        for degree in [d for d in plans if left_out[d]]:
            best, names = plans.pop(degree), left_out[degree]
            subjects[degree], plan = self._next_plan(subjects[degree], best, names, cancelled)
            plans |= {} if plan is None else {degree: plan}
        times = self._calibration.estimates([subjects[degree] for degree in plans])
        by_degree = dict(zip(plans, times, strict=True))
        return [
            self._estimate(
                workload, of_degree[d], setting, plans.get(d), by_degree.get(d), len(left_out[d])
            )
            for d in wanted
        ]

    def _estimate(
        self,
        workload: Workload,
        cell: Cell,
        setting: Setting,
        plan: PricedPlan | None,
        time: Estimate | None,
        left_out: int,
    ) -> CellEstimate:
        """Return the estimate of a Cell by its plan and time, which are None if nothing fits.

        ``left_out`` is the number of plans that ran out of memory.
        """
        profile = self._models[workload].profiles.get(cell.gpu_type)
        record = EstimateRecord(
            workload=workload,
            cell=cell,
            source=EstimateSource.PROFILED if profile else EstimateSource.ANALYTIC,
            iter_time_s=math.inf,
            provenance=self._provenance(None, profile, left_out),
        )
        if plan is None or time is None:
            return CellEstimate(record=record, plan=None)
        execution = execution_plan_of(setting, plan, model_name(workload))
        record = replace(
            record.with_plan(execution),
            iter_time_s=time.iter_time_s,
            sd=time.sd,
            provenance=self._provenance(execution, profile, left_out),
            traffic=traffic_of(setting, plan),
        )
        return CellEstimate(record=record, plan=plan)

    def _next_plan(
        self,
        subject: CellSubject,
        plan: PricedPlan,
        exhausted: Container[str],
        cancelled: Callable[[], bool],
    ) -> tuple[CellSubject, PricedPlan | None]:
        """Return the best plan that is not ``exhausted`` (digests), and the subject with its memory.

        A plan that ran out of memory needs more than the model predicts. So each search leaves out
        all plans for which it predicts as much or more. The plan is None if no other one fits.
        """
        setting, found = self._setting(subject), plan
        model, degree = model_name(subject.workload), subject.pipeline_degree
        while execution_plan_of(setting, found, model).digest in exhausted:
            most = memory_without(max(found.memory_bytes), setting.runtime.room)
            subject = replace(subject, memory_bytes=most)
            others = plan_cells(self._setting(subject), [degree], cancelled=cancelled)
            if degree not in others:
                return subject, None
            found = others[degree]
        return subject, found

    def knows(self, workload: Workload) -> bool:
        """Return whether a workload's Cells can be estimated."""
        return workload in self._models

    def know(self, workload: Workload, model: Model) -> None:
        """Add a model whose Cells are also to be estimated.

        No measurements of the model must be among those that the estimator has learned from.
        """
        self._models[workload] = model

    def _provenance(
        self, plan: ExecutionPlan | None, profile: Profile | None, left_out: int
    ) -> str:
        how = "analytic"
        if profile is not None:
            how = f"profiled on {profile.device}, {profile.date}, {profile.records} records"
        if self.learned:
            how += f", calibrated on {self.learned} measurements"
        if left_out:
            how += f", {left_out} {'plan' if left_out == 1 else 'plans'} ran out of memory here"
        if plan is None:
            return f"{how}: no plan fits in memory"
        return f"{how}: {plan}"[:MAX_PROVENANCE]

    def _subject(self, workload: Workload, cell: Cell, shape: Shape) -> CellSubject:
        return CellSubject(
            family=workload.model,
            gpu_type=cell.gpu_type,
            nodes=shape.nodes,
            gpus_per_node=shape.gpus_per_node,
            global_batch=workload.global_batch,
            parameters=self._models[workload].graph.parameters,
            workload=workload,
            pipeline_degree=cell.pipeline_degree,
            shape=shape,
        )

    def setting(self, workload: Workload, cell: Cell, shape: Shape) -> Setting:
        """Return the setting in which a workload's Cell is estimated on a shape."""
        return self._setting(self._subject(workload, cell, shape))

    def _setting(self, subject: Subject) -> Setting:
        if not isinstance(subject, CellSubject):
            raise AssertionError("every subject here is a Cell")
        model, hardware = self._models[subject.workload], self.hardware[subject.gpu_type]
        if subject.memory_bytes is not None:
            hardware = replace(hardware, memory_bytes=subject.memory_bytes)
        training = model.training.at(subject.global_batch)
        setting = data_sheet_setting(
            model.graph, training, hardware, subject.shape, States(zero=model.zero)
        )
        profile = model.profiles.get(subject.gpu_type)
        if profile is None:
            return setting
        timed = ProfiledTotals(points=profile.points, fallback=setting.compute)
        return replace(setting, compute=timed, timed=True)

    def _measurements(self, measurements: Sequence[MeasurementRecord]) -> list[Measurement]:
        """Return one measurement for each Cell that the time model covers."""
        measured = list[Measurement]()
        for r in measured_cells(measurements):
            cell = r.cell
            if r.workload not in self._models or cell.gpu_type not in self.hardware:
                continue
            shape = shape_on(cell.gpus, cell.nodes, self.hardware[cell.gpu_type].gpus_per_node)
            if shape is None or cell.pipeline_degree < 1:
                continue
            subject = self._subject(r.workload, cell, shape)
            ratio = self._best_to(subject, r.plan)
            if ratio is not None:
                measured.append(Measurement(subject=subject, iter_time_s=ratio * r.iter_time_s))
        return measured[-MAX_LEARNED:]

    def _best_to(self, subject: CellSubject, plan: ExecutionPlan | None) -> float | None:
        """Return the time of the best plan of a Cell, as a multiple of that of the measured ``plan``.

        The cost model predicts both times. The multiple is 1 if it is the same plan, or if the
        measured one was not recorded. It is None if one of them has no time.
        """
        if plan is None:
            return 1.0
        setting, degree = self._setting(subject), subject.pipeline_degree
        best = plan_cells(setting, [degree]).get(degree)
        if best is None:
            return None
        here = replace(plan, shape=setting.shape.each_node)
        if execution_plan_of(setting, best, plan.model) == here:
            return 1.0
        try:
            return best.iter_time_s / price_plan(setting, here).iter_time_s
        except InvalidInput:
            return None


def _degrees(subject: Subject) -> Sequence[int]:
    if not isinstance(subject, CellSubject):
        raise AssertionError("every subject here is a Cell")
    return [subject.pipeline_degree]
