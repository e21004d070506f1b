"""Estimates of Cells from models, GPU types and measurements, without side effects."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from statistics import median
from types import MappingProxyType
from typing import Final

from tessera.estimator.architectures import files
from tessera.estimator.architectures.published import published_models
from tessera.estimator.calibration import Calibration, Measurement, Residual, Subject
from tessera.estimator.cells import (
    Setting,
    data_sheet_setting,
    degrees_of,
    execution_plan_of,
    plan_cells,
)
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import CATALOGUE, Hardware
from tessera.estimator.memory import States, memory_without, parameter_bytes
from tessera.estimator.plans import PricedPlan, Shape, Training, shape_on, shapes_of
from tessera.estimator.pricing.price import price_plan
from tessera.estimator.profiling.tasks import Profile, profiles_of, step_of
from tessera.estimator.profiling.totals import ProfiledTotals
from tessera.estimator.times import CellTimes
from tessera.estimator.traffic import traffic_of
from tessera.formulation.cancellation import never_cancelled
from tessera.formulation.demand import Capacity
from tessera.formulation.errors import InvalidInput, TesseraError
from tessera.formulation.execution_plan import ExecutionPlan, model_name
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    HostProfile,
    MeasurementRecord,
    ModelSpec,
    ProfileRow,
)
from tessera.formulation.release import installed_version
from tessera.formulation.techniques import PlanLimits
from tessera.formulation.values import Cell, EstimateSource, Workload

GPU_MULTIPLES: Final = (0.5, 1.0, 2.0)
"""Multiples of a job's requested GPUs for which Cells are estimated (Crius, section 4.1)."""

MAX_GPUS: Final = 512
"""Largest number of GPUs of an estimate. The search takes a second or two for 128 GPUs, and longer
for more."""

MAX_LEARNED: Final = 64
"""Largest number of measured Cells in a calibration. The latest ones are used. Each takes some
tenths of a second."""

MAX_PROVENANCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A model in the form of the estimator, with its training."""

    graph: Graph
    training: Training  # at an arbitrary batch
    zero: int
    profiles: Mapping[str, Profile] = field(default_factory=dict)  # by GPU type


def read_model(
    field: str, spec: ModelSpec, cancelled: Callable[[], bool] = never_cancelled
) -> Model:
    """Return the model that a user's specification describes.

    Raises:
        InvalidInput: the architecture is not valid, or its training is impossible; names the field.
        DeadlineTooShort: it was cancelled.
    """
    values = files.read_values(f"{field}.architecture", spec.architecture, cancelled)
    try:
        architecture = files.parse_architecture(
            values,
            name=f"{spec.model} {spec.params}".strip(),
            sequence=spec.sequence or None,
            dtype=spec.dtype or None,
            flash=spec.flash,
        )
        graph = files.architecture_graph(architecture)
    except InvalidInput as wrong:
        place = f"{field}.architecture" + (f".{wrong.field}" if wrong.field else "")
        raise InvalidInput(place, wrong.problem) from wrong
    except TesseraError as wrong:
        raise InvalidInput(f"{field}.architecture", str(wrong)) from wrong
    training = Training(
        global_batch=spec.micro_batches,
        micro_batches=spec.micro_batches,
        state_bytes=spec.state_bytes,
        checkpointing=spec.checkpointing,
    )
    try:
        parameter_bytes(graph, training)
    except TesseraError as wrong:
        raise InvalidInput(f"{field}.state_bytes", str(wrong)) from wrong
    return Model(graph=graph, training=training, zero=spec.zero)


def model_of(
    field: str, workload: Workload, own: Iterable[ModelSpec], measured: Sequence[ProfileRow] = ()
) -> Model:
    """Return the model of a workload: a user's own, or else a published one of that name.

    ``measured`` are layers of any models. Those that belong to the model's step become its
    profiles.

    Raises:
        InvalidInput: there is no such model; the message says what to do.
    """
    specs = tuple(own)
    model = _model_named(field, workload, specs)
    if not measured:
        return model
    step = step_of(workload, specs)
    return replace(model, profiles=profiles_of(measured, workload, step, model.graph.dtype))


def _model_named(field: str, workload: Workload, own: Iterable[ModelSpec]) -> Model:
    key = (workload.model, workload.params)
    for spec in own:
        if (spec.model, spec.params) == key:
            return read_model(field, spec)
    published = published_models().get(key)
    if published is None:
        raise InvalidInput(field, "; ".join(unknown_model(workload)))
    return Model(graph=published.graph, training=published.training, zero=published.zero)


def known_models(
    workloads: Iterable[Workload], own: Iterable[ModelSpec], measured: Sequence[ProfileRow] = ()
) -> dict[Workload, Model]:
    """Return the models of those workloads whose model is known.

    ``measured`` is as in ``model_of``.
    """
    specs, models = tuple(own), {}
    names = {(spec.model, spec.params) for spec in specs} | published_models().keys()
    for workload in dict.fromkeys(workloads):
        if (workload.model, workload.params) in names:
            models[workload] = model_of("", workload, specs, measured)
    return models


def no_known_type(names: Iterable[str], catalogue: Iterable[str]) -> str:
    """Return the message that none of the cluster's GPU types is in the catalogue, with a remedy."""
    if not (there := ", ".join(names)):
        return "the cluster has no nodes yet, so nothing can be estimated; add nodes"
    return (
        f"none of the cluster's GPU types ({there}) is in the hardware catalogue ({', '.join(catalogue)});"
        " use names from the catalogue, describe the types in the server's setting `hardware`, or import"
        " profiles"
    )


