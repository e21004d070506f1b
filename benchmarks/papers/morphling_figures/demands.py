"""The demand of each plan of a model on its fewest GPUs: Morphling's Figure 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tessera.benchmarks.papers.morphling_figures.plans import TENSOR, MeasuredPlan
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.figures import Figure

OFFLOAD: Final = "zero-offload"
GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDemand:
    """The demand of a family of plans on the fewest GPUs on which it was measured."""

    family: str
    plan: str
    gpus: int
    gpu_bytes: float  # of the fullest GPU, by the memory model
    host_bytes: int  # in all
    cpus: int  # cores in all
    sent_bytes_per_s: float  # of a GPU to others: modelled volume over the measured time

    def row(self) -> dict[str, Figure | str]:
        """Return the row of the table."""
        return {
            "figure": "2",
            "what": self.family,
            "choice": f"{self.plan} on {self.gpus} GPUs",
            "gpu_gb": self.gpu_bytes / GB,
            "host_gb": self.host_bytes / GB,
            "cpus": self.cpus,
            "sent_gb_per_s": self.sent_bytes_per_s / GB,
        }


def list_demands(records: Sequence[EstimateRecord]) -> list[PlanDemand]:
    """Return the demand of each family among the records of a model, in the order of their names."""
    running = [r for r in records if math.isfinite(r.iter_time_s)]
    least: dict[str, MeasuredPlan] = {}
    for record in sorted(running, key=lambda r: (r.cell.gpus, r.cell.nodes, r.iter_time_s)):
        plan = MeasuredPlan.of(record)
        least.setdefault(plan.family, plan)
    return [_demand(least[family]) for family in sorted(least)]


def _demand(plan: MeasuredPlan) -> PlanDemand:
    record, price = plan.record, plan.price()
    return PlanDemand(
        family=plan.family,
        plan=record.cell.plan,
        gpus=record.cell.gpus,
        gpu_bytes=math.nan if price is None else max(price.memory_bytes),
        host_bytes=record.host_bytes,
        cpus=record.cpus,
        sent_bytes_per_s=(
            math.nan if price is None else plan.sent_bytes(price) / record.iter_time_s
        ),
    )


def figure_2_figures(demands: Sequence[PlanDemand]) -> dict[str, Figure]:
    """Return the demands of ZeRO-Offload and of tensor parallelism over the most of the others.

    CPUs and host memory are in all. Those of tensor parallelism are given over ZeRO-Offload's.
    """
    by_family = {demand.family: demand for demand in demands}
    offload, tensor = by_family[OFFLOAD], by_family[TENSOR]
    others = [demand for demand in demands if demand is not offload]
    unlike = [demand for demand in demands if demand is not tensor]
    return {
        "figure2_offload_host_ratio": offload.host_bytes / max(d.host_bytes for d in others),
        "figure2_offload_cpus_ratio": offload.cpus / max(d.cpus for d in others),
        "figure2_tensor_sent_ratio": tensor.sent_bytes_per_s
        / max(d.sent_bytes_per_s for d in unlike),
        "figure2_tensor_cpus_share": tensor.cpus / offload.cpus,
        "figure2_tensor_host_share": tensor.host_bytes / offload.host_bytes,
    }
