"""Views of a stated plan next to our best plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from tessera.estimator.cells import Setting
from tessera.estimator.hardware import GIB
from tessera.estimator.pricing.price import PlanPrice
from tessera.estimator.stated.comparison import (
    PlanComparison,
    compare_plan,
    describe_differences,
)
from tessera.estimator.stated.completion import PlanContext
from tessera.estimator.stated.statement import StatedPlan
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ZeroStage, check_fits
from tessera.service.cli.estimates.modelling import DescribedModel
from tessera.service.cli.estimates.statedplan import GivenPlan, execution_plan
from tessera.service.cli.render import Column, format_number, print_line, print_note, show_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A comparison in a setting."""

    model: DescribedModel
    setting: Setting
    comparison: PlanComparison

    def show(self, *, as_json: bool) -> None:
        """Print the comparison."""
        if as_json:
            print_line(json.dumps(self._document(), indent=2))
            return
        show_table(list(self._rows()), _COLUMNS)
        for text in self.sentences():
            print_note(text)

    def _rows(self) -> Iterator[_PlanRow]:
        found, batch = self.comparison, self.model.training.global_batch
        prices = {"stated": found.stated, "ours": found.best}
        degree = found.stated.plan.pipeline_degree
        if found.best is not None and found.best.plan.pipeline_degree != degree:
            prices[f"ours, {degree} stage{'s' * (degree > 1)}"] = found.same_degree
        for name, price in prices.items():
            if price is not None:
                yield _PlanRow(
                    name=name, price=price, batch=batch, stated_s=found.stated.iter_time_s
                )

    def sentences(self) -> Iterator[str]:
        """Yield what a user should know: the memory, the differences, and why ours may be slower."""
        found = self.comparison
        miss = found.stated.overflow
        if miss is not None:
            over = miss.needed_bytes - miss.limit_bytes
            yield f"the stated plan does not fit, by {over / GIB:.1f} GiB: {miss}"
        if found.best is None:
            yield "the search found no plan of ours that fits on these GPUs"
        else:
            yield from self._about_ours(found.best)

    def _about_ours(self, best: PlanPrice) -> Iterator[str]:
        found = self.comparison
        differences = describe_differences(best.plan, found.stated.plan)
        texts = ", ".join(differences) or "nothing: it is the same plan"
        yield f"ours has {texts}" if differences else f"ours changes {texts}"
        if not found.stated_wins:
            return
        gain = best.iter_time_s / found.stated.iter_time_s - 1
        yield (
            f"the stated plan is {100 * gain:.1f} % faster than the best that the search considered: it has"
            " degrees, a precision or cuts that the search does not try"
        )

    def _document(self) -> dict[str, Any]:
        found, model, setting = self.comparison, self.model, self.setting
        return {
            "model": model.name,
            "params": model.params,
            "global_batch": model.training.global_batch,
            "gpu_type": setting.hardware.name,
            "gpus": setting.shape.gpus,
            "nodes": setting.shape.nodes,
            "node_gpus": setting.hardware.gpus_per_node,
            "stated": self._price(found.stated),
            "ours": self._price(found.best),
            "ours_same_degree": self._price(found.same_degree),
            "ratio": found.stated.iter_time_s / found.best.iter_time_s if found.best else None,
            "stated_is_faster": found.stated_wins,
            "notes": list(self.sentences()),
        }

    def _price(self, price: PlanPrice | None) -> dict[str, Any] | None:
        if price is None:
            return None
        return {
            "plan": json.loads(price.plan.to_json()),
            "digest": price.plan.digest,
            "text": str(price.plan),
            "iter_time_s": price.iter_time_s,
            "samples_per_s": self.model.training.global_batch / price.iter_time_s,
            "memory_bytes": list(price.memory_bytes),
            "memory_limit_bytes": price.limit_bytes,
            "overflow": None if price.overflow is None else asdict(price.overflow),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanRow:
    """A plan in a row of the table."""

    name: str
    price: PlanPrice
    batch: int
    stated_s: float


def _memory(row: _PlanRow) -> str:
    price = row.price
    most = max(price.memory_bytes)
    used = f"{most / GIB:.1f} of {price.limit_bytes / GIB:.1f} GiB"
    if len(price.memory_bytes) > 1:
        used += f", stage {price.memory_bytes.index(most)}"
    return used if price.overflow is None else f"{used}: too much"


_COLUMNS: Final = [
    Column[_PlanRow]("", lambda r: r.name),
    Column[_PlanRow]("ITERATION", lambda r: f"{format_number(r.price.iter_time_s)} s", right=True),
    Column[_PlanRow](
        "SAMPLES/S", lambda r: format_number(r.batch / r.price.iter_time_s), right=True
    ),
    Column[_PlanRow]("SPEED", lambda r: f"{r.stated_s / r.price.iter_time_s:.2f}", right=True),
    Column[_PlanRow]("FULLEST GPU", _memory),
    Column[_PlanRow]("PLAN", lambda r: str(r.price.plan)),
]


def compare_stated(
    model: DescribedModel,
    setting: Setting,
    plan: GivenPlan,
    *,
    as_json: bool,
) -> None:
    """Print the price of a stated plan next to those of our best ones.

    Raises:
        InvalidInput: the plan contradicts itself, the model, the GPUs or the batch.
    """
    context = PlanContext(
        graph=model.graph,
        training=model.training,
        shape=setting.shape,
        zero=ZeroStage(model.states.zero),
        model=f"{model.name}/{model.params}",
    )
    whole = execution_plan(plan, context)
    workload = Workload(
        model=model.name, params=model.params, global_batch=model.training.global_batch
    )
    check_fits(whole, "--plan", workload, setting.shape.gpus, len(model.graph))
    view = PlanView(model=model, setting=setting, comparison=compare_plan(setting, whole))
    view.show(as_json=as_json)
    for text in plan.notes if isinstance(plan, StatedPlan) else ():
        print_note(text)
