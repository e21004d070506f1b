"""A stated plan compared with the best plans of our own search on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.cells import (
    COARSE_LAYERS,
    Planner,
    Setting,
    degrees_of,
    plan_cells,
)
from tessera.estimator.graph import merged_ends
from tessera.estimator.plans import PricedPlan, powers_of_two
from tessera.estimator.pricing.price import PlanPrice, plan_setting, price_plan
from tessera.formulation.execution_plan import ExecutionPlan, PlanStage, Schedule

MAX_GPUS_OF_ALL_COUNTS: Final = 128
"""Largest number of GPUs on which all usual numbers of micro-batches are tried. A search takes up to
a second there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """A stated plan with the best plans that the search found.

    ``best`` has any pipeline degree, and ``same_degree`` that of the stated plan. They are None if
    no plan fits. ``unsearched`` names what the search does not consider in the stated plan.
    """

    stated: PlanPrice
    best: PlanPrice | None
    same_degree: PlanPrice | None
    unsearched: tuple[str, ...]

    @property
    def stated_wins(self) -> bool:
        """Return whether the stated plan fits and is faster than the best one."""
        fits = self.stated.overflow is None
        return fits and (
            self.best is None or self.stated.iter_time_s < self.best.iter_time_s * (1 - 1e-9)
        )


def compare_plan(
    setting: Setting, plan: ExecutionPlan, planner: Planner = Planner.EXACT
) -> PlanComparison:
    """Return a stated plan's price with those of our best plans on the same GPUs.

    The search keeps the stated plan's ZeRO stage, offload, recomputation and precision. It tries
    the plan's and the setting's number of micro-batches, and all powers of two. On more than
    :data:`MAX_GPUS_OF_ALL_COUNTS` GPUs, it tries half and twice the plan's number instead of them.

    Raises:
        InvalidInput: the plan cannot be priced in the setting; names its field.
    """
    stated = price_plan(setting, plan)
    ours = [price for price in _searched_prices(setting, plan, planner) if price.overflow is None]
    degree = plan.pipeline_degree
    return PlanComparison(
        stated=stated,
        best=_fastest(ours),
        same_degree=_fastest(p for p in ours if p.plan.pipeline_degree == degree),
        unsearched=tuple(unsearched_features(setting, plan)),
    )


def _fastest(prices: Iterable[PlanPrice]) -> PlanPrice | None:
    return min(prices, key=lambda price: price.iter_time_s, default=None)


def _searched_prices(
    setting: Setting, plan: ExecutionPlan, planner: Planner
) -> Iterator[PlanPrice]:
    """Yield the prices of the search's plans, by micro-batches and pipeline degree."""
    own = plan_setting(setting, plan)
    degrees = sorted({*degrees_of(setting.shape.gpus), min(plan.pipeline_degree, COARSE_LAYERS)})
    degrees = [degree for degree in degrees if degree <= len(setting.graph)]
    for count in _counts(setting, plan):
        training = replace(own.training, micro_batches=count)
        for found in plan_cells(replace(own, training=training), degrees, None, planner).values():
            yield price_plan(setting, _with_stated_switches(found, plan))


def _counts(setting: Setting, plan: ExecutionPlan) -> list[int]:
    """Return the numbers of micro-batches to try, all of which divide the batch."""
    own = plan.accumulation
    tried = {own, setting.training.micro_batches}
    if setting.shape.gpus <= MAX_GPUS_OF_ALL_COUNTS:
        tried |= set(powers_of_two(plan.global_batch))
    else:
        tried |= {own // 2, 2 * own}
    return sorted(n for n in tried if n > 0 and plan.global_batch % n == 0)


def _with_stated_switches(found: PricedPlan, stated: ExecutionPlan) -> ExecutionPlan:
    """Return a plan of the search with everything else as in the stated plan."""
    return replace(
        stated,
        stages=found.stages,
        micro_batch=stated.global_batch // found.micro_batches,
        accumulation=found.micro_batches,
        schedule=Schedule.ONE_F_ONE_B,
        chunks=1,
    )


def unsearched_features(setting: Setting, plan: ExecutionPlan) -> Iterator[str]:
    """Yield what the search does not consider in a plan."""
    stages = plan.stages
    if any(stage.sp for stage in stages):
        yield "sequence parallelism"
    if any(stage.cp > 1 for stage in stages):
        yield "context parallelism"
    if plan.chunks > 1:
        yield f"{plan.chunks} chunks of layers on each stage's GPUs"
    if plan.pipeline_degree > COARSE_LAYERS:
        yield f"more than {COARSE_LAYERS} stages"
    odd = {d for s in stages for d in (s.tp, s.ep) if not _is_power(d)}
    odd |= {s.gpus for s in stages if not _is_power(s.gpus) and plan.pipeline_degree > 1}
    if odd:
        yield f"degrees and stages of {', '.join(map(str, sorted(odd)))} GPUs, only powers of two"
    coarse = set(merged_ends(setting.graph, COARSE_LAYERS).tolist())
    if plan.chunks == 1 and any(stage.end not in coarse for stage in stages):
        yield f"stages that end inside its {COARSE_LAYERS} coarse layers"


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0


def without_features(plan: ExecutionPlan) -> Iterator[tuple[str, ExecutionPlan]]:
    """Yield a plan without each of the features that the search lacks, with the feature's name."""
    if any(stage.sp for stage in plan.stages):
        stages = tuple(replace(stage, sp=False) for stage in plan.stages)
        yield "sequence parallelism", replace(plan, stages=stages)
    if plan.chunks > 1:
        yield "chunks", join_chunks(plan)


def join_chunks(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with one stage for each stage's chunks, with as many layers as they have."""
    degree = plan.pipeline_degree
    stages: list[PlanStage] = []
    for index, stage in enumerate(plan.stages[:degree]):
        start = stages[-1].end if stages else 0
        layers = sum(part.end - part.start for part in plan.stages[index::degree])
        stages.append(replace(stage, start=start, end=start + layers))
    return replace(plan, stages=tuple(stages), chunks=1, schedule=Schedule.ONE_F_ONE_B)


def describe_differences(ours: ExecutionPlan, stated: ExecutionPlan) -> Sequence[str]:
    """Return what is different in our plan, in words."""
    texts: list[str] = []
    if ours.pipeline_degree != stated.pipeline_degree:
        texts.append(f"{_stages(ours)} instead of {_stages(stated)}")
    theirs = {str(replace(s, start=0, end=1)) for s in stated.stages}
    own = list(dict.fromkeys(str(replace(s, start=0, end=1)) for s in ours.stages))
    if set(own) != theirs:
        texts.append(f"{' and '.join(own)} in its stages instead of {' and '.join(sorted(theirs))}")
    if ours.accumulation != stated.accumulation:
        plural = "es" * (ours.accumulation > 1)
        texts.append(
            f"{ours.accumulation} micro-batch{plural} of {ours.micro_batch} samples instead of"
            f" {stated.accumulation} of {stated.micro_batch}"
        )
    if ours.chunks != stated.chunks:
        texts.append(f"no chunks instead of {stated.chunks} for each stage")
    elif [s.end for s in ours.stages] != [s.end for s in stated.stages] and not texts:
        texts.append("other layers in its stages")
    return texts


def _stages(plan: ExecutionPlan) -> str:
    degree = plan.pipeline_degree
    return f"{degree} stage{'s' * (degree > 1)}"
