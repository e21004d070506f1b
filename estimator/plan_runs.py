"""The runs of a job's own program that teach the times of all of its plans (Morphling, A.3).

A run is a job like the one that asked for it: the same program, for a short time, by a plan of its
own. Seven are chosen before anything was measured, at least three with ZeRO-Offload if its plans may
use that. They have the least weight and the last priority, and run on GPUs that nobody else wants. Their
measured times are those of the workload, like any other's. Nothing here has side effects.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.plan_corrections import configuration_of
from tessera.estimator.plan_search import PlanSearch
from tessera.estimator.plans import shapes_of
from tessera.estimator.profiling.tasks import LAST_PRIORITY, LEAST_WEIGHT
from tessera.estimator.reconfiguration import Configuration, choose_runs
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import RUN_LABEL
from tessera.formulation.job.execution_plan import ExecutionPlan, model_name
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.estimates import ClusterGpuType
from tessera.formulation.records.jobs import JobSpec

LEAST_ITERATIONS: Final = 30
"""Fewest iterations of a run, of which the first ones are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan that may be measured on a GPU type, with its predicted iteration time."""

    gpu_type: str
    plan: ExecutionPlan
    iter_time_s: float
    configuration: Configuration


def why_not_run(spec: JobSpec) -> str:
    """Return why plans of a job cannot be measured by runs of its program, or ""."""
    if not RUNTIMES[spec.runtime].trains:
        return f"its runtime {spec.runtime} trains nothing that could be measured"
    if spec.plan is not None and not spec.plan_first:
        return "it must run by the plan that its user states"
    return ""


def chosen_type(spec: JobSpec, kinds: Iterable[ClusterGpuType]) -> ClusterGpuType | None:
    """Return the GPU type of a job's runs: the requested one, or else that with the most GPUs."""
    there = {kind.gpu_type.name: kind for kind in kinds}
    if spec.requested_gpu_type:
        return there.get(spec.requested_gpu_type)
    return max(there.values(), key=lambda kind: kind.gpus, default=None)


def list_choices(
    estimator: Estimator, spec: JobSpec, kind: ClusterGpuType, counts: Iterable[int]
) -> list[PlanChoice]:
    """Return the plans of a job that fit on some GPUs of a type and that the models cover."""
    gpu_type, workload = kind.gpu_type.name, spec.workload
    limits = PlanLimits(runtime=spec.runtime, techniques=spec.techniques)
    choices = []
    for gpus in counts:
        for shape in shapes_of(gpus, estimator.hardware[gpu_type].gpus_per_node, kind.nodes):
            setting, name = estimator.setting(workload, gpu_type, shape), model_name(workload)
            search = PlanSearch(setting, limits, name, node=kind.node_capacity)
            for price in search.find_each_kind():
                try:
                    configuration = configuration_of(setting, price.plan, name)
                except InvalidInput:  # the models do not cover it, so it would teach nothing
                    continue
                choices.append(
                    PlanChoice(
                        gpu_type=gpu_type,
                        plan=price.plan,
                        iter_time_s=price.iter_time_s,
                        configuration=configuration,
                    )
                )
    return choices


def runs_of_job(
    spec: JobSpec, choices: Sequence[PlanChoice], runs: int, run_s: float
) -> list[JobSpec]:
    """Return the jobs that measure the plans of ``choices`` which teach most.

    Each takes about ``run_s`` seconds, and at least :data:`LEAST_ITERATIONS` iterations. All
    creators give the jobs the same names, so that they are created once.

    Raises:
        InvalidInput: there are fewer choices than runs; the message says what would be enough.
    """
    chosen = choose_runs([choice.configuration for choice in choices], runs=runs)
    return [_run(spec, choices[at], number, run_s) for number, at in enumerate(chosen)]


def _run(spec: JobSpec, choice: PlanChoice, number: int, run_s: float) -> JobSpec:
    text = f"{model_name(spec.workload)}/{spec.workload.global_batch}/{spec.runtime}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return replace(
        spec,
        name=f"run-{digest}-{number}-{choice.gpu_type}",
        iterations=max(LEAST_ITERATIONS, math.ceil(run_s / choice.iter_time_s)),
        requested_gpus=choice.plan.gpus,
        requested_gpu_type=choice.gpu_type,
        pinned_gpu_type=True,
        priority=LAST_PRIORITY,
        weight=LEAST_WEIGHT,
        guaranteed=False,
        deadline_s=math.inf,
        restart_s=0.0,
        labels={RUN_LABEL: spec.name},
        max_retries=1,
        profile=False,
        min_gpus=0,
        max_gpus=0,
        plan=choice.plan,
        plan_first=False,
        submitted_plan="",
        requested_cpus=0,
        launch=replace(spec.launch, tuning_space="", tuning_budget_s=0.0),
    )
