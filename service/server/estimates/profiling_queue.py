"""The jobs that the service creates to measure: profiling tasks, and runs of jobs' own programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tessera.db.estimates.derived_estimates import put_derived_estimates
from tessera.db.jobs.submission import submit_jobs
from tessera.db.store.profile_changes import end_profiling
from tessera.db.store.reads import get_job
from tessera.db.store.store import Connection
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.plan_corrections import PlanCorrections
from tessera.estimator.plan_runs import chosen_type, list_choices, runs_of_job, why_not_run
from tessera.estimator.profiling.limits import overdue_tasks
from tessera.estimator.profiling.tasks import ProfilingOptions, missing_tasks, nominal_estimates
from tessera.formulation.base.errors import AlreadyExists, InvalidInput, TesseraError
from tessera.formulation.job.execution_plan import model_name
from tessera.formulation.job.lifecycle import JobEvent, is_allowed
from tessera.formulation.records.estimates import EstimationInputs, ProfileGap, UnestimatedWorkload
from tessera.formulation.records.jobs import JobSpec
from tessera.service.server.estimates.estimation_store import EstimationStore

log = logging.getLogger(__name__)


class ProfilingQueue:
    """Whoever creates and ends the jobs that measure. Its methods block."""

    def __init__(
        self, store: EstimationStore, hardware: Mapping[str, Hardware], options: ProfilingOptions
    ) -> None:
        self._store, self._hardware, self._options = store, hardware, options

    def queue_tasks(self, cluster: str, known: EstimationInputs) -> None:
        """Queue the profiling tasks that are requested and were never created.

        The name of a task ensures that it is created only once.
        """
        for spec in missing_tasks(known, self._hardware, self._options).values():
            self._submit(cluster, spec, _submit_task)

    def queue_runs(
        self,
        cluster: str,
        known: EstimationInputs,
        wanted: UnestimatedWorkload,
        estimator: Estimator,
        counts: Mapping[str, Sequence[int]],
        corrections: PlanCorrections,
    ) -> None:
        """Queue the runs of a job's program that measure its plans, unless they were created before.

        If there can be none, ``corrections`` gets the reason, which estimates then show.
        """
        spec = self._store.read(get_job, cluster, wanted.asking_job).spec
        kind = chosen_type(spec, known.kinds)
        if kind is None or kind.gpu_type.name not in counts:
            return
        key = model_name(wanted.workload), kind.gpu_type.name
        if problem := why_not_run(spec):
            corrections.problems[key] = f"its plans cannot be measured: {problem}"
            return
        choices = list_choices(estimator, spec, kind, counts[kind.gpu_type.name])
        try:
            specs = runs_of_job(spec, choices, self._options.runs, self._options.run_s)
        except InvalidInput as wrong:
            corrections.problems[key] = str(wrong)
            return
        there = {run.name for run in known.runs}
        if there.isdisjoint(run.name for run in specs):
            for run in specs:
                self._submit(cluster, run, _submit_run)

    def end_overdue(self, cluster: str, known: EstimationInputs) -> None:
        """Cancel the jobs that are past a limit or measure for an ended job, and store the reason.

        A profiling task keeps its limits itself. These ones wait for a GPU, or their agent is
        silent.
        """
        overdue = overdue_tasks([*known.profiling, *known.runs], self._options.limits)
        orphans: list[tuple[str, ProfileGap | None]] = [
            (run.name, None)
            for run in known.runs
            if run.is_orphan and is_allowed(run.state, JobEvent.CANCEL)
        ]
        for name, gap in dict([*orphans, *overdue]).items():
            try:
                self._store.change(end_profiling, cluster, name, gap)
            except TesseraError as error:  # it has just ended, or another replica was faster
                log.info(
                    "a profiling task is not cancelled",
                    extra={
                        "event": "profiling_not_cancelled",
                        "cluster": cluster,
                        "job": name,
                        "error": error,
                    },
                )
                continue
            reason = gap.reason if gap else "it is past a limit, or the job that asked has ended"
            log.info(
                "cancelled a profiling task",
                extra={
                    "event": "profiling_cancelled",
                    "cluster": cluster,
                    "job": name,
                    "cause": reason,
                },
            )

    def _submit(
        self, cluster: str, spec: JobSpec, submit: Callable[[Connection, str, JobSpec], None]
    ) -> None:
        try:
            self._store.change(submit, cluster, spec)
        except AlreadyExists:  # another replica was faster
            return
        except TesseraError as error:
            log.warning(
                "cannot queue a profiling task",
                extra={
                    "event": "profiling_not_queued",
                    "cluster": cluster,
                    "job": spec.name,
                    "error": error,
                },
            )
            return
        log.info(
            "queued a profiling task",
            extra={
                "event": "profiling_queued",
                "cluster": cluster,
                "job": spec.name,
                "labels": spec.labels,
            },
        )


def _submit_task(connection: Connection, cluster: str, spec: JobSpec) -> None:
    put_derived_estimates(connection, cluster, nominal_estimates([spec.requested_gpu_type]), {})
    submit_jobs(connection, cluster, [spec])


def _submit_run(connection: Connection, cluster: str, spec: JobSpec) -> None:
    submit_jobs(connection, cluster, [spec])
