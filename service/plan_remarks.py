"""Remarks at submission on jobs of which their runtime can run no plan, however much memory there is."""

from __future__ import annotations

from functools import lru_cache

from tessera.estimator.architectures.published import published_models
from tessera.estimator.cells import data_sheet_setting
from tessera.estimator.gpu_counts import GPU_MULTIPLES, gpu_counts_of
from tessera.estimator.hardware import A100
from tessera.estimator.memory import States
from tessera.estimator.plan_search import has_division
from tessera.estimator.plans import Shape
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.runtimes import RUNTIMES
from tessera.formulation.techniques import PlanLimits
from tessera.formulation.values import Workload


def remark_plans(spec: JobSpec) -> str:
    """Return why a job's runtime can run no plan of its model, with what would do, or "".

    Only published models are looked at, and jobs without a plan of their own.
    """
    limits = PlanLimits(runtime=spec.runtime, techniques=spec.techniques)
    counts = tuple(gpu_counts_of([spec.requested_gpus], GPU_MULTIPLES))
    if limits.allow_every_plan or spec.stated_plan is not None:
        return ""
    if _can_divide(spec.workload, counts, limits):
        return ""
    other_runtimes = [
        name
        for name, runtime in RUNTIMES.items()
        if runtime.is_for_users and runtime.trains and name != spec.runtime
        if _can_divide(spec.workload, counts, PlanLimits(runtime=name, techniques=spec.techniques))
    ]
    batch, counts_text = spec.workload.global_batch, " or ".join(map(str, counts))
    near_batch = batch - batch % spec.requested_gpus or spec.requested_gpus
    ways = (
        [f"a batch that the GPUs divide evenly, e.g. {near_batch}"] if batch != near_batch else []
    )
    ways += [f"the runtime {' or '.join(other_runtimes)}"] if other_runtimes else []
    ways += ["more techniques"] if limits.techniques else []
    return (
        f"{limits} can run no plan of {spec.workload.key} on {counts_text} GPUs, so the job will wait;"
        f" submit it with {', or '.join(ways) or 'another number of GPUs'}"
    )


@lru_cache(maxsize=1024)
def _can_divide(workload: Workload, counts: tuple[int, ...], limits: PlanLimits) -> bool:
    """Return whether limits allow some plan of a workload on one of some numbers of GPUs.

    It is true for models that are not published.
    """
    model = published_models().get((workload.model, workload.params))
    return model is None or any(
        has_division(
            data_sheet_setting(
                model.graph,
                model.at(workload.global_batch),
                A100,
                Shape(nodes=1, gpus_per_node=gpus),
                States(),
            ),
            limits,
        )
        for gpus in counts
    )
