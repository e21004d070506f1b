"""Morphling's measured plans, as the performance model and the memory model read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from tessera.benchmarks.papers.morphling_figures.records import RATES, divide_batch
from tessera.estimator.architectures.published import published_models
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.hardware import A800
from tessera.estimator.memory import States
from tessera.estimator.plans import shape_on
from tessera.estimator.pricing.price import PlanPrice, price_plan
from tessera.estimator.reconfiguration.configurations import Configuration, TransformerFacts
from tessera.estimator.stated.completion import PlanContext, complete_plan
from tessera.estimator.stated.statement import StatedPlan
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ExecutionPlan, Offload, Recomputation, ZeroStage
from tessera.formulation.records.estimates import EstimateRecord

THREE_D, TENSOR = "3d", "tp"
"""The names of plan families that divide the model. All others are names of the artifact."""
_OFFLOAD: Final = "zero-offload"
_THREADS: Final = "-cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan of the artifact on its GPUs, with its degrees and switches."""

    record: EstimateRecord
    family: str  # THREE_D, TENSOR or the artifact's code, e.g. "zero-dp"
    pp: int
    tp: int
    dp: int
    zero: ZeroStage
    offload: bool
    checkpointing: bool

    @classmethod
    def of(cls, record: EstimateRecord) -> MeasuredPlan:
        """Return the plan that the Cell of a record names."""
        gpus = record.cell.gpus
        code = record.cell.plan.partition(_THREADS)[0]
        pp, tp, family = 1, 1, code
        if code.isdigit():
            pp, tp, family = int(code[0]), int(code[1]), THREE_D
            family = TENSOR if tp == gpus else THREE_D
        elif code == "tp-ga":
            tp, family = gpus, TENSOR
        return cls(
            record=record,
            family=family,
            pp=pp,
            tp=tp,
            dp=gpus // (pp * tp),
            zero=ZeroStage.GRADIENTS if code.startswith("zero") else ZeroStage.NONE,
            offload=code.startswith(_OFFLOAD),
            checkpointing=code.endswith("gc"),
        )

    @property
    def node_gpus(self) -> tuple[int, ...]:
        """Return the GPUs on each node, as even as they can be."""
        each, rest = divmod(self.record.cell.gpus, self.record.cell.nodes)
        nodes = self.record.cell.nodes
        return (each + 1,) * rest + (each,) * (nodes - rest)

    def configuration(self, facts: TransformerFacts, micro_batch: int) -> Configuration:
        """Return what the performance model reads.

        A 3D plan has micro-batches of ``micro_batch`` samples in each replica.
        """
        whole = Configuration(
            facts=facts,
            rates=RATES,
            global_batch=self.record.workload.global_batch,
            pp=self.pp,
            tp=self.tp,
            dp=self.dp,
            zero=self.zero,
            offload=self.offload,
            checkpointing=self.checkpointing,
            node_gpus=self.node_gpus,
            update_cores=max(1.0, self.record.cpus / self.record.cell.gpus),
        )
        return divide_batch(whole, micro_batch)

    def price(self) -> PlanPrice | None:
        """Return the price of our memory model with the largest micro-batch that fits.

        If none fits, it is that of the smallest. If the plan cannot run at all, it is None: it has
        more replicas than samples, or divides layers over nodes.
        """
        if self.tp > min(self.node_gpus):
            return None
        last = None
        for plan, setting in self._priced_plans():
            last = price_plan(setting, plan)
            if last.overflow is None:
                break
        return last

    def runs(self) -> bool:
        """Return whether the plan can run by our memory model. No measurement is read."""
        price = self.price()
        return price is not None and price.overflow is None

    def _priced_plans(self) -> Iterator[tuple[ExecutionPlan, Setting]]:
        """Yield the plan with each number of micro-batches, the fewest first."""
        setting, batch = self._setting(), self.record.workload.global_batch
        if batch % self.dp:
            return
        samples = batch // self.dp
        for micro_batch in (m for m in range(samples, 0, -1) if samples % m == 0):
            stated = StatedPlan(
                gpus=self.record.cell.gpus,
                pp=self.pp,
                tp=self.tp,
                dp=self.dp,
                zero=self.zero,
                offload=Offload.OPTIMIZER if self.offload else Offload.NONE,
                recomputation=Recomputation.FULL if self.checkpointing else Recomputation.NONE,
                micro_batch=micro_batch,
                accumulation=samples // micro_batch,
            )
            context = PlanContext(
                graph=setting.graph, training=setting.training, shape=setting.shape
            )
            yield complete_plan(stated, context), setting

    def _setting(self) -> Setting:
        work, cell = self.record.workload, self.record.cell
        return _setting(work.model, work.params, work.global_batch, cell.gpus, cell.nodes)


@cache
def _setting(model: str, params: str, batch: int, gpus: int, nodes: int) -> Setting:
    published = published_models()[model, params]
    shape = shape_on(gpus, nodes, max(A800.gpus_per_node, -(-gpus // nodes)))
    if shape is None:
        raise InvalidInput("nodes", f"{gpus} GPUs are not divided evenly over {nodes} nodes")
    return data_sheet_setting(published.graph, published.at(batch), A800, shape, States())
