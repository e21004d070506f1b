"""An analytic roofline: the iteration time of a Cell under its best uniform plan, from data sheets alone.

For sample profiles: it lets everything run before anything is measured. What it is not is in README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from estimator.families import Layer, Model, models
from estimator.hardware import ALL, Hardware
from formulation.resources import EstimateRecord
from formulation.snapshot import Source, Workload

MICRO_BATCHES = 16
"""Micro-batches an iteration, as in the artifact's profiler."""
GPU_COUNTS = (1, 2, 4, 8, 16, 24, 32)
PROVENANCE = "roofline v1"
HALF_SATURATION_SAMPLES = 1.0
"""A GPU given work worth this many samples a micro-batch runs at half of its family's utilisation."""
LAYER_OVERHEAD_S = 1e-3
"""Forward and backward of a layer in a micro-batch cost at least this: about 100 launches of 10 us."""
LINK_UTILISATION = 0.8
"""Share of a link's data-sheet rate that large transfers reach."""
HOP_S = 20e-6
"""Latency of one step of a ring."""
MAX_INNER = 16
"""Largest tensor or expert degree: no size has fewer heads or experts."""
USABLE_MEMORY = 0.9
"""The rest is the driver's, the libraries' and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal numbers of GPUs on some nodes."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A uniform plan: every stage runs ``data`` replicas of ``inner`` GPUs (tensor or expert parallel)."""

    stages: int
    data: int
    inner: int
    iter_time_s: float
    memory_bytes: float  # of the fullest GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Sums over the layers of a pipeline stage; ``out`` is what it hands to the next. Scalars."""

    layers: int
    flops: float
    weights: float
    shared_weights: float
    boundaries: float
    kept: float
    touched: float
    largest_working: float
    reduced: float
    exchanged: float
    out: float


def _summed(layers: tuple[Layer, ...]) -> Stage:
    return Stage(
        layers=len(layers),
        flops=sum(x.flops for x in layers),
        weights=sum(x.weights for x in layers),
        shared_weights=sum(x.shared_weights for x in layers),
        boundaries=sum(x.boundary for x in layers),
        kept=sum(x.kept for x in layers),
        touched=sum(x.boundary + x.kept + x.working for x in layers),
        largest_working=max(x.working for x in layers),
        reduced=sum(x.reduced for x in layers),
        exchanged=sum(x.exchanged for x in layers),
        out=layers[-1].boundary,
    )


