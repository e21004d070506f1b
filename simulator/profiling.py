"""The profiling tasks of a world: the same jobs that the service would queue for its jobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.profiling.tasks import (
    ProfilingOptions,
    missing_tasks,
    nominal_estimates,
    step_of,
)
from tessera.formulation.base.values import GpuType, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimateRecord,
    EstimationInputs,
    ModelSpec,
    ProfilingJob,
    UnestimatedWorkload,
)
from tessera.formulation.records.jobs import JobSpec

OPTIONS: Final = ProfilingOptions(always=True)
"""The service's sizes to measure. Every job asks for profiling."""

SIMULATED_STEP: Final = "tessera.simulator:step"
"""The step of models for which the product has none. The simulator runs no steps, so it only needs a
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """A model on a GPU type: the subject of a task. Workloads that differ in batch share it."""

    model: str
    params: str
    gpu_type: str

    def covers(self, workload: Workload, gpu_type: str) -> bool:
        """Return whether the estimates of ``workload`` on ``gpu_type`` follow from its task."""
        own = (self.model, self.params, self.gpu_type)
        return own == (workload.model, workload.params, gpu_type)


class ProfilingTasks:
    """The tasks that may be created in a world, and those that were.

    ``specs`` has all of them, in the order in which the jobs of their models arrive. The rule that
    creates them is the service's own (``tessera.estimator.profiling.tasks.missing_tasks``). It makes
    one for each model and GPU type that has nodes, and none twice.
    """

    def __init__(
        self,
        gpu_types: Sequence[GpuType],
        nodes: Iterable[NodeSpec],
        workloads: Iterable[Workload],
    ) -> None:
        """Find the tasks for ``workloads``, in order of arrival, before any is created."""
        wanted = tuple(dict.fromkeys(workloads))
        self._cluster = EstimationInputs(
            kinds=_kinds_of(gpu_types, nodes),
            models=_models_of(wanted),
            measurements=(),
            wanted=(),
        )
        self._created: tuple[ProfilingJob, ...] = ()
        self._known = frozenset(wanted)
        self.specs = tuple(self._missing(wanted).values())
        self._index = {spec.name: i for i, spec in enumerate(self.specs)}

    def ask(self, workload: Workload) -> list[int]:
        """Create the tasks that a job of ``workload`` lacks. Return their indices in ``specs``.

        A workload that was not among those at the beginning is not profiled.
        """
        missing = self._missing((workload,)) if workload in self._known else {}
        self._created += tuple(
            ProfilingJob(
                name=spec.name,
                gpu_type=spec.requested_gpu_type,
                state=JobState.QUEUED,
                last_error="",
                service_gpu_s=0.0,
            )
            for spec in missing.values()
        )
        return [self._index[name] for name in missing]

    def subject(self, task: int) -> ProfiledModel:
        """Return what the task measures."""
        spec = self.specs[task]
        model, params, _ = json.loads(spec.command[0])["workload"]
        return ProfiledModel(model=model, params=params, gpu_type=spec.requested_gpu_type)

    def _missing(self, workloads: Iterable[Workload]) -> dict[str, JobSpec]:
        """Return the service's tasks for live jobs of ``workloads``, by name."""
        wanted = tuple(
            UnestimatedWorkload(workload=w, requests=(), counts=(), derived_from="", profile=True)
            for w in workloads
        )
        known = replace(self._cluster, wanted=wanted, profiling=self._created)
        names = [kind.gpu_type.name for kind in known.kinds]
        return missing_tasks(known, names, OPTIONS)


def shown_estimates(gpu_types: Iterable[GpuType]) -> list[EstimateRecord]:
    """Return the estimates of tasks that rounds see, whose times have no meaning."""
    return nominal_estimates(kind.name for kind in gpu_types)


def true_estimates(gpu_types: Iterable[GpuType], profile_s: float) -> list[EstimateRecord]:
    """Return the true times of tasks: all sizes together take ``profile_s`` seconds."""
    size_s = profile_s / len(OPTIONS.samples)
    return [replace(e, iter_time_s=size_s) for e in shown_estimates(gpu_types)]


def _kinds_of(
    gpu_types: Sequence[GpuType], nodes: Iterable[NodeSpec]
) -> tuple[ClusterGpuType, ...]:
    sizes: dict[str, list[int]] = {kind.name: [] for kind in gpu_types}
    for node in nodes:
        sizes[node.gpu_type].append(node.gpus)
    return tuple(
        ClusterGpuType(
            gpu_type=kind, node_gpus=max(sizes[kind.name], default=0), gpus=sum(sizes[kind.name])
        )
        for kind in gpu_types
    )


def _models_of(workloads: Iterable[Workload]) -> tuple[ModelSpec, ...]:
    """Return a model with a step for each model that has no published step."""
    without = dict.fromkeys((w.model, w.params) for w in workloads if step_of(w, ()) is None)
    return tuple(
        ModelSpec(model=model, params=params, architecture="", step=SIMULATED_STEP)
        for model, params in without
    )
