"""The estimates that the server makes automatically, for workloads that have none.

The replica that holds the cluster's lease makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tessera.estimator.cell_estimator import MAX_PROVENANCE, Estimator
from tessera.estimator.compiling.comparison import StepDegrees
from tessera.estimator.fingerprints import estimates_fingerprint
from tessera.estimator.gpu_counts import MAX_GPUS, gpu_counts_of
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import hardware_of, no_known_type
from tessera.estimator.measured_cells import measured_cells, measured_estimates
from tessera.estimator.models import known_models, model_of, unknown_model
from tessera.estimator.plan_corrections import PlanCorrections, priced_runs
from tessera.estimator.profiling.tasks import Profile, ProfilingOptions
from tessera.estimator.runnable_plans import estimate_runnable_plans
from tessera.estimator.stated.estimates import estimate_stated_plan
from tessera.estimator.tuning_plans import record_tunings
from tessera.formulation.errors import TesseraError
from tessera.formulation.reasons import Reason, ReasonCode
from tessera.formulation.records.estimates import (
    EstimateRecord,
    EstimationInputs,
    MeasurementRecord,
    TuningRecord,
    UnestimatedWorkload,
)
from tessera.formulation.values import Workload
from tessera.service.collectivechecker import collective_notes, plan_degrees
from tessera.service.ports import EstimationStore, Writer
from tessera.service.profiling_queue import ProfilingQueue

log = logging.getLogger(__name__)

MAX_ESTIMATORS: Final = 16
"""Number of clusters whose estimator is kept in memory, because each holds what it has learned.
Those that were built last are kept.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimateTask:
    """A workload to estimate, with the GPU counts to estimate for each GPU type."""

    wanted: UnestimatedWorkload
    counts: Mapping[str, Sequence[int]]
    key: str  # a digest of everything that the estimates depend on