def unknown_model(workload: Workload) -> tuple[str, str]:
    """Return the message that a model is unknown, and the remedy."""
    sizes = ", ".join(params for model, params in published_models() if model == workload.model)
    near = f" (published sizes of {workload.model}: {sizes})" if sizes else ""
    return (
        f"the model {workload.model} {workload.params}".rstrip() + f" is unknown{near}",
        "describe it with `tessera models add` (Estimates.UpsertModels), or import a profile of it",
    )


def hardware_of(
    field: str,
    kind: ClusterGpuType,
    catalogue: Mapping[str, Hardware],
    hosts: Iterable[HostProfile] = (),
) -> Hardware:
    """Return the hardware of a GPU type, with the memory and node size of the cluster.

    What ``hosts`` measured on its nodes replaces the catalogue's rates of hosts.

    Raises:
        InvalidInput: the type is not in the catalogue.
    """
    known = catalogue.get(kind.gpu_type.name)
    if known is None:
        raise InvalidInput(
            field,
            f"{kind.gpu_type.name} is not in the hardware catalogue, which has {', '.join(catalogue)};"
            " use a name from the catalogue, describe the type in the server's setting `hardware`, or"
            " import profiles",
        )
    for host in hosts:
        if host.gpu_type == kind.gpu_type.name:
            known = known.with_host(host.rates)
    return replace(
        known,
        memory_bytes=kind.gpu_type.memory_bytes,
        gpus_per_node=kind.node_gpus or known.gpus_per_node,
    )


def catalogue_of(hardware: Iterable[Hardware] = CATALOGUE) -> dict[str, Hardware]:
    """Return GPU types by name."""
    return {kind.name: kind for kind in hardware}


def gpu_counts_of(requests: Iterable[int], multiples: Iterable[float]) -> list[int]:
    """Return these multiples of the requested numbers of GPUs, ascending.

    Only whole numbers of at least 1 are returned.
    """
    products = {request * multiple for request in requests for multiple in multiples}
    return sorted({round(p) for p in products if p >= 1 and math.isclose(p, round(p))})


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
        estimates, profile = [], self._models[workload].profiles.get(gpu_type)
        for degree in wanted:
            plan, time = plans.get(degree), by_degree.get(degree)
            record = EstimateRecord(
                workload=workload,
                cell=of_degree[degree],
                source=EstimateSource.PROFILED if profile else EstimateSource.ANALYTIC,
                iter_time_s=math.inf,
                provenance=self._provenance(None, profile, len(left_out[degree])),
            )
            if plan is None or time is None:
                estimates.append(CellEstimate(record=record, plan=None))
                continue
            execution = execution_plan_of(setting, plan, model_name(workload))
            record = replace(
                record.with_plan(execution),
                iter_time_s=time.iter_time_s,
                sd=time.sd,
                provenance=self._provenance(execution, profile, len(left_out[degree])),
                traffic=traffic_of(setting, plan),
            )
            estimates.append(CellEstimate(record=record, plan=plan))
        return estimates

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


