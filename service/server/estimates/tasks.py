"""The workloads of a cluster whose estimates are missing, or were made from other inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.estimator.fingerprints import estimates_fingerprint
from tessera.estimator.gpu_counts import MAX_GPUS, gpu_counts_of
from tessera.estimator.hardware import Hardware
from tessera.estimator.hardware.cluster_types import hardware_of
from tessera.estimator.models import known_models
from tessera.estimator.profiling.tasks import Profile
from tessera.formulation.base.values import Workload
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.estimates import (
    EstimationInputs,
    MeasurementRecord,
    ModelSpec,
    UnestimatedWorkload,
)
from tessera.service.server.estimates.reasons import (
    explain_pending,
    explain_unfit,
    explain_unknown_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTask:
    """A workload to estimate, with the GPU counts to estimate for each GPU type.

    ``key`` is a digest of everything that the estimates depend on. ``asks_for_runs`` says whether
    short runs of its job's program are to correct the estimates of plans.
    """

    wanted: UnestimatedWorkload
    counts: Mapping[str, Sequence[int]]
    key: str
    asks_for_runs: bool


class TaskFinder:
    """A finder of the workloads to estimate.

    GPU counts are the requests of jobs times ``multiples``. If ``runs`` is set, plans of jobs that
    ask for profiling are measured by short runs.
    """

    def __init__(
        self, hardware: Mapping[str, Hardware], multiples: Sequence[float], *, runs: bool
    ) -> None:
        self._hardware, self._multiples, self._runs = hardware, multiples, runs

    def find(
        self, known: EstimationInputs, measurements: Sequence[MeasurementRecord]
    ) -> tuple[list[EstimateTask], dict[Workload, Reason]]:
        """Return the workloads to estimate, those without estimates first.

        Also return why workloads have no estimates yet: those to estimate, and those that cannot be
        estimated.
        """
        specs = {(spec.model, spec.params): spec for spec in known.models}
        published = known_models((w.workload for w in known.wanted if not w.derived_from), ())
        hardware = hardware_by_type(known, self._hardware)
        tasks, reasons = list[EstimateTask](), dict[Workload, Reason]()
        for wanted in known.wanted:
            workload, is_new = wanted.workload, not wanted.derived_from
            spec = specs.get((workload.model, workload.params))
            if is_new and spec is None and workload not in published:
                if not wanted.plans_only:
                    reasons[workload] = explain_unknown_model(workload)
                continue
            counts = self._counts_by_type(known, wanted)
            if not counts and not wanted.plans:
                if is_new and not wanted.plans_only:
                    requested = gpu_counts_of(wanted.requests, self._multiples)
                    reasons[workload] = explain_unfit(workload, known, self._hardware, requested)
                continue
            task = self._task(known, measurements, hardware, wanted, spec, counts)
            if task.key != wanted.derived_from:
                tasks.append(task)
                if is_new and not wanted.plans_only:
                    reasons[workload] = explain_pending(workload, counts)
        return sorted(tasks, key=lambda task: bool(task.wanted.derived_from)), reasons

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

    def _task(
        self,
        known: EstimationInputs,
        measurements: Sequence[MeasurementRecord],
        hardware: Mapping[str, Hardware],
        wanted: UnestimatedWorkload,
        spec: ModelSpec | None,
        counts: Mapping[str, Sequence[int]],
    ) -> EstimateTask:
        asks_for_runs = bool(self._runs and wanted.asking_job)
        key = estimates_fingerprint(
            wanted.workload,
            spec,
            counts,
            hardware,
            measurements,
            _profiles(known, wanted.workload),
            wanted.plans,
            limits=wanted.limits if counts else (),
            exhausted=wanted.exhausted,
            tunings=wanted.tunings if counts else (),
            explained=asks_for_runs,
            nodes={kind.gpu_type.name: kind.node_capacity for kind in known.kinds},
        )
        return EstimateTask(wanted=wanted, counts=counts, key=key, asks_for_runs=asks_for_runs)


def hardware_by_type(
    known: EstimationInputs, hardware: Mapping[str, Hardware]
) -> dict[str, Hardware]:
    """Return the hardware of the cluster's GPU types that are in ``hardware``, as measured there."""
    return {
        kind.gpu_type.name: hardware_of("gpu_type", kind, hardware, known.hosts)
        for kind in known.kinds
        if kind.gpu_type.name in hardware
    }


def _profiles(known: EstimationInputs, workload: Workload) -> Mapping[str, Profile]:
    """Return the profiles of a workload by GPU type.

    The result is empty if the model is not known any more.
    """
    rows = [row for row in known.profiles if row.workload.model == workload.model]
    model = known_models([workload], known.models, rows).get(workload) if rows else None
    return model.profiles if model else {}