class CellDeriver:
    """A deriver of the estimates that live jobs of a cluster need and that no user gave.

    Its methods block, and only one thread may use it at a time. GPU counts are the requests of jobs
    times ``multiples``. If ``learns`` is set, measurements correct the estimates. ``profiling``
    says what is measured for jobs that ask for it. The profiling tasks are submitted here. If
    ``derives`` is not set, nothing is computed: workloads without estimates are only marked as such,
    so that their jobs can run without, and get the times that were measured on them.
    """

    def __init__(
        self,
        store: EstimationStore,
        hardware: Mapping[str, Hardware],
        multiples: Sequence[float],
        *,
        derives: bool = True,
        learns: bool = True,
        profiling: ProfilingOptions | None = None,
    ) -> None:
        self._store, self._hardware, self._multiples = store, hardware, multiples
        self._learns, self._derives = learns, derives
        self._profiling = profiling or ProfilingOptions()
        self._queue = ProfilingQueue(store, hardware, self._profiling)
        self._recorded: dict[tuple[str, Workload], Reason] = {}
        self._kept: dict[str, tuple[MeasurementRecord, ...]] = {}
        self._estimators: dict[str, tuple[object, Estimator]] = {}
        self._corrections: dict[str, tuple[tuple[MeasurementRecord, ...], PlanCorrections]] = {}

    def derive(
        self,
        cluster: str,
        cancelled: Callable[[], bool] = lambda: False,
        woken: Callable[[], bool] = lambda: False,
    ) -> int:
        """Bring the estimates that the service makes for a cluster up to date.

        Return the number of workloads that were estimated. To do this twice, or in two replicas at
        the same time, is harmless: the same estimates are written. ``woken`` is called before each
        renewal. If it returns true, new workloads may have arrived that have no estimates yet, and
        they go first.

        Raises:
            NotFound: the cluster.
        """
        known = self._store.estimation(cluster)
        measurements = known.measurements if self._learns else ()
        self._queue.end_overdue(cluster, known)
        for wanted in known.wanted:
            if not wanted.has_reason:  # a user's estimates have cleared it, and were deleted
                self._recorded.pop((cluster, wanted.workload), None)
        if not self._derives:
            self._mark_unestimated(cluster, known, measurements)
            return 0
        self._store_measured(cluster, measurements)
        self._queue.queue_tasks(cluster, known)
        done = 0
        for task in self._tasks(cluster, known, measurements):
            # The workloads without estimates come first. Before each renewal, look whether new ones
            # have arrived.
            if task.wanted.derived_from and woken():
                done += self._newcomers(cluster, measurements, cancelled)
            if cancelled():
                break
            self._estimate(cluster, known, measurements, task, cancelled)
            done += 1
        return done

    def _mark_unestimated(
        self, cluster: str, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> None:
        """Record that the server derives no estimates, and store what was measured without any."""
        unknown = {w.workload for w in known.wanted if not w.derived_from and not w.plans_only}
        own = tuple(m for m in measurements if m.workload in unknown)
        if own:
            self._store_measured(cluster, own)
        self._record_reasons(cluster, {workload: _not_derived(workload) for workload in unknown})

    def forget(self, cluster: str) -> None:
        """Drop everything that is remembered about the cluster."""
        self._kept.pop(cluster, None)
        self._estimators.pop(cluster, None)
        self._corrections.pop(cluster, None)
        for key in [key for key in self._recorded if key[0] == cluster]:
            del self._recorded[key]

    def _newcomers(
        self,
        cluster: str,
        measurements: tuple[MeasurementRecord, ...],
        cancelled: Callable[[], bool],
    ) -> int:
        """Estimate the workloads that have no estimates now, and return how many there were."""
        known, done = self._store.estimation(cluster), 0
        for task in self._tasks(cluster, known, measurements):
            if task.wanted.derived_from or cancelled():
                break
            self._estimate(cluster, known, measurements, task, cancelled)
            done += 1
        return done

    def _store_measured(self, cluster: str, measurements: tuple[MeasurementRecord, ...]) -> None:
        """Store the measured times of Cells that ran, once for each change of the measurements."""
        if self._kept.get(cluster, ()) == measurements:
            return
        kept = self._write(cluster, measured_estimates(measurements), {})
        log.info(
            "stored the measured times of %d Cells as estimates",
            kept,
            extra={"action": "cells_measured", "cluster": cluster},
        )
        self._kept[cluster] = measurements

    def _tasks(
        self, cluster: str, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> list[_EstimateTask]:
        """Return the workloads to estimate, those without estimates first.

        Record why the others cannot be estimated.
        """
        specs = {(spec.model, spec.params): spec for spec in known.models}
        models = known_models((w.workload for w in known.wanted if not w.derived_from), ())
        reasons: dict[Workload, Reason] = {}
        hardware, tasks = self._hardware_of(known), list[_EstimateTask]()
        for wanted in known.wanted:
            workload = wanted.workload
            spec = specs.get((workload.model, workload.params))
            if not wanted.derived_from and spec is None and workload not in models:
                if not wanted.plans_only:
                    reasons[workload] = _unknown(workload)
                continue
            counts = self._counts_by_type(known, wanted)
            if not counts and not wanted.plans:
                if not wanted.derived_from:
                    reasons[workload] = self._unfit_reason(known, wanted)
                continue
            profiles = _profiles(known, workload)
            key = estimates_fingerprint(
                workload,
                spec,
                counts,
                hardware,
                measurements,
                profiles,
                wanted.plans,
                limits=wanted.limits if counts else (),
                exhausted=wanted.exhausted,
                tunings=wanted.tunings if counts else (),
                checks=list(collective_notes(known.checks, workload).values()),
                explained=self._asks_for_runs(wanted),
                nodes={kind.gpu_type.name: kind.node_capacity for kind in known.kinds},
            )
            if key != wanted.derived_from:
                tasks.append(_EstimateTask(wanted=wanted, counts=counts, key=key))
                if not wanted.derived_from and not wanted.plans_only:
                    reasons[workload] = _estimates_pending(workload, counts)
        self._record_reasons(cluster, reasons)
        return sorted(tasks, key=lambda task: bool(task.wanted.derived_from))

    def _counts_by_type(
        self, known: EstimationInputs, wanted: UnestimatedWorkload
    ) -> dict[str, list[int]]:
        """Return the GPU counts to estimate, by GPU type.

        GPU types that are unknown or have too few GPUs are absent.
        """
        if wanted.plans_only:
            return {}
        counts = sorted({*gpu_counts_of(wanted.requests, self._multiples), *wanted.counts})
        by_type = {
            kind.gpu_type.name: [n for n in counts if n <= min(kind.gpus, MAX_GPUS)]
            for kind in known.kinds
            if kind.gpu_type.name in self._hardware
        }
        return {name: fit for name, fit in by_type.items() if fit}

    def _hardware_of(self, known: EstimationInputs) -> dict[str, Hardware]:
        return {
            kind.gpu_type.name: hardware_of("gpu_type", kind, self._hardware, known.hosts)
            for kind in known.kinds
            if kind.gpu_type.name in self._hardware
        }

    def _unfit_reason(self, known: EstimationInputs, wanted: UnestimatedWorkload) -> Reason:
        there = {k.gpu_type.name: k.gpus for k in known.kinds if k.gpus}
        fits = {name: gpus for name, gpus in there.items() if name in self._hardware}
        if not fits:
            return _reason(wanted.workload, no_known_type(there, self._hardware), "")
        counts = ", ".join(map(str, gpu_counts_of(wanted.requests, self._multiples))) or "none"
        have = ", ".join(f"{gpus} x {name}" for name, gpus in fits.items())
        return _reason(
            wanted.workload,
            f"the numbers of GPUs to estimate are {counts}, but the cluster has only {have}",
            "request fewer GPUs, add nodes, or add smaller multiples to the server's setting estimate_counts",
        )

    def _estimate(
        self,
        cluster: str,
        known: EstimationInputs,
        measurements: Sequence[MeasurementRecord],
        task: _EstimateTask,
        cancelled: Callable[[], bool],
    ) -> None:
        workload, facts = task.wanted.workload, {"action": "cells_estimated", "cluster": cluster}
        failed = facts | {"action": "cells_failed"}
        try:
            records = self._records(cluster, known, measurements, task, cancelled)
            tunings = self._tunings(cluster, known, measurements, task, records, cancelled)
        except TesseraError as error:
            log.warning("cannot estimate Cells of %s: %s", workload.key, error, extra=failed)
            self._record_reasons(cluster, {workload: _failed(workload, str(error))})
            return
        except Exception:  # this guard keeps one workload from stopping the others
            log.exception("cannot estimate Cells of %s", workload.key, extra=failed)
            self._record_reasons(cluster, {workload: _failed(workload, "see the server's log")})
            return
        if records is None or tunings is None or (task.wanted.plans_only and not records):
            return
        derived_from = {} if task.wanted.plans_only else {workload: task.key}
        self._write(cluster, records, derived_from, tunings)
        self._recorded.pop((cluster, workload), None)
        log.info(
            "estimated %s: %d Cells on %s, of which %d are feasible",
            workload.key,
            len(records),
            ", ".join(task.counts),
            sum(r.sd is not None for r in records),
            extra=facts,
        )

    def _records(
        self,
        cluster: str,
        known: EstimationInputs,
        measurements: Sequence[MeasurementRecord],
        task: _EstimateTask,
        cancelled: Callable[[], bool],
    ) -> list[EstimateRecord] | None:
        """Return the estimates of one workload, or None if the pass was cancelled."""
        workload = task.wanted.workload
        estimator = self._estimator(cluster, known, measurements)
        estimator.know(workload, model_of("model", workload, known.models, known.profiles))
        kinds = {kind.gpu_type.name: kind for kind in known.kinds}
        records = []
        for gpu_type, counts in task.counts.items():
            for gpus in counts:
                if cancelled():
                    return None
                estimates = estimator.cells(
                    workload,
                    gpu_type,
                    gpus,
                    None,
                    cancelled,
                    nodes=kinds[gpu_type].nodes,
                    exhausted=task.wanted.exhausted,
                )
                records += [
                    cell.record for cell in estimates if _is_wanted(task.wanted, cell.record)
                ]
                records += estimate_runnable_plans(
                    estimator,
                    workload,
                    gpu_type,
                    gpus,
                    task.wanted.limits,
                    estimates,
                    kinds[gpu_type].nodes,
                    exhausted=task.wanted.exhausted,
                    node=kinds[gpu_type].node_capacity,
                )
        for plan, kind in product(task.wanted.plans, known.kinds):
            if cancelled():
                return None
            gpu_type = kind.gpu_type.name
            if gpu_type in self._hardware and plan.gpus <= kind.gpus:
                records += estimate_stated_plan(estimator, workload, gpu_type, plan, kind.nodes)
        corrections = self._plan_corrections(cluster, estimator, measurements)
        if self._asks_for_runs(task.wanted) and not corrections.has_choice(workload):
            self._queue.queue_runs(cluster, known, task.wanted, estimator, task.counts, corrections)
        explain = self._asks_for_runs(task.wanted)
        records = [corrections.correct(estimator, r, explain=explain) for r in records]
        notes = collective_notes(known.checks, workload)
        return [_with_notes(record, notes) for record in records] if notes else records

    def _asks_for_runs(self, wanted: UnestimatedWorkload) -> bool:
        return bool(self._profiling.runs and self._learns and wanted.asking_job)

    def _plan_corrections(
        self, cluster: str, estimator: Estimator, measurements: Sequence[MeasurementRecord]
    ) -> PlanCorrections:
        """Return the models of runs that correct estimates of plans, as of the latest measurements."""
        before, corrections = self._corrections.get(cluster, ((), PlanCorrections()))
        cells = tuple(measured_cells(measurements))
        if cells == before:
            return corrections
        for model, gpu_type in corrections.learn(priced_runs(estimator, cells)):
            choice = corrections.choices[model, gpu_type]
            facts = {"action": "plan_model_chosen", "cluster": cluster}
            log.info("times of plans of %s on %s: %s", model, gpu_type, choice, extra=facts)
        self._corrections[cluster] = (cells, corrections)
        return corrections

    def _tunings(
        self,
        cluster: str,
        known: EstimationInputs,
        measurements: Sequence[MeasurementRecord],
        task: _EstimateTask,
        records: Sequence[EstimateRecord] | None,
        cancelled: Callable[[], bool],
    ) -> list[TuningRecord] | None:
        """Return the plans that jobs of a workload may try, or None if the pass was cancelled."""
        if records is None or not task.wanted.tunings:
            return None if records is None else []
        estimator, tunings = self._estimator(cluster, known, measurements), list[TuningRecord]()
        for record in records:
            if cancelled():
                return None
            exhausted = task.wanted.exhausted
            tunings += record_tunings(estimator, record, task.wanted.tunings, exhausted)
        return tunings

    def _estimator(
        self, cluster: str, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> Estimator:
        """Return an estimator that has learned from the measurements.

        It is taken from memory if nothing has changed.
        """
        hardware, cells = self._hardware_of(known), measured_cells(measurements)
        key = (hardware, cells, known.models, known.profiles)
        before = self._estimators.get(cluster)
        if before is not None and before[0] == key:
            return before[1]
        models = known_models((m.workload for m in cells), known.models, known.profiles)
        estimator = Estimator(hardware, models, measurements)
        self._estimators.pop(cluster, None)
        self._estimators[cluster] = (key, estimator)
        while len(self._estimators) > MAX_ESTIMATORS:
            oldest = next(iter(self._estimators))
            del self._estimators[oldest]
            self._corrections.pop(oldest, None)
        return estimator

    def _record_reasons(self, cluster: str, reasons: Mapping[Workload, Reason]) -> None:
        """Record why workloads have no estimates, unless the same was recorded before."""
        news = {w: r for w, r in reasons.items() if self._recorded.get((cluster, w)) != r}
        if not news:
            return

        def work(writer: Writer) -> bytes:
            writer.say_waiting(cluster, news)
            return b""

        self._store.write(None, work)
        self._recorded |= {(cluster, w): r for w, r in news.items()}
        for reason in news.values():
            facts = {"action": "cells_wanted", "cluster": cluster}
            log.info("%s", reason.message, extra=facts)

    def _write(
        self,
        cluster: str,
        records: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        kept: list[int] = []

        def work(writer: Writer) -> bytes:
            kept.append(writer.derive(cluster, records, derived_from, tunings))
            return b""

        self._store.write(None, work)
        return kept[-1]


def _profiles(known: EstimationInputs, workload: Workload) -> Mapping[str, Profile]:
    """Return the profiles of a workload by GPU type.

    The result is empty if the model is not known any more.
    """
    rows = [row for row in known.profiles if row.workload.model == workload.model]
    model = known_models([workload], known.models, rows).get(workload) if rows else None
    return model.profiles if model else {}


def _is_wanted(wanted: UnestimatedWorkload, record: EstimateRecord) -> bool:
    """Return whether some job of a workload may run by the plan of an estimate."""
    if wanted.is_open or record.plan is None:
        return wanted.is_open
    return any(limits.allow(record.plan) for limits in wanted.limits)


def _with_notes(record: EstimateRecord, notes: Mapping[StepDegrees, str]) -> EstimateRecord:
    """Return an estimate whose provenance says how its plan's collectives compare with XLA's."""
    said = [notes[degrees] for degrees in plan_degrees(record) if degrees in notes]
    if not said:
        return record
    provenance = "; ".join([record.provenance, *said])[:MAX_PROVENANCE]
    return replace(record, provenance=provenance)


_RUNS_WITHOUT: Final = "a job that states a GPU type runs without"


def _reason(
    workload: Workload, message: str, next_step: str, code: ReasonCode = ReasonCode.NO_ESTIMATE
) -> Reason:
    return Reason(
        code=code,
        message=f"{workload.key} has no estimates: {message}",
        next_step=next_step,
        evidence=(("workload", workload.key),),
    )


def _unknown(workload: Workload) -> Reason:
    problem, next_step = unknown_model(workload)
    return _reason(workload, problem, f"{next_step}; {_RUNS_WITHOUT}")


def _not_derived(workload: Workload) -> Reason:
    return _reason(
        workload,
        "the server derives none, because its setting estimate_cells is off",
        f"import a profile of it, or add Cells; {_RUNS_WITHOUT}",
    )


def _estimates_pending(workload: Workload, counts: Mapping[str, Sequence[int]]) -> Reason:
    return _reason(
        workload,
        f"they are being computed for {', '.join(counts)}",
        "wait until they are ready",
        ReasonCode.ESTIMATING,
    )


def _failed(workload: Workload, problem: str) -> Reason:
    return _reason(
        workload, f"they could not be computed: {problem}", "import a profile of it, or add Cells"
    )
