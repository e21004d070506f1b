"""The estimator of Cells, from models, GPU types and measurements, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from tessera.estimator.calibration import Calibration, Measurement, Subject
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.hardware import Hardware
from tessera.estimator.measured_cells import measured_cells
from tessera.estimator.memory import States
from tessera.estimator.models import Model
from tessera.estimator.plan_search import OPEN, PlanSearch
from tessera.estimator.plans import Shape, shape_of, shape_on, shapes_of
from tessera.estimator.pricing.price import PlanPrice, graph_in, plan_costs
from tessera.estimator.profiling.totals import ProfiledTotals
from tessera.estimator.times import PlanTimes
from tessera.estimator.traffic import traffic_of
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import Capacity, amounts_of, name_amounts
from tessera.formulation.base.values import BEST_FOUND, Cell, EstimateSource, Workload
from tessera.formulation.job.execution_plan import ExecutionPlan, model_name
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.estimates import (
    BEST_PLAN_NOTE,
    EstimateRecord,
    MeasurementRecord,
)

MAX_LEARNED: Final = 64
"""Largest number of measured Cells in a calibration. The latest ones are used."""

MAX_SETTINGS: Final = 256
"""Largest number of settings that are kept, so that the costs of plans in them are found again."""

MAX_PROVENANCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSubject(Subject):
    """A Cell's plan as a calibration subject."""

    workload: Workload
    shape: Shape
    plan: ExecutionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEstimate:
    """An estimate with its priced plan. If nothing fits, the price is None."""

    record: EstimateRecord
    price: PlanPrice | None


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
        """Learn from the measured Cells, which takes some hundredths of a second for each.

        Cells of other models and GPU types are left out.
        """
        self.hardware, self._models = hardware, dict(models)
        self._settings: dict[tuple[Workload, str, Shape], Setting] = {}
        self._misfits = set[tuple[Workload, Cell]]()
        learned = self._measurements(measurements)
        self._calibration = Calibration(PlanTimes(self._plan_of), learned)
        self.learned = len(learned)

    def cells(
        self,
        workload: Workload,
        gpu_type: str,
        gpus: int,
        degrees: Collection[int] | None = None,
        cancelled: Callable[[], bool] = never_cancelled,
        *,
        nodes: int | None = None,
        exhausted: Collection[Cell] = (),
        limits: PlanLimits = OPEN,
        node: Capacity | None = None,
    ) -> list[CellEstimate]:
        """Return the best Cells within limits on each shape, whether or not they fit.

        Shapes are those of :func:`tessera.estimator.plans.shapes_of` on up to ``nodes`` nodes. If
        the limits allow every plan, there is a Cell for each pipeline degree, and otherwise the best
        one. Where slower plans need less of the hosts of a ``node``, there are Cells of these, too.
        If ``degrees`` is None, all possible ones are searched. ``exhausted`` are Cells on shapes by
        execution plans that ran out of memory, although they should have fitted. In their place,
        the best plan that needs less memory is returned.

        Raises:
            DeadlineTooShort: it was cancelled.
        """
        shapes = shapes_of(gpus, self.hardware[gpu_type].gpus_per_node, nodes)
        found = list[CellEstimate]()
        for shape in shapes:
            setting = self.setting(workload, gpu_type, shape)
            names = {
                c.plan
                for c in exhausted
                if (c.gpu_type, c.gpus, c.nodes) == (gpu_type, gpus, shape.nodes)
            }
            search = partial(
                PlanSearch,
                limits=limits,
                model=model_name(workload),
                degrees=degrees,
                exhausted_digests=names,
                node=node,
                is_cancelled=cancelled,
            )
            best = search(setting)
            prices = _best_prices(best, limits)
            if (
                not prices
                and setting.graph.dtype == "f16"
                and not (names and _best_prices(search(setting, exhausted_digests=()), limits))
            ):
                # The limits may be those of a program that computes in bf16 only.
                setting = replace(setting, graph=graph_in(setting.graph, "bf16"))
                best = search(setting)
                prices = _best_prices(best, limits)
            shortages = [best.host_shortage(price) for price in prices]
            found += self._estimates(workload, setting, prices, shortages, limits, len(names))
            if limits.allow_every_plan:
                found += self._missing(workload, setting, set(best.degrees), prices, len(names))
        return found

    def _estimates(
        self,
        workload: Workload,
        setting: Setting,
        prices: Sequence[PlanPrice],
        shortages: Sequence[str],
        limits: PlanLimits,
        left_out: int,
    ) -> list[CellEstimate]:
        """Return the estimates of priced plans, of which ``left_out`` others ran out of memory."""
        subjects = [self._subject(workload, setting, price.plan) for price in prices]
        times = self._calibration.estimates(subjects)
        notes = self._notes(workload, setting, limits, left_out)
        found = list[CellEstimate]()
        for price, time, shortage in zip(prices, times, shortages, strict=True):
            empty = self._record(workload, setting, price.plan.pipeline_degree)
            empty = empty.with_plan(price.plan)
            problem = str(price.overflow or "") or shortage
            if problem or time is None:
                note = f"{notes}: no plan fits in memory: {problem}"[:MAX_PROVENANCE]
                found.append(CellEstimate(record=replace(empty, provenance=note), price=None))
                continue
            record = replace(
                empty,
                iter_time_s=time.iter_time_s,
                sd=time.sd,
                provenance=f"{notes}: {price.plan}"[:MAX_PROVENANCE],
                traffic=traffic_of(setting, price.plan),
                **name_amounts(amounts_of(price.demand)),
            )
            found.append(CellEstimate(record=record, price=price))
        return found

    def _missing(
        self,
        workload: Workload,
        setting: Setting,
        degrees: set[int],
        prices: Iterable[PlanPrice],
        left_out: int,
    ) -> list[CellEstimate]:
        """Return the Cells of pipeline degrees without a plan, or with none that may still fit."""
        notes = self._notes(workload, setting, OPEN, left_out)
        left = degrees - {price.plan.pipeline_degree for price in prices}
        records = [self._record(workload, setting, degree) for degree in sorted(left)]
        indivisible = "the layers, GPUs or samples cannot be divided so"
        note = f"{notes}: {'no other plan fits' if left_out else indivisible}"
        return [CellEstimate(record=replace(r, provenance=note), price=None) for r in records]

    def _record(self, workload: Workload, setting: Setting, degree: int) -> EstimateRecord:
        """Return the estimate of a Cell without a plan that fits."""
        return EstimateRecord(
            workload=workload,
            cell=Cell(
                gpu_type=setting.hardware.name,
                gpus=setting.shape.gpus,
                pipeline_degree=degree,
                nodes=setting.shape.nodes,
            ),
            source=EstimateSource.PROFILED if setting.timed else EstimateSource.ANALYTIC,
            iter_time_s=math.inf,
        )

    def knows(self, workload: Workload) -> bool:
        """Return whether a workload's Cells can be estimated."""
        return workload in self._models

    def know(self, workload: Workload, model: Model) -> None:
        """Add a model whose Cells are also to be estimated.

        No measurements of the model must be among those that the estimator has learned from.
        """
        former_model = self._models.get(workload)
        if former_model is not model:
            self._models[workload] = model
            self._settings.clear()
        if former_model is None or former_model.graph is not model.graph:
            self._misfits = {pair for pair in self._misfits if pair[0] != workload}

    def _notes(
        self, workload: Workload, setting: Setting, limits: PlanLimits, left_out: int
    ) -> str:
        """Return how estimates are made, as the beginning of their provenance."""
        profile, text = self._models[workload].profiles.get(setting.hardware.name), "analytic"
        if profile is not None:
            text = f"profiled on {profile.device}, {profile.date}, {profile.records} records"
        if setting.hardware.core_rates or setting.hardware.copied_bytes_per_s:
            text += ", host measured"
        if self.learned:
            text += f", calibrated on {self.learned} measurements"
        if left_out:
            text += f", {left_out} {'plan' if left_out == 1 else 'plans'} ran out of memory here"
        return text if limits.allow_every_plan else f"{text}, for {limits}"

    def _subject(self, workload: Workload, setting: Setting, plan: ExecutionPlan) -> CellSubject:
        return CellSubject(
            family=workload.model,
            gpu_type=setting.hardware.name,
            nodes=setting.shape.nodes,
            gpus_per_node=setting.shape.gpus_per_node,
            global_batch=workload.global_batch,
            parameters=setting.graph.parameters,
            workload=workload,
            shape=setting.shape,
            plan=plan,
        )

    def setting(self, workload: Workload, gpu_type: str, shape: Shape) -> Setting:
        """Return the setting in which a workload's plans are priced on a shape."""
        key = workload, gpu_type, shape
        if key not in self._settings:
            while len(self._settings) >= MAX_SETTINGS:
                del self._settings[next(iter(self._settings))]
            self._settings[key] = self._make_setting(workload, gpu_type, shape)
        return self._settings[key]

    def _make_setting(self, workload: Workload, gpu_type: str, shape: Shape) -> Setting:
        model, hardware = self._models[workload], self.hardware[gpu_type]
        setting = data_sheet_setting(
            model.graph,
            model.training.at(workload.global_batch),
            replace(hardware, name=gpu_type),
            shape,
            States(zero=model.zero),
        )
        profile = model.profiles.get(gpu_type)
        if profile is None:
            return setting
        timed = ProfiledTotals(points=profile.points, fallback=setting.compute)
        return replace(setting, compute=timed, timed=True)

    def _plan_of(self, subject: Subject) -> tuple[Setting, ExecutionPlan]:
        """Return the setting and the plan of a subject."""
        if not isinstance(subject, CellSubject):
            raise AssertionError("every subject here is a Cell")
        return self.setting(subject.workload, subject.gpu_type, subject.shape), subject.plan

    def _measurements(self, measurements: Sequence[MeasurementRecord]) -> list[Measurement]:
        """Return one measurement for each of the latest Cells that the time model covers.

        A Cell whose plan was not recorded is taken to have run by the best one.
        """
        known = [
            r
            for r in measured_cells(measurements)
            if r.workload in self._models and r.cell.gpu_type in self.hardware
        ]
        measured = list[Measurement]()
        for r in known[-MAX_LEARNED:]:
            cell = r.cell
            shape = shape_on(cell.gpus, cell.nodes, self.hardware[cell.gpu_type].gpus_per_node)
            if shape is None or cell.pipeline_degree < 1:
                continue
            setting = self.setting(r.workload, cell.gpu_type, shape)
            plan = r.plan
            if plan is None:
                best = self.plan_cell(r.workload, cell)
                plan = None if best is None else best.plan
            if plan is None:
                continue
            with suppress(InvalidInput):  # a plan that the time model cannot price teaches nothing
                here = replace(plan, shape=shape.each_node)
                plan_costs(setting, here)
                subject = self._subject(r.workload, setting, here)
                measured.append(Measurement(subject=subject, iter_time_s=r.iter_time_s))
        return measured

    def plan_cell(self, workload: Workload, cell: Cell) -> EstimateRecord | None:
        """Return the best plan that fits on a Cell, with its own estimate, or None without a plan.

        A Cell without nodes is on as few as possible, and its plan is for any. One without a
        pipeline degree has the best one.
        """
        if cell.gpu_type not in self.hardware or (workload, cell) in self._misfits:
            return None
        node_gpus = self.hardware[cell.gpu_type].gpus_per_node
        shape = (
            shape_on(cell.gpus, cell.nodes, node_gpus)
            if cell.nodes
            else shape_of(cell.gpus, node_gpus)
        )
        if shape is None:
            return None
        setting = self.setting(workload, cell.gpu_type, shape)
        degrees = [cell.pipeline_degree] if cell.pipeline_degree != BEST_FOUND else None
        best = PlanSearch(setting, model=model_name(workload), degrees=degrees).best_by_degree()
        prices = [price for price in best.values() if price.overflow is None]
        if not prices:
            self._misfits.add((workload, cell))  # callers ask again and again
            return None
        price = min(prices, key=lambda price: price.iter_time_s)
        plan = price.plan if cell.nodes else replace(price.plan, shape=())
        empty = self._record(workload, setting, plan.pipeline_degree)
        return replace(
            replace(empty, cell=replace(empty.cell, nodes=cell.nodes)).with_plan(plan),
            iter_time_s=price.iter_time_s,
            provenance=f"{BEST_PLAN_NOTE}, predicted to take {price.iter_time_s:.4g} s",
            traffic=traffic_of(setting, plan),
        )


def _best_prices(search: PlanSearch, limits: PlanLimits) -> list[PlanPrice]:
    """Return the best plans: of each pipeline degree, if all plans are allowed, and for the hosts."""
    if not limits.allow_every_plan:
        return search.host_variants()
    best = list(search.best_by_degree().values())
    return [*best, *(p for p in search.host_variants() if p.overflow is None and p not in best)]
