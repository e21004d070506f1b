"""Remarks at submission on jobs of which their runtime can run no plan, however much memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tessera.estimator.architectures.published import published_models
from tessera.estimator.cells import data_sheet_setting
from tessera.estimator.gpu_counts import GPU_MULTIPLES, gpu_counts_of
from tessera.estimator.hardware import A100
from tessera.estimator.memory import States
from tessera.estimator.plan_search import has_division
from tessera.estimator.plans import Shape
from tessera.formulation.base.values import Workload
from tessera.formulation.job.runtimes import RUNTIMES
from tessera.formulation.job.techniques import PlanLimits
from tessera.formulation.records.jobs import JobSpec


def remark_plans(spec: JobSpec) -> str:
    """Return why a job's runtime can run no plan of its model, with what would do, or "".

    Only published models are looked at, and jobs without a plan of their own.
    """
    limits = PlanLimits(runtime=spec.runtime, techniques=spec.techniques)
    counts = _counts_of(spec)
    if limits.allow_every_plan or spec.plan is not None:
        return ""
    if _can_divide(spec.workload, counts, limits):
        return ""
    other_runtimes = [
        name
        for name, runtime in RUNTIMES.items()
        if runtime.is_for_users and runtime.trains and name != spec.runtime
        if _can_divide(spec.workload, counts, PlanLimits(runtime=name, techniques=spec.techniques))
    ]
    batch, counts_text = spec.workload.global_batch, _join_words([str(n) for n in counts])
    near_batch = spec.workload.nearest_batches(spec.requested_gpus)[0]
    ways = (
        [f"a batch that the GPUs divide evenly, e.g. {near_batch}"] if batch != near_batch else []
    )
    ways += [f"the runtime {_join_words(other_runtimes)}"] if other_runtimes else []
    ways += ["more techniques"] if limits.techniques else []
    return (
        f"{limits} can run no plan of {spec.workload.key} on {counts_text} GPUs, so the job will wait;"
        f" submit it with {', or '.join(ways) or 'another number of GPUs'}"
    )


def _counts_of(spec: JobSpec) -> tuple[int, ...]:
    """Return the numbers of GPUs that are estimated for a job and that it may have."""
    counts = {*gpu_counts_of([spec.requested_gpus], GPU_MULTIPLES), spec.min_gpus, spec.max_gpus}
    max_gpus = spec.max_gpus or max(counts)
    return tuple(sorted(n for n in counts if max(1, spec.min_gpus) <= n <= max_gpus))


def _join_words(words: Sequence[str]) -> str:
    """Return words as alternatives, e.g. "4, 8 or 16"."""
    *first_words, last_word = words
    return f"{', '.join(first_words)} or {last_word}" if first_words else last_word


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
