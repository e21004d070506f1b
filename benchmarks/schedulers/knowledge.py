"""The estimates that rounds see in an ablation, by the estimator's own planner.

Each workload of a trace is estimated as the service estimates those of its jobs: on each GPU type
of the cluster, for multiples of the GPUs that its jobs request, on up to three shapes, with
``Estimator.cells``. A profile, in the service, is the time of the model's layers on one GPU of a
type. No such GPU is at hand, so the trace's own measurements stand for it: the data sheet's seconds
of a GPU type are multiplied by the ratio of measured to estimated seconds of the model's smallest
measured run on that type.

A GPU type and count on which the trace has no run of a workload is left out, whatever the estimator
says: a job could not run there, and that would measure the trace's gaps. All variants leave out the
same ones. Nothing else of the trace is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from tessera.estimator.architectures.published import published_models
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.cells import COARSE_LAYERS, coarsen_graph
from tessera.estimator.gpu_counts import GPU_MULTIPLES, gpu_counts_of
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.models import Model, model_of
from tessera.estimator.profiling.tasks import Profile, ProfilingOptions
from tessera.estimator.rooflines import RooflineCompute
from tessera.estimator.stated.estimates import estimate_stated_plan
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
)
from tessera.formulation.records.estimates import ClusterGpuType, EstimateRecord
from tessera.formulation.values import Cell, GpuType, Workload
from tessera.simulator.comparison.estimate_rows import EstimateRow, records_of, rows_of
from tessera.simulator.comparison.workload import WorkloadSpec, make_scenario
from tessera.simulator.scenario import Scenario
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.sweeps.tasks import Task

TASK: Final = "tessera.benchmarks.schedulers.knowledge:estimate_workload"
PLANNED, UNPROFILED, DATA_PARALLEL = "planned", "unprofiled", "data-parallel"
KNOWLEDGE: Final = (PLANNED, UNPROFILED, DATA_PARALLEL)
"""Names of what rounds may know. ``planned``: the best plan of the planner, by profiles. ``unprofiled``: the
best plan of the planner, by data sheets. ``data-parallel``: pure data parallelism, by profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The estimates of the workloads of some seeds, by what rounds may know.

    ``unknown`` are workloads whose model is in no catalogue. There are no estimates of them, so
    their jobs run at an unknown rate on what they request, as in the service. ``unknown_types`` are
    GPU types of the cluster that the hardware catalogue lacks. There are no estimates for them.
    """

    rows: Mapping[str, tuple[EstimateRow, ...]] = field(default_factory=dict)
    unknown: frozenset[Workload] = frozenset()
    unknown_types: frozenset[str] = frozenset()


def learn_workloads(works: Iterable[WorkloadSpec], sweep: Sweep) -> Knowledge:
    """Return the estimates of all workloads of ``works``, which differ only in their seed.

    Each is estimated once for a whole benchmark, as a task of the sweep.
    """
    scenarios = [make_scenario(work).scenario for work in works]
    tasks = {w: _task_of(w, scenarios) for w in workloads_of(scenarios) if _is_known(w)}
    results = sweep.run(list(tasks.values()))
    every = [results[task.name] for task in tasks.values()]
    return Knowledge(
        rows={name: tuple(tuple(row) for one in every for row in one[name]) for name in KNOWLEDGE},
        unknown=frozenset(workloads_of(scenarios)) - tasks.keys(),
        unknown_types=frozenset(kind.name for kind in scenarios[0].gpu_types)
        - catalogue_of().keys(),
    )


def workloads_of(scenarios: Iterable[Scenario]) -> list[Workload]:
    """Return the workloads of all jobs, sorted by name."""
    every = {one.spec.workload for scenario in scenarios for one in scenario.arrivals}
    return sorted(every, key=lambda w: (w.model, w.params, w.global_batch))


def _is_known(workload: Workload) -> bool:
    return (workload.model, workload.params) in published_models()


def _task_of(workload: Workload, scenarios: Sequence[Scenario]) -> Task:
    """Return the task that estimates a workload, with all that the result depends on."""
    first = scenarios[0]  # all have the same cluster and profiles
    requests = {
        one.spec.requested_gpus
        for scenario in scenarios
        for one in scenario.arrivals
        if one.spec.workload == workload
    }
    model = (workload.model, workload.params)
    measured = [e for e in first.profiles if (e.workload.model, e.workload.params) == model]
    return Task(
        name=f"estimates of {workload.key}",
        function=TASK,
        options={
            "workload": asdict(workload),
            "requests": sorted(requests),
            "kinds": [
                [
                    asdict(kind),
                    sorted(node.gpus for node in first.nodes if node.gpu_type == kind.name),
                ]
                for kind in first.gpu_types
            ],
            "measured": rows_of(measured),
        },
    )


def estimate_workload(
    workload: dict[str, Any],
    requests: Sequence[int],
    kinds: Sequence[tuple[dict[str, Any], list[int]]],
    measured: Sequence[EstimateRow],
) -> dict[str, Any]:
    """Return the rows of a workload's estimates, by what rounds may know.

    ``requests`` are the numbers of GPUs that its jobs request. ``kinds`` are the cluster's GPU types,
    each with the GPUs of its nodes. ``measured`` are the profiles of the workload's model on any
    batch, which are the truth.
    """
    cluster = [
        ClusterGpuType(gpu_type=GpuType(**kind), node_gpus=max(sizes, default=0), gpus=sum(sizes))
        for kind, sizes in kinds
    ]
    result = WorkloadEstimates.of(Workload(**workload), cluster, records_of(measured))
    counts = gpu_counts_of(requests, GPU_MULTIPLES)
    return {name: rows_of(result.records(name, counts)) for name in KNOWLEDGE}


@dataclass(frozen=True, kw_only=True)
class WorkloadEstimates:
    """The estimates of one workload on the GPU types of a cluster."""

    workload: Workload
    kinds: Mapping[str, ClusterGpuType]  # those of the catalogue that have nodes
    truth: Sequence[EstimateRecord]  # of the workload itself
    plain: Estimator  # by data sheets
    profiled: Estimator  # by profiles, on the GPU types that have one

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Iterable[ClusterGpuType],
        measured: Sequence[EstimateRecord],
    ) -> WorkloadEstimates:
        """Build the estimators. ``measured`` are the true times of the workload's model.

        Raises:
            InvalidInput: the model is unknown.
        """
        catalogue = catalogue_of()
        kinds = {k.gpu_type.name: k for k in cluster if k.gpus and k.gpu_type.name in catalogue}
        hardware = {name: hardware_of("gpu_type", k, catalogue) for name, k in kinds.items()}
        model = model_of("model", workload, ())
        batches = {workload, *(e.workload for e in measured)}
        plain = Estimator(hardware, dict.fromkeys(batches, model))
        profiles = {
            name: profile
            for name in kinds
            if (profile := _profile_on(name, plain, model, measured)) is not None
        }
        return cls(
            workload=workload,
            kinds=kinds,
            truth=[e for e in measured if e.workload == workload],
            plain=plain,
            profiled=Estimator(hardware, {workload: replace(model, profiles=profiles)}),
        )

    def records(self, name: str, counts: Iterable[int]) -> Iterator[EstimateRecord]:
        """Yield the estimates for GPU counts: one for each GPU type, count and shape.

        Jobs run the plan that a search finds when they start. An estimate is therefore that of the
        Cell which is truly the fastest on this type and count. If none runs there, there is no
        estimate.
        """
        for gpu_type, kind in self.kinds.items():
            for gpus in counts:
                cell = self._true_cell(gpu_type, gpus) if gpus <= kind.gpus else None
                if cell is None:
                    continue
                for nodes, best in sorted(self._best_on(name, gpu_type, gpus).items()):
                    yield EstimateRecord(
                        workload=self.workload,
                        cell=cell.on(nodes),
                        iter_time_s=best.iter_time_s,
                        source=best.source,
                    )

    def _best_on(self, name: str, gpu_type: str, gpus: int) -> dict[int, EstimateRecord]:
        """Return the fastest estimate on each number of nodes."""
        nodes = self.kinds[gpu_type].nodes
        if name == DATA_PARALLEL:
            found = self._data_parallel(gpu_type, gpus, nodes)
        else:
            estimator = self.profiled if name == PLANNED else self.plain
            found = [c.record for c in estimator.cells(self.workload, gpu_type, gpus, nodes=nodes)]
        best: dict[int, EstimateRecord] = {}
        for record in found:
            here = best.setdefault(record.cell.nodes, record)
            if record.iter_time_s < here.iter_time_s:
                best[record.cell.nodes] = record
        return best

    def _data_parallel(self, gpu_type: str, gpus: int, nodes: int) -> list[EstimateRecord]:
        """Return the estimates of the plan in which each GPU has the whole model.

        It has the model's own number of micro-batches, or as many as divide its samples among the
        GPUs.
        """
        if self.workload.global_batch % gpus:
            return []
        plan = self.data_parallel_plan(gpus)
        return estimate_stated_plan(self.profiled, self.workload, gpu_type, plan, nodes)

    def data_parallel_plan(self, gpus: int) -> ExecutionPlan:
        """Return the plan of pure data parallelism on ``gpus`` GPUs, which divide the batch."""
        model, batch = model_of("model", self.workload, ()), self.workload.global_batch
        training = model.training.at(batch)
        most = training.micro_batches
        accumulation = next(n for n in range(most, 0, -1) if batch % (n * gpus) == 0)
        return ExecutionPlan(
            stages=(PlanStage(start=0, end=len(model.graph), dp=gpus),),
            micro_batch=batch // accumulation,
            accumulation=accumulation,
            schedule=training.schedule,
            zero=ZeroStage(model.zero),
            offload=Offload.NONE,
            recomputation=Recomputation.FULL if training.checkpointing else Recomputation.NONE,
            precision=Precision(model.graph.dtype),
        )

    def _true_cell(self, gpu_type: str, gpus: int) -> Cell | None:
        """Return the Cell that is truly the fastest, or None if none runs."""
        there = [
            e
            for e in self.truth
            if (e.cell.gpu_type, e.cell.gpus) == (gpu_type, gpus) and math.isfinite(e.iter_time_s)
        ]
        fastest = min(there, key=lambda e: e.iter_time_s, default=None)
        return None if fastest is None else fastest.cell.on(0)


def _profile_on(
    gpu_type: str, plain: Estimator, model: Model, measured: Iterable[EstimateRecord]
) -> Profile | None:
    """Return what stands for a profile of the model on a GPU type, or None if it never ran there.

    The forward and backward seconds of the data sheet, for the sizes that tasks measure, are
    multiplied by one ratio.
    """
    ratio = measured_ratio(gpu_type, plain, measured)
    if ratio is None:
        return None
    graph = coarsen_graph(model.graph, COARSE_LAYERS).graph
    samples = np.array(ProfilingOptions().samples, dtype=np.float64)
    compute = RooflineCompute(hardware=plain.hardware[gpu_type])
    both_s = compute.layer_s(graph, model.training, samples, np.ones(len(samples), dtype=np.int64))
    forward_s, backward_s = (ratio * layers_s.sum(axis=1) for layers_s in both_s)
    points = tuple(zip(samples.tolist(), forward_s.tolist(), backward_s.tolist(), strict=True))
    return Profile(points={1: points}, device=gpu_type, date="", records=len(points), device_s=0.0)


def measured_ratio(
    gpu_type: str, plain: Estimator, measured: Iterable[EstimateRecord]
) -> float | None:
    """Return the measured over the estimated seconds of the smallest run on a GPU type.

    It is the run on the fewest GPUs, then of the smallest batch. A run for which no plan fits by the
    estimator is skipped. If there is no run, return None.
    """
    runs = [e for e in measured if e.cell.gpu_type == gpu_type and math.isfinite(e.iter_time_s)]
    for run in sorted(runs, key=lambda e: (e.cell.gpus, e.workload.global_batch, e.iter_time_s)):
        estimates = plain.cells(run.workload, gpu_type, run.cell.gpus)
        nodes = run.cell.nodes or min(e.record.cell.nodes for e in estimates)
        estimated_s = min(
            (e.record.iter_time_s for e in estimates if e.record.cell.nodes == nodes),
            default=math.inf,
        )
        if math.isfinite(estimated_s):
            return run.iter_time_s / estimated_s
    return None