@cache
def partition(model: Model, stages: int) -> tuple[Stage, ...]:
    """Cut the layers into contiguous stages of about equal work; none is empty."""
    total = sum(layer.flops for layer in model.layers)
    cuts, done, count = [0], 0.0, len(model.layers)
    for i, layer in enumerate(model.layers):
        k = len(cuts)
        target = total * k / stages
        must = count - i <= stages - k  # every layer left is needed for a stage of its own
        over = i > cuts[-1] and done + layer.flops / 2 > target
        if k < stages and i > 0 and (must or over):
            cuts.append(i)
        done += layer.flops
    ends = [*cuts[1:], count]
    return tuple(_summed(model.layers[a:b]) for a, b in zip(cuts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One way to run: the model, the GPUs, the degrees. ``samples``: a replica's micro-batch."""

    model: Model
    hardware: Hardware
    shape: Shape
    stages: int
    data: int
    inner: int
    samples: int

    @property
    def passes(self) -> int:
        """Return how many forward passes' worth of work training does: backward counts two."""
        return 4 if self.model.family.recomputes else 3

    @property
    def peak(self) -> float:
        """Return FLOP/s of large kernels."""
        hardware, family = self.hardware, self.model.family
        rate = hardware.fp32_flops if family.element_bytes == 4 else hardware.fp16_flops
        return rate * family.utilisation


def _bandwidth(s: _Setting, span: int, stride: int) -> float:
    """Return bytes/s that one GPU sends in a group of ``span * stride`` neighbouring GPUs.

    A group that leaves its node shares the node's port with the ``stride`` groups beside it, and with
    other jobs: GPUs of a node have equal parts of its port, so spreading a job out gains no network.
    """
    if span * stride <= s.shape.gpus_per_node:
        return s.hardware.link_bytes_per_s * LINK_UTILISATION
    used = s.shape.gpus_per_node
    port = s.hardware.network_bytes_per_s * used / s.hardware.gpus_per_node
    across = port / min(stride, used)
    return min(s.hardware.link_bytes_per_s, across) * LINK_UTILISATION


def all_reduce_s(count: float, group: int, bytes_per_s: float) -> float:
    """Return seconds of a ring all-reduce of ``count`` bytes: 2 (n - 1) / n of them pass each link."""
    if group == 1 or count == 0:
        return 0.0
    return 2 * (group - 1) / group * count / bytes_per_s + 2 * (group - 1) * HOP_S


def all_to_all_s(count: float, s: _Setting) -> float:
    """Return seconds in which each GPU of an inner group sends ``count`` bytes to the others, evenly."""
    if s.inner == 1 or count == 0:
        return 0.0
    inside = min(s.inner, s.shape.gpus_per_node)
    within = count * (inside - 1) / s.inner / s.hardware.link_bytes_per_s
    leaving = count * (s.inner - inside) / s.inner
    across = leaving * s.hardware.gpus_per_node / s.hardware.network_bytes_per_s
    return max(within, across) / LINK_UTILISATION + (s.inner - 1) * HOP_S


def _stage_s(s: _Setting, stage: Stage) -> float:
    """Return seconds of a micro-batch in a stage, forward and backward, with its exchange."""
    work = s.samples / s.inner
    saturation = work / (work + HALF_SATURATION_SAMPLES)
    compute_s = s.passes * stage.flops * work / (s.peak * saturation)
    width = s.model.family.element_bytes
    weights = stage.weights / s.inner + stage.shared_weights
    memory_s = s.passes * width * (weights + stage.touched * work) / s.hardware.memory_bytes_per_s
    ring = _bandwidth(s, s.inner, 1)
    rounds = s.passes - 1  # forward, backward and, where it is repeated, forward again
    reduce_s = all_reduce_s(width * stage.reduced * s.samples, s.inner, ring)
    exchange_s = all_to_all_s(width * stage.exchanged * work, s)
    busy_s = max(compute_s, memory_s) + stage.layers * LAYER_OVERHEAD_S
    return busy_s + rounds * (reduce_s + exchange_s)


def _transfer_s(s: _Setting, stage: Stage) -> float:
    """Return seconds to hand a micro-batch's activations on and to get their gradients back."""
    if stage.out == 0 or s.stages == 1:
        return 0.0
    count = 2 * s.model.family.element_bytes * stage.out * s.samples / s.inner
    return count / _bandwidth(s, 2, s.data * s.inner) + 2 * HOP_S


def _finish_s(s: _Setting, stage: Stage) -> float:
    """Return seconds of a stage's gradient all-reduce and weight update, once an iteration."""
    family, hardware = s.model.family, s.hardware
    own = stage.weights / s.inner
    across = _bandwidth(s, s.data, s.inner)
    sync_s = all_reduce_s(family.element_bytes * own, s.data, across)
    everyone = s.data * s.inner
    shared = family.element_bytes * stage.shared_weights
    sync_s += all_reduce_s(shared, everyone, _bandwidth(s, everyone, 1))
    state = family.state_bytes * (own + stage.shared_weights)
    return sync_s + 2 * state / hardware.memory_bytes_per_s


def _memory_bytes(s: _Setting, stage: Stage, index: int) -> float:
    """Return bytes on a GPU of stage ``index``: states, activations of micro-batches in flight, one layer.

    Under 1F1B stage i holds the activations of ``stages - i`` micro-batches.
    """
    family = s.model.family
    state = family.state_bytes * (stage.weights / s.inner + stage.shared_weights)
    flying = min(s.stages - index, MICRO_BATCHES)
    split = s.inner if family.splits_batch else 1
    kept = stage.boundaries / split + stage.kept / s.inner
    live = flying * kept + 2 * stage.largest_working / s.inner
    return state + family.element_bytes * s.samples * live


def _evaluate(s: _Setting) -> Plan:
    """Return the plan's time and memory: (B - 1) times the slowest stage, once through all, the finish."""
    stages = partition(s.model, s.stages)
    busy = [_stage_s(s, stage) for stage in stages]
    sent = [_transfer_s(s, stage) for stage in stages[:-1]] or [0.0]
    pipeline_s = (MICRO_BATCHES - 1) * (max(busy) + max(sent)) + sum(busy) + sum(sent)
    return Plan(
        stages=s.stages, data=s.data, inner=s.inner,
        iter_time_s=pipeline_s + max(_finish_s(s, stage) for stage in stages),
        memory_bytes=max(_memory_bytes(s, stage, i) for i, stage in enumerate(stages)),
    )  # fmt: skip


def plans(
    model: Model, batch: int, hardware: Hardware, shape: Shape, stages: int
) -> Iterator[Plan]:
    """Yield the uniform plans of a Cell, whether they fit the memory or not.

    Samples are not split among replicas (nor among an expert group's GPUs), so a micro-batch has at
    least one for each; the last may get fewer.
    """
    if stages > len(model.layers) or shape.gpus % stages:
        return
    group = shape.gpus // stages
    micro_batch = math.ceil(batch / MICRO_BATCHES)
    inner = 1
    while inner <= min(group, MAX_INNER):
        data = group // inner
        takers = group if model.family.splits_batch else data
        if group % inner == 0 and takers <= micro_batch:
            yield _evaluate(_Setting(
                model=model, hardware=hardware, shape=shape, stages=stages, data=data,
                inner=inner, samples=math.ceil(micro_batch / data),
            ))  # fmt: skip
        inner *= 2


def best_plan(
    model: Model, batch: int, hardware: Hardware, shape: Shape, stages: int
) -> Plan | None:
    """Return the fastest plan that fits the memory; None: none does."""
    room = USABLE_MEMORY * hardware.memory_bytes
    fitting = [p for p in plans(model, batch, hardware, shape, stages) if p.memory_bytes <= room]
    return min(fitting, key=lambda p: p.iter_time_s, default=None)


def shapes(hardware: Hardware, gpus: int) -> list[Shape]:
    """Return the shape with the fewest nodes and the one with twice as many, where they divide evenly."""
    fewest = math.ceil(gpus / hardware.gpus_per_node)
    return [
        Shape(nodes=nodes, gpus_per_node=gpus // nodes)
        for nodes in (fewest, 2 * fewest)
        if gpus % nodes == 0
    ]


def degrees(gpus: int) -> list[int]:
    """Return the pipeline degrees: powers of two that divide ``gpus``."""
    return [2**k for k in range(gpus.bit_length()) if gpus % 2**k == 0]


def sample_profiles(
    hardware: Iterable[Hardware] = ALL, gpu_counts: Iterable[int] = GPU_COUNTS
) -> list[EstimateRecord]:
    """Return the estimates of every workload on every type, count, shape and pipeline degree.

    A Cell that no plan fits has ``iter_time_s`` inf; degrees above the number of layers are left out.
    """
    counts, found = tuple(gpu_counts), []
    for kind in hardware:
        for model in models():
            for batch in model.family.batches:
                work = Workload(model=model.family.name, params=model.params, global_batch=batch)
                for gpus in counts:
                    found += list(_cells(work, model, kind, gpus))
    return found


def _cells(
    workload: Workload, model: Model, hardware: Hardware, gpus: int
) -> Iterator[EstimateRecord]:
    for shape in shapes(hardware, gpus):
        for degree in degrees(gpus):
            if degree > len(model.layers):
                continue
            plan = best_plan(model, workload.global_batch, hardware, shape, degree)
            yield EstimateRecord(
                workload=workload, gpu_type=hardware.name, gpus=gpus, nodes=shape.nodes,
                pipeline_degree=degree, plan="",
                iter_time_s=math.inf if plan is None else plan.iter_time_s,
                source=Source.ANALYTIC, provenance=PROVENANCE,
            )  # fmt: skip
