"""The best execution plans for runtimes and techniques that cannot run every plan.

A search over all plans may find one for a Cell that such a runtime, or a job with few techniques,
cannot run. Here, every stage has
the same parallelism and as many blocks as the others, and the batch, ZeRO, recomputation and
offload are tried. Of the plans that the runtime does not refuse, the fastest one that fits is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Final

from tessera.estimator.cells import Setting, degrees_of
from tessera.estimator.graph import Graph
from tessera.estimator.plans import powers_dividing, powers_of_two, shapes_of
from tessera.estimator.pricing.price import PlanPrice, check_degrees, price_plan
from tessera.estimator.stated.estimates import traffic_of_price
from tessera.estimator.workloads import MAX_PROVENANCE, CellEstimate, Estimator
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    ZeroStage,
    model_name,
)
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.runtimes import RUNTIMES
from tessera.formulation.techniques import Technique, refuse_techniques
from tessera.formulation.values import Cell, EstimateSource, Workload

MAX_ACCUMULATION: Final = 2**12
"""Largest number of micro-batches that is tried."""

_OFFLOADS: Final = ((Offload.NONE,), (Offload.OPTIMIZER, Offload.PARAMETERS))
"""The offloads that are tried together. Later ones are slower, so they are tried if nothing fits."""


def estimate_runnable_plans(
    estimator: Estimator,
    workload: Workload,
    gpu_type: str,
    gpus: int,
    runtimes: Iterable[str],
    searched: Sequence[CellEstimate],
    nodes: int | None = None,
    exhausted: Collection[Cell] = (),
    limited: Iterable[tuple[str, tuple[Technique, ...]]] = (),
) -> list[EstimateRecord]:
    """Return the estimate of the best plan of each runtime on each shape of some GPUs.

    ``limited`` are further runtimes, for jobs that can use only the given techniques.

    ``searched`` are the estimates of the best plans of the same Cells. What measurements teach about
    them corrects these estimates, too. Plans that are among them are left out. If no plan of a
    runtime fits in memory, the one that needs least is infeasible. A runtime without any plan, e.g.
    because the batch cannot be divided among the GPUs, has no estimate. ``exhausted`` are Cells on
    shapes by plans that ran out of memory, although they should have fitted.
    """
    records: dict[Cell, EstimateRecord] = {}
    every: tuple[Technique, ...] = ()
    abilities = [*((runtime, every) for runtime in runtimes), *limited]
    for shape in shapes_of(gpus, estimator.hardware[gpu_type].gpus_per_node, nodes):
        cell = Cell(gpu_type=gpu_type, gpus=gpus, pipeline_degree=1, nodes=shape.nodes)
        setting = estimator.setting(workload, cell, shape)
        empty = EstimateRecord(
            workload=workload,
            cell=cell,
            iter_time_s=math.inf,
            source=EstimateSource.PROFILED if setting.timed else EstimateSource.ANALYTIC,
        )
        names = {c.plan for c in exhausted if (c.gpu_type, c.gpus) == (gpu_type, gpus)}
        for runtime, techniques in abilities:
            price = find_runnable_plan(setting, runtime, model_name(workload), names, techniques)
            if price is not None:
                program = " ".join((runtime, *techniques))
                record = _record_of(empty, setting, price, program, searched)
                records.setdefault(record.cell, record)
    known = {estimate.record.cell for estimate in searched}
    return [record for cell, record in records.items() if cell not in known]


def find_runnable_plan(
    setting: Setting,
    runtime: str,
    model: str = "",
    exhausted: Container[str] = (),
    techniques: Collection[Technique] = (),
) -> PlanPrice | None:
    """Return the fastest plan that a runtime can run in a setting, or None if there is no plan.

    If there are ``techniques``, the plan uses no others.
    If none fits in memory, it is the one that exceeds the GPU's memory least. A plan that is
    ``exhausted`` (digests) needs more than the model predicts, so all plans are left out for which
    it predicts as much.
    """
    price = _find_plan(setting, runtime, model, techniques)
    while price is not None and price.overflow is None and price.plan.digest in exhausted:
        usable = setting.runtime.room.usable
        less = max(0, math.floor((max(price.memory_bytes) - 1.0) / usable))
        setting = replace(setting, hardware=replace(setting.hardware, memory_bytes=less))
        price = _find_plan(setting, runtime, model, techniques)
    return price


def _find_plan(
    setting: Setting, runtime: str, model: str, techniques: Collection[Technique]
) -> PlanPrice | None:
    over: list[PlanPrice] = []
    for offloads in _OFFLOADS:
        prices = list(_prices(setting, runtime, offloads, model, techniques))
        fitting = [price for price in prices if price.overflow is None]
        if fitting:
            return min(fitting, key=lambda price: price.iter_time_s)
        over += prices
    return min(over, key=lambda price: max(price.memory_bytes), default=None)


def _record_of(
    empty: EstimateRecord,
    setting: Setting,
    price: PlanPrice,
    runtime: str,
    searched: Sequence[CellEstimate],
) -> EstimateRecord:
    record, source = empty.with_plan(price.plan), empty.source.name.lower()
    if price.overflow is not None:
        note = f"{source}, for {runtime}: {price.overflow}"
        return replace(record, provenance=note[:MAX_PROVENANCE])
    factor, sd = _learned(searched, record.cell)
    return replace(
        record,
        iter_time_s=factor * price.iter_time_s,
        sd=sd,
        provenance=f"{source}, for {runtime}: {price.plan}"[:MAX_PROVENANCE],
        traffic=traffic_of_price(setting, price),
    )


def _learned(searched: Sequence[CellEstimate], cell: Cell) -> tuple[float, float | None]:
    """Return the factor by which learning corrects a Cell's best plan, and the uncertainty.

    It is that of the plan on the same shape, preferably of the same pipeline degree. Without one,
    nothing is corrected, and the uncertainty is not known.
    """
    fits = [
        (e.record.cell.pipeline_degree != cell.pipeline_degree, e.record, e.plan)
        for e in searched
        if e.plan is not None and e.record.cell.nodes == cell.nodes
    ]
    if not fits:
        return 1.0, None
    _, record, plan = min(fits, key=lambda fit: (fit[0], fit[1].iter_time_s))
    return record.iter_time_s / plan.iter_time_s, record.sd


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switches:
    """The part of a plan that does not divide the model."""

    zero: ZeroStage
    offload: Offload
    recomputation: Recomputation


def _prices(
    setting: Setting,
    runtime: str,
    offloads: Sequence[Offload],
    model: str,
    techniques: Collection[Technique],
) -> Iterator[PlanPrice]:
    """Yield the prices of plans that a runtime can run, among which the best one is."""
    refuse_plan = RUNTIMES[runtime].refuse_plan
    for stages in _divisions(setting):
        for switches in _switches(stages[0].dp, offloads):
            best_s = math.inf
            for plan in _plans(setting, stages, switches, model):
                if refuse_plan(plan) or refuse_techniques(plan, techniques):
                    break  # more micro-batches would not help
                try:
                    price = price_plan(setting, plan)
                except InvalidInput:  # the model does not allow the division
                    break
                yield price
                if price.overflow is None:
                    # More micro-batches only add time, except that they fill a pipeline better.
                    if len(stages) == 1 or price.iter_time_s > best_s:
                        break
                    best_s = price.iter_time_s


def _divisions(setting: Setting) -> Iterator[tuple[PlanStage, ...]]:
    """Yield the stages of each plan whose stages are alike, data parallelism first.

    Tensor parallelism stays within a node, because its collectives are part of each layer.
    """
    graph, shape = setting.graph, setting.shape
    for degree in degrees_of(shape.gpus):
        ends = _equal_ends(len(graph), degree)
        if not ends or shape.gpus % degree:
            continue
        each = shape.gpus // degree
        for tp, ep in product(powers_dividing(each), powers_dividing(each)):
            if tp > shape.gpus_per_node or (ep > 1 and not (graph.experts > 1).any()):
                continue
            stages = tuple(
                PlanStage(start=start, end=end, dp=each // tp, tp=tp, ep=ep)
                for start, end in pairwise((0, *ends))
            )
            if _are_possible(graph, stages):
                yield stages


def _equal_ends(layers: int, degree: int) -> list[int]:
    """Return the ends of stages with as many blocks each, or [] if the blocks do not divide.

    The first and the last layer are the embedding and the head, which are no blocks.
    """
    if degree == 1:
        return [layers]
    each, rest = divmod(layers - 2, degree)
    if rest or each < 1:
        return []
    return [1 + each * (stage + 1) for stage in range(degree - 1)] + [layers]


def _are_possible(graph: Graph, stages: Sequence[PlanStage]) -> bool:
    with suppress(InvalidInput):
        for stage in stages:
            check_degrees(graph, stage)
        return True
    return False


def _switches(dp: int, offloads: Iterable[Offload]) -> Iterator[_Switches]:
    """Yield the switches to try for a number of replicas, the simplest ones first."""
    for offload in offloads:
        if offload is Offload.NONE:
            zeros = list(ZeroStage) if dp > 1 else [ZeroStage.NONE]
        else:
            least = 3 if offload is Offload.PARAMETERS else 1
            zeros = [zero for zero in ZeroStage if zero >= least]
        for zero, recomputation in product(zeros, (Recomputation.NONE, Recomputation.FULL)):
            yield _Switches(zero=zero, offload=offload, recomputation=recomputation)


def _plans(
    setting: Setting, stages: tuple[PlanStage, ...], switches: _Switches, model: str
) -> Iterator[ExecutionPlan]:
    """Yield a plan for each number of micro-batches, the fewest first."""
    batch, replicas = setting.training.global_batch, stages[0].dp
    for count in _accumulations(batch // replicas) if batch % replicas == 0 else ():
        yield ExecutionPlan(
            stages=stages,
            micro_batch=batch // count,
            accumulation=count,
            zero=switches.zero,
            offload=switches.offload,
            recomputation=switches.recomputation,
            precision=Precision(setting.graph.dtype),
            shape=setting.shape.each_node,
            model=model,
        )


@lru_cache(maxsize=256)
def _accumulations(samples: int) -> tuple[int, ...]:
    """Return numbers of equal micro-batches of a replica's samples, rising.

    There is one for each power of two: the largest divisor up to it.
    """
    return tuple(
        dict.fromkeys(
            next(count for count in range(min(most, samples), 0, -1) if samples % count == 0)
            for most in powers_of_two(min(2 * samples, MAX_ACCUMULATION))
        )
    )
