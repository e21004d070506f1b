"""A job's rate by the bandwidth of its network, as the estimator's cost model predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.hardware import Hardware
from tessera.estimator.models import Model
from tessera.estimator.plans import shape_on
from tessera.estimator.pricing.price import price_plan
from tessera.formulation.answer.job_curves import CurveCell
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Workload
from tessera.formulation.job.execution_plan import ExecutionPlan

FACTORS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Multiples of the network's bandwidth at which a job is priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPoint:
    """The fastest Cell at a bandwidth, with its rate there."""

    bytes_per_s: float  # of one node
    cell: CurveCell


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthCurve:
    """The best rate by bandwidth, or why it is not known."""

    points: tuple[BandwidthPoint, ...] = ()
    unknown_reason: str = ""


def trace_bandwidth(
    workload: Workload,
    model: Model,
    hardware: Hardware,
    cells: Sequence[CurveCell],
    plans: Mapping[int, ExecutionPlan],
) -> BandwidthCurve:
    """Return the best rate of ``cells``, all on one GPU type, at each of ``FACTORS``.

    A Cell's rate changes by as much as the cost model's time of its execution plan, so that it is its
    estimate at the present bandwidth. ``plans`` has the plans that are recorded, by the index that
    Cells name. Cells without one, or that the model cannot price, are left out.
    """
    recorded = [cell for cell in cells if cell.plan in plans]
    if not recorded:
        count = cells[0].demand.gpus if cells else 0
        return BandwidthCurve(
            unknown_reason=f"the Cells on {count} GPUs name no recorded execution plan, so none can be"
            " priced; estimate them with `tessera estimate`"
        )
    priced, problem = list[Sequence[CurveCell]](), ""
    for cell in recorded:
        try:
            priced.append(list(_at_factors(workload, model, hardware, cell, plans[cell.plan])))
        except InvalidInput as wrong:
            problem = str(wrong)
    if not priced:
        return BandwidthCurve(unknown_reason=f"the cost model cannot price the plans: {problem}")
    return BandwidthCurve(
        points=tuple(
            BandwidthPoint(
                bytes_per_s=factor * hardware.network_bytes_per_s,
                cell=max(at_factor, key=lambda cell: cell.rate),
            )
            for factor, at_factor in zip(FACTORS, zip(*priced, strict=True), strict=True)
        )
    )


def _at_factors(
    workload: Workload, model: Model, hardware: Hardware, cell: CurveCell, plan: ExecutionPlan
) -> Iterator[CurveCell]:
    """Yield the Cell with its rate at each of ``FACTORS``."""
    shape = shape_on(cell.demand.gpus, cell.nodes, hardware.gpus_per_node)
    if shape is None:
        raise InvalidInput("nodes", f"{cell.nodes} nodes cannot share the GPUs evenly")

    def price_s(factor: float) -> float:
        network = factor * hardware.network_bytes_per_s
        scaled = {hardware.name: replace(hardware, network_bytes_per_s=network)}
        setting = Estimator(scaled, {workload: model}).setting(workload, hardware.name, shape)
        return price_plan(setting, replace(plan, shape=shape.each_node)).iter_time_s

    now_s = price_s(1.0)
    for factor in FACTORS:
        yield replace(cell, rate=cell.rate * now_s / price_s(factor))
