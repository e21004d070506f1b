"""The best execution plans for runtimes and techniques that cannot run every plan.

A search over all plans may find one for a Cell that such a runtime, or a job with few techniques,
cannot run. Here, every stage has the same parallelism and as many blocks as the others, and the
batch, ZeRO, recomputation and offload are tried. Of the plans that the runtime does not refuse, and
that use only the techniques that the jobs name, the fastest one that fits is kept. Where nodes
state their CPU cores or host memory, slower plans that need less of these are kept, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Final

from tessera.estimator.cell_estimator import MAX_PROVENANCE, CellEstimate, Estimator
from tessera.estimator.cells import Setting, degrees_of
from tessera.estimator.graph import Graph
from tessera.estimator.hardware import GIB
from tessera.estimator.plans import powers_dividing, powers_of_two, shapes_of
from tessera.estimator.pricing.price import PlanPrice, check_degrees, price_plan
from tessera.estimator.stated.estimates import traffic_of_price
from tessera.formulation.demand import Capacity, Demand
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
from tessera.formulation.techniques import PlanLimits
from tessera.formulation.values import Cell, EstimateSource, Workload

MAX_ACCUMULATION: Final = 2**12
"""Largest number of micro-batches that is tried."""

CORES_PER_GPU: Final = (1, 2, 4, 8)
"""Numbers of CPU cores for each GPU that are tried for offloaded states."""

MIN_GAIN: Final = 0.01
"""Share of the time that a plan must save to be kept next to one that needs less of the hosts."""

_ON_GPUS: Final = (Offload.NONE,)
_OFFLOADED: Final = (Offload.OPTIMIZER, Offload.PARAMETERS)
"""The offloads that are tried together."""


def estimate_runnable_plans(
    estimator: Estimator,
    workload: Workload,
    gpu_type: str,
    gpus: int,
    limits: Iterable[PlanLimits],
    searched: Sequence[CellEstimate],
    nodes: int | None = None,
    exhausted: Collection[Cell] = (),
    node: Capacity | None = None,
) -> list[EstimateRecord]:
    """Return the estimates of the best plans within each of the limits on each shape of some GPUs.

    ``searched`` are the estimates of the best plans of the same Cells. What measurements teach about
    them corrects these estimates, too. Plans that are among them are left out. If no plan within
    limits fits in memory, the one that needs least is infeasible. Limits that allow no plan, e.g.
    because the batch cannot be divided among the GPUs, have no estimate. ``exhausted`` are Cells on
    shapes by plans that ran out of memory, although they should have fitted. ``node`` is what a node
    has. If it is None, its CPU cores and host memory are not known.
    """
    records: dict[Cell, EstimateRecord] = {}
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
        for own in limits:
            for price in find_runnable_plans(setting, own, model_name(workload), names, node):
                record = _record_of(empty, setting, price, own, searched, node)
                records.setdefault(record.cell, record)
    known = {estimate.record.cell for estimate in searched}
    return [record for cell, record in records.items() if cell not in known]


def find_runnable_plans(
    setting: Setting,
    limits: PlanLimits,
    model: str = "",
    exhausted: Container[str] = (),
    node: Capacity | None = None,
) -> list[PlanPrice]:
    """Return the best plans within limits that trade time for CPU cores and host memory.

    If ``node`` is None, this is the fastest plan, and offloaded states are tried only if nothing
    fits without. Otherwise they are tried with each of :data:`CORES_PER_GPU` that a node has. Each
    plan is faster, by :data:`MIN_GAIN`, than all that need no more cores and host memory. If
    nothing fits, the result is the one plan that :func:`find_runnable_plan` returns, if any.
    """
    if node is None:
        best = find_runnable_plan(setting, limits, model, exhausted)
        return [] if best is None else [best]
    on_gpus = _fastest_fitting(setting, limits, _ON_GPUS, 0, model, exhausted)
    prices = [] if on_gpus is None else [on_gpus]
    most_s = math.inf if on_gpus is None else (1.0 - MIN_GAIN) * on_gpus.iter_time_s
    for cores in reversed(_core_choices(setting, node)):
        price = _fastest_fitting(setting, limits, _OFFLOADED, cores, model, exhausted)
        if price is None or price.iter_time_s >= most_s:
            break  # with fewer cores, it needs as much memory and is slower
        prices.append(price)
    fitting = [price for price in prices if not _host_shortage(setting, price, node)]
    if fitting:
        return _unbeaten(fitting)
    return find_runnable_plans(setting, limits, model, exhausted)


def list_fitting_plans(
    setting: Setting, limits: PlanLimits, model: str = "", node: Capacity | None = None
) -> list[PlanPrice]:
    """Return a plan for each division and switch within limits, with the fewest micro-batches that fit.

    Offloaded states are among them if a node has cores for them and the limits do not leave open
    whether the program can offload.
    """
    prices = list(_prices(setting, limits, _ON_GPUS, 0, model))
    if node is not None and not limits.allow_every_plan:
        for cores in _core_choices(setting, node):
            prices += _prices(setting, limits, _OFFLOADED, cores, model)
    first: dict[ExecutionPlan, PlanPrice] = {}
    for price in prices:
        if price.overflow is None and not (node and _host_shortage(setting, price, node)):
            alike = replace(price.plan, micro_batch=price.plan.global_batch, accumulation=1)
            first.setdefault(alike, price)
    return list(first.values())


def find_runnable_plan(
    setting: Setting, limits: PlanLimits, model: str = "", exhausted: Container[str] = ()
) -> PlanPrice | None:
    """Return the fastest plan within limits in a setting, or None if there is no plan.

    States are offloaded only if nothing fits without. If nothing fits at all, it is the plan that
    exceeds the GPU's memory least. A plan that is ``exhausted`` (digests) needs more than the model
    predicts, so all plans are left out for which it predicts as much.
    """
    for offloads in (_ON_GPUS, _OFFLOADED):
        price = _fastest_fitting(setting, limits, offloads, 0, model, exhausted)
        if price is not None:
            return price
    every = _prices(setting, limits, (*_ON_GPUS, *_OFFLOADED), 0, model)
    return min(every, key=lambda price: max(price.memory_bytes), default=None)


def _fastest_fitting(
    setting: Setting,
    limits: PlanLimits,
    offloads: Sequence[Offload],
    cores: int,
    model: str,
    exhausted: Container[str],
) -> PlanPrice | None:
    """Return the fastest plan with one of some offloads that fits, or None."""
    usable = setting.runtime.room.usable
    while True:
        prices = _prices(setting, limits, offloads, cores, model)
        fitting = (price for price in prices if price.overflow is None)
        best = min(fitting, key=lambda price: price.iter_time_s, default=None)
        if best is None or best.plan.digest not in exhausted:
            return best
        less = max(0, math.floor((max(best.memory_bytes) - 1.0) / usable))
        setting = replace(setting, hardware=replace(setting.hardware, memory_bytes=less))


def _core_choices(setting: Setting, node: Capacity) -> tuple[int, ...]:
    """Return the numbers of cores for each GPU that a node has for its GPUs of a shape.

    0 leaves the number open, because the node does not state its cores.
    """
    if node.cpus is None:
        return (0,)
    most = node.cpus // setting.shape.gpus_per_node
    return tuple(cores for cores in CORES_PER_GPU if cores <= most)


def _demand(price: PlanPrice) -> Demand:
    return Demand(gpus=price.plan.gpus, cpus=price.plan.cpus, host_bytes=price.host_bytes)


def _host_shortage(setting: Setting, price: PlanPrice, node: Capacity) -> str:
    """Return what a node lacks for its share of a plan, or "" if it has enough."""
    share = _demand(price).on_node(setting.shape.gpus_per_node)
    if node.host_bytes is None or share.host_bytes <= node.host_bytes:
        return ""
    return (
        f"{price.plan} needs {share.host_bytes / GIB:.1f} GiB of host memory on a node, but a node has"
        f" {node.host_bytes / GIB:.1f} GiB"
    )


def _unbeaten(prices: Iterable[PlanPrice]) -> list[PlanPrice]:
    """Return the prices that are faster than all of those that need no more of the hosts."""
    kept: list[PlanPrice] = []
    for price in sorted(prices, key=lambda p: (p.plan.cpus, p.host_bytes, p.iter_time_s)):
        rivals = (other.iter_time_s for other in kept if other.host_bytes <= price.host_bytes)
        if price.iter_time_s < (1.0 - MIN_GAIN) * min(rivals, default=math.inf):
            kept.append(price)
    return kept


def _record_of(
    empty: EstimateRecord,
    setting: Setting,
    price: PlanPrice,
    limits: PlanLimits,
    searched: Sequence[CellEstimate],
    node: Capacity | None,
) -> EstimateRecord:
    record, source = empty.with_plan(price.plan), empty.source.name.lower()
    problem = _host_shortage(setting, price, node) if node is not None else ""
    if price.overflow is not None or problem:
        note = f"{source}, for {limits}: {price.overflow or problem}"
        return replace(record, provenance=note[:MAX_PROVENANCE])
    if price.host_bytes and (setting.hardware.core_rates or setting.hardware.copied_bytes_per_s):
        source += ", host measured"
    factor, sd = _learned(searched, record.cell)
    return replace(
        record,
        iter_time_s=factor * price.iter_time_s,
        sd=sd,
        provenance=f"{source}, for {limits}: {price.plan}"[:MAX_PROVENANCE],
        traffic=traffic_of_price(setting, price),
        cpus=price.plan.cpus,
        host_bytes=price.host_bytes,
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
    cpus_per_gpu: int


def _prices(
    setting: Setting, limits: PlanLimits, offloads: Sequence[Offload], cores: int, model: str
) -> Iterator[PlanPrice]:
    """Yield the prices of plans within limits, among which the best one is."""
    for stages in _divisions(setting):
        for switches in _switches(stages[0].dp, offloads, cores):
            best_s = math.inf
            for plan in _plans(setting, stages, switches, model):
                if not limits.allow(plan):
                    break  # no limit excludes few micro-batches and allows more
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


def _switches(dp: int, offloads: Iterable[Offload], cores: int) -> Iterator[_Switches]:
    """Yield the switches to try for a number of replicas, the simplest ones first."""
    for offload in offloads:
        if offload is Offload.NONE:
            zeros = list(ZeroStage) if dp > 1 else [ZeroStage.NONE]
        else:
            least = 3 if offload is Offload.PARAMETERS else 1
            zeros = [zero for zero in ZeroStage if zero >= least]
        for zero, recomputation in product(zeros, (Recomputation.NONE, Recomputation.FULL)):
            yield _Switches(
                zero=zero,
                offload=offload,
                recomputation=recomputation,
                cpus_per_gpu=0 if offload is Offload.NONE else cores,
            )


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
            cpus_per_gpu=switches.cpus_per_gpu,
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
