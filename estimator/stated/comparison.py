"""A stated plan compared with the best plans of our own search on the same GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.estimator.cells import Setting
from tessera.estimator.plan_search import PlanSearch
from tessera.estimator.planning.uniform import possible_degrees
from tessera.estimator.pricing.price import PlanPrice, plan_setting, price_plan
from tessera.formulation.job.execution_plan import ExecutionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """A stated plan with the best plans that the search found.

    ``best`` has any pipeline degree, and ``same_degree`` that of the stated plan. They are None if
    no plan fits.
    """

    stated: PlanPrice
    best: PlanPrice | None
    same_degree: PlanPrice | None

    @property
    def stated_wins(self) -> bool:
        """Return whether the stated plan fits and is faster than the best one."""
        fits = self.stated.overflow is None
        return fits and (
            self.best is None or self.stated.iter_time_s < self.best.iter_time_s * (1 - 1e-9)
        )


def compare_plan(setting: Setting, plan: ExecutionPlan) -> PlanComparison:
    """Return a stated plan's price with those of our best plans on the same GPUs.

    The search keeps the stated plan's precision, except that fp8 counts as bf16.

    Raises:
        InvalidInput: the plan cannot be priced in the setting; names its field.
    """
    stated = price_plan(setting, plan)
    own = replace(setting, graph=plan_setting(setting, plan).graph)
    degrees = {*possible_degrees(len(own.graph), own.shape.gpus), plan.pipeline_degree}
    best = PlanSearch(own, model=plan.model, degrees=degrees).best_by_degree()
    fitting = [price for price in best.values() if price.overflow is None]
    same = best.get(plan.pipeline_degree)
    return PlanComparison(
        stated=stated,
        best=min(fitting, key=lambda price: price.iter_time_s, default=None),
        same_degree=same if same in fitting else None,
    )


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
    switches = ours.switches(), stated.switches()
    if switches[0] != switches[1]:
        texts.append(
            " instead of ".join(", ".join(some) or "no other switches" for some in switches)
        )
    if ours.chunks != stated.chunks:
        texts.append(f"{_chunks(ours)} instead of {_chunks(stated)}")
    elif [s.end for s in ours.stages] != [s.end for s in stated.stages] and not texts:
        texts.append("other layers in its stages")
    return texts


def _stages(plan: ExecutionPlan) -> str:
    degree = plan.pipeline_degree
    return f"{degree} stage{'s' * (degree > 1)}"


def _chunks(plan: ExecutionPlan) -> str:
    return f"{plan.chunks} chunks for each stage" if plan.chunks > 1 else "no chunks"