def measured_cells(measurements: Iterable[MeasurementRecord]) -> list[MeasurementRecord]:
    """Return one record for each Cell and shape, the median of its runs, the latest run last."""
    return [replace(cell, iter_time_s=median(times)) for cell, times in _runs(measurements).items()]


def _runs(measurements: Iterable[MeasurementRecord]) -> dict[MeasurementRecord, list[float]]:
    """Return the iteration times by Cell and shape, i.e. by a record without a time.

    The Cell of the latest run comes last.
    """
    runs: dict[MeasurementRecord, list[float]] = {}
    for one in measurements:
        cell = replace(one, iter_time_s=0.0)
        runs[cell] = [*runs.pop(cell, []), one.iter_time_s]
    return runs


def measured_estimates(measurements: Sequence[MeasurementRecord]) -> list[EstimateRecord]:
    """Return the measurements as estimates, with the noise of runs that calibration assumes."""
    return [
        EstimateRecord(
            workload=r.workload,
            cell=r.cell,
            iter_time_s=median(times),
            source=EstimateSource.MEASURED,
            sd=Residual().noise_sd / math.sqrt(len(times)),
            provenance=f"median of {len(times)} {'run' if len(times) == 1 else 'runs'} here",
            cpus=0 if r.plan is None else r.plan.cpus,
        )
        for r, times in _runs(measurements).items()
    ]


@lru_cache(maxsize=4)
def _measurements_digest(measurements: tuple[MeasurementRecord, ...]) -> str:
    """Return a digest of the measurements to learn from, common to a cluster's workloads."""
    plain = (
        {"workload": asdict(m.workload), "iter_time_s": m.iter_time_s, **asdict(m.cell)}
        for m in measured_cells(measurements)
    )
    return _digest(list(plain))


def _digest(plain: object) -> str:
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


ESTIMATES_VERSION: Final = 3
"""Version of derived estimates, which is part of fingerprints. Version 2 added the traffic of plans,
and version 3 the plans themselves and wider shapes."""


def estimates_fingerprint(
    workload: Workload,
    spec: ModelSpec | None,
    asked: Mapping[str, Sequence[int]],
    hardware: Mapping[str, Hardware],
    measurements: Sequence[MeasurementRecord],
    profiles: Mapping[str, Profile] = MappingProxyType({}),
    stated: Sequence[ExecutionPlan] = (),
    limits: Sequence[PlanLimits] = (),
    exhausted: Sequence[Cell] = (),
    tunings: Sequence[tuple[str, str]] = (),
    checks: Sequence[str] = (),
    nodes: Mapping[str, Capacity | None] = MappingProxyType({}),
    explained: bool = False,
) -> str:
    """Return a digest of everything that a workload's estimates depend on.

    ``spec`` is None for a published model. ``asked`` has the numbers of GPUs by GPU type, and
    ``profiles`` the measurements of the workload by GPU type. ``stated`` are the plans that users
    state for its jobs, ``limits`` those within which plans are searched separately, and
    ``exhausted`` the Cells by plans that ran out of memory. ``tunings`` are the runtimes and spaces
    for which plans to try are listed, and ``checks`` the notes on its collectives. ``nodes`` are
    what nodes have, by GPU type, which only matters within limits. ``explained`` says that
    provenances tell which runs a model of plans lacks.
    """
    plain = [
        installed_version(),
        ESTIMATES_VERSION,
        asdict(workload),
        spec and asdict(spec),
        {t: list(n) for t, n in asked.items()},
        {t: asdict(h) for t, h in hardware.items() if t in asked},
        _measurements_digest(tuple(measurements)),
        *({t: asdict(p)} for t, p in sorted(profiles.items()) if t in asked),
        *([plan.digest for plan in stated],) * bool(stated),
        *({"limits": list(map(str, limits))},) * bool(limits),
        *({"nodes": {t: asdict(n) for t, n in nodes.items() if n and t in asked}},) * bool(limits),
        *({"exhausted": [asdict(cell) for cell in exhausted]},) * bool(exhausted),
        *({"tunings": [list(pair) for pair in tunings]},) * bool(tunings),
        *({"checks": list(checks)},) * bool(checks),
        *({"explained": True},) * explained,
    ]
    return _digest(plain)
