"""The estimates that the server makes automatically, for workloads that have none.

The replica that holds the cluster's lease makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tessera.db.estimates.derived_estimates import (
    add_plans,
    put_derived_estimates,
    record_wait_reasons,
)
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.measured_cells import measured_estimates
from tessera.estimator.models import model_of
from tessera.estimator.profiling.tasks import ProfilingOptions
from tessera.formulation.base.errors import InvalidInput, TesseraError
from tessera.formulation.base.values import Cell, Workload
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.estimates import (
    EstimateRecord,
    EstimationInputs,
    MeasurementRecord,
    TuningRecord,
    UnestimatedWorkload,
)
from tessera.service.server.estimates.estimation_store import EstimationStore
from tessera.service.server.estimates.estimators import LearnedEstimators
from tessera.service.server.estimates.profiling_queue import ProfilingQueue
from tessera.service.server.estimates.reasons import explain_failure, explain_underived
from tessera.service.server.estimates.records import (
    compute_records,
    compute_tunings,
    plan_stated_cells,
)
from tessera.service.server.estimates.tasks import EstimateTask, TaskFinder

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


def _attempt(
    facts: Mapping[str, str], compute: Callable[[], _Answer]
) -> tuple[_Answer | None, str]:
    """Return the result for one workload, and the problem, or "". It stops no other workload."""
    try:
        return compute(), ""
    except TesseraError as error:
        log.warning(
            "cannot estimate a workload",
            extra={"event": "cells_failed", **facts, "error": error},
        )
        return None, str(error)
    except Exception:  # this guard keeps one workload from stopping the others
        log.exception("cannot estimate a workload", extra={"event": "cells_failed", **facts})
        return None, "see the server's log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimationPass:
    """A pass over the workloads of a cluster, as they were known at its beginning."""

    cluster: str
    known: EstimationInputs
    measurements: tuple[MeasurementRecord, ...]
    cancelled: Callable[[], bool]


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
        self._store, self._learns, self._derives = store, learns, derives
        profiling = profiling or ProfilingOptions()
        self._queue = ProfilingQueue(store, hardware, profiling)
        self._tasks = TaskFinder(hardware, multiples, runs=learns and profiling.runs > 0)
        self._estimators = LearnedEstimators(hardware)
        self._recorded: dict[tuple[str, Workload], Reason] = {}
        self._kept: dict[str, tuple[MeasurementRecord, ...]] = {}

    def derive(
        self,
        cluster: str,
        cancelled: Callable[[], bool] = lambda: False,
        woken: Callable[[], bool] = lambda: False,
    ) -> int:
        """Bring the estimates that the service makes for a cluster up to date.

        Return the number of workloads that were estimated. To do this twice, or in two replicas at
        the same time, is harmless: the same estimates are written. Users' Cells get their plans last.
        ``woken`` is called before each renewal, and before the plans of each workload. If it returns
        true, new workloads may have arrived that have no estimates yet, and they go first.

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
        this_pass = _EstimationPass(
            cluster=cluster, known=known, measurements=measurements, cancelled=cancelled
        )
        done = 0
        for task in self._find_tasks(this_pass):
            # The workloads without estimates come first. Before each renewal, look whether new ones
            # have arrived.
            if task.wanted.derived_from and woken():
                done += self._estimate_newcomers(this_pass)
            if cancelled():
                break
            self._estimate(this_pass, task)
            done += 1
        for target in (target for target in known.wanted if target.without_plan):
            if woken():
                done += self._estimate_newcomers(this_pass)
            if cancelled():
                break
            self._add_plans(this_pass, target)
        return done

    def forget(self, cluster: str) -> None:
        """Drop everything that is remembered about the cluster."""
        self._kept.pop(cluster, None)
        self._estimators.forget(cluster)
        for key in [key for key in self._recorded if key[0] == cluster]:
            del self._recorded[key]

    def _mark_unestimated(
        self, cluster: str, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> None:
        """Record that the server derives no estimates, and store what was measured without any."""
        unknown = {w.workload for w in known.wanted if not w.derived_from and not w.plans_only}
        own = tuple(m for m in measurements if m.workload in unknown)
        if own:
            self._store_measured(cluster, own)
        reasons = {workload: explain_underived(workload) for workload in unknown}
        self._record_reasons(cluster, reasons)

    def _store_measured(self, cluster: str, measurements: tuple[MeasurementRecord, ...]) -> None:
        """Store the measured times of Cells that ran, once for each change of the measurements."""
        if self._kept.get(cluster, ()) == measurements:
            return
        kept = self._write(cluster, measured_estimates(measurements), {})
        log.info(
            "stored the measured times of Cells as estimates",
            extra={"event": "cells_measured", "cluster": cluster, "cells": kept},
        )
        self._kept[cluster] = measurements

    def _add_plans(self, this_pass: _EstimationPass, target: UnestimatedWorkload) -> None:
        """Give the Cells that users stated without a plan the best one, if their model is known."""
        cluster, inputs = this_pass.cluster, this_pass.known
        try:
            model = model_of("model", target.workload, inputs.models, inputs.profiles)
        except InvalidInput:  # nothing is known about the model, so the program alone decides
            return

        def plan() -> list[tuple[Cell, EstimateRecord]]:
            estimator = self._estimators.estimator(cluster, inputs, this_pass.measurements)
            estimator.know(target.workload, model)
            return plan_stated_cells(estimator, target)

        facts = {"cluster": cluster, "workload": target.workload.key}
        planned_cells, _ = _attempt(facts, plan)
        if planned_cells:
            self._store.change(add_plans, cluster, planned_cells)

    def _find_tasks(self, this_pass: _EstimationPass) -> list[EstimateTask]:
        """Return the workloads to estimate; record why others cannot be estimated."""
        tasks, reasons = self._tasks.find(this_pass.known, this_pass.measurements)
        self._record_reasons(this_pass.cluster, reasons)
        return tasks

    def _estimate_newcomers(self, this_pass: _EstimationPass) -> int:
        """Estimate the workloads that have no estimates now, and return how many there were."""
        now = replace(this_pass, known=self._store.estimation(this_pass.cluster))
        done = 0
        for task in self._find_tasks(now):
            if task.wanted.derived_from or now.cancelled():
                break
            self._estimate(now, task)
            done += 1
        return done

    def _estimate(self, this_pass: _EstimationPass, task: EstimateTask) -> None:
        """Compute and store the estimates of a workload, or record why there can be none."""
        cluster, workload = this_pass.cluster, task.wanted.workload
        facts = {"cluster": cluster, "workload": workload.key}
        computed, problem = _attempt(facts, lambda: self._compute(this_pass, task))
        if problem:
            self._record_reasons(cluster, {workload: explain_failure(workload, problem)})
            return
        if computed is None:
            return
        records, tunings = computed
        if task.wanted.plans_only and not records:
            return
        derived_from = {} if task.wanted.plans_only else {workload: task.key}
        self._write(cluster, records, derived_from, tunings)
        self._recorded.pop((cluster, workload), None)
        log.info(
            "estimated a workload",
            extra={
                "event": "cells_estimated",
                **facts,
                "cells": len(records),
                "feasible": sum(r.sd is not None for r in records),
                "gpu_types": list(task.counts),
            },
        )

    def _compute(
        self, this_pass: _EstimationPass, task: EstimateTask
    ) -> tuple[list[EstimateRecord], list[TuningRecord]] | None:
        """Return the estimates of a workload and the plans to try, or None if it was cancelled."""
        cluster, known, cancelled = this_pass.cluster, this_pass.known, this_pass.cancelled
        estimator = self._estimators.estimator(cluster, known, this_pass.measurements)
        computed = compute_records(estimator, known, task, cancelled)
        if computed is None:
            return None
        records = self._correct(this_pass, task, estimator, computed)
        tunings = compute_tunings(estimator, task.wanted, records, cancelled)
        return None if tunings is None else (records, tunings)

    def _correct(
        self,
        this_pass: _EstimationPass,
        task: EstimateTask,
        estimator: Estimator,
        records: Sequence[EstimateRecord],
    ) -> list[EstimateRecord]:
        """Return estimates as corrected by measured runs; queue runs if the job asks for them."""
        cluster, known, wanted = this_pass.cluster, this_pass.known, task.wanted
        corrections = self._estimators.corrections(cluster, estimator, this_pass.measurements)
        if task.asks_for_runs and not corrections.has_choice(wanted.workload):
            self._queue.queue_runs(cluster, known, wanted, estimator, task.counts, corrections)
        return [corrections.correct(estimator, r, explain=task.asks_for_runs) for r in records]

    def _record_reasons(self, cluster: str, reasons: Mapping[Workload, Reason]) -> None:
        """Record why workloads have no estimates, unless the same was recorded before."""
        news = {w: r for w, r in reasons.items() if self._recorded.get((cluster, w)) != r}
        if not news:
            return
        self._store.change(record_wait_reasons, cluster, news)
        self._recorded |= {(cluster, w): r for w, r in news.items()}
        for workload, reason in news.items():
            log.info(
                "there are no estimates of a workload",
                extra={
                    "event": "cells_wanted",
                    "cluster": cluster,
                    "workload": workload.key,
                    "cause": reason.message,
                },
            )

    def _write(
        self,
        cluster: str,
        records: Sequence[EstimateRecord],
        derived_from: Mapping[Workload, str],
        tunings: Sequence[TuningRecord] = (),
    ) -> int:
        return self._store.change(put_derived_estimates, cluster, records, derived_from, tunings)
