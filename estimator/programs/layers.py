"""A program as a graph of layers: cut, counted and divided by the samples of its batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.estimator.graph import DTYPE_BYTES, Graph, Layer, Untraceable, graph_of
from tessera.estimator.programs.counts import HEAVY_PRIMITIVES
from tessera.estimator.programs.cuts import ends_of, kind_of
from tessera.estimator.programs.flow import Flow, flow_of
from tessera.estimator.programs.kernels import Footprint, layer_footprints
from tessera.estimator.programs.parallel import Division, divide_program
from tessera.estimator.programs.program import Program

_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredProgram:
    """A graph with its origin. ``ends`` are the ends of layers as positions in ``flow.active``."""

    graph: Graph
    flow: Flow
    ends: tuple[int, ...]


def divide_into_layers(
    name: str, program: Program, samples: int, ending: frozenset[str] = frozenset()
) -> LayeredProgram:
    """Return the layers of a program whose batch has ``samples`` samples.

    The operators in ``ending`` stay in the layer that they end
    (:func:`tessera.estimator.programs.cuts.ends_of`).

    Reductions, exchanges and divisions follow the rules of Megatron and GShard
    (:mod:`tessera.estimator.programs.parallel`).

    Raises:
        Untraceable: the loss does not depend on the batch.
    """
    flow = flow_of(program)
    if not flow.active:
        raise Untraceable(
            f"{name}: the loss does not depend on the batch; compute the loss from the batch"
        )
    cuts = ends_of(flow, ending)
    division, prints, dtype = divide_program(flow, cuts), layer_footprints(flow, cuts), _dtype(flow)
    scalar = DTYPE_BYTES[dtype] * samples
    weights = _weights(flow, cuts, division)
    layers, start = [], 0
    for n, end in enumerate(cuts):
        layers.append(_layer(flow, start, end, prints[n], weights[n], scalar, samples, division, n))
        start = end
    graph = graph_of(name, dtype, layers)
    return LayeredProgram(graph=graph, flow=flow, ends=tuple(cuts))


def _layer(
    flow: Flow,
    start: int,
    end: int,
    footprint: Footprint,
    weights: dict[str, float],
    scalar: float,
    samples: int,
    division: Division,
    n: int,
) -> Layer:
    ops = [flow.program.operators[i] for i in flow.active[start:end]]
    return Layer(
        kind=kind_of(flow, start, end),
        flops=sum(op.flops for op in ops) / samples,
        touched=footprint.touched / scalar,
        kernels=float(footprint.kernels),
        boundary=flow.amount(_crossing(flow, end)) / scalar,
        kept=footprint.kept / scalar,
        working=footprint.working / scalar,
        reduced=division.reduced[n] / scalar,
        exchanged=division.exchanged[n] / scalar,
        tensor_limit=division.limit[n],
        experts=division.experts[n],
        **weights,
    )


def _crossing(flow: Flow, end: int) -> set[int]:
    """Return the activations that are live after the first ``end`` active operators."""
    written = {flow.root[v] for i in flow.active[:end] for v in flow.program.operators[i].writes}
    return {v for v in written if flow.last_read[v] >= end and flow.activation(v)}


def _weights(flow: Flow, ends: list[int], division: Division) -> list[dict[str, float]]:
    """Return each layer's weights by their division. Shared weights count where they are first used."""
    divided = set[int]().union(*(flow.sources[v] for v in division.weights))
    expert = set[int]().union(*(flow.sources[v] for v in division.expert_weights))
    seen: set[int] = set()
    layers, start = [], 0
    for end in ends:
        reads = {v for i in flow.active[start:end] for v in flow.program.operators[i].reads}
        used = set[int]().union(*(flow.sources.get(v, frozenset()) for v in reads)) - seen
        counts = {"weights": 0.0, "expert_weights": 0.0, "shared_weights": 0.0}
        for value in used:
            if flow.program.values[value].floating:
                shape = flow.program.shape(value)
                many = len(shape) > 1
                field = (
                    "expert_weights"
                    if value in expert
                    else "weights"
                    if value in divided and many
                    else "shared_weights"
                )
                counts[field] += float(math.prod(shape))
        seen |= used
        layers.append(counts)
        start = end
    return layers


def _dtype(flow: Flow) -> str:
    """Return the data type in which most products are computed."""
    work: dict[str, float] = {}
    for i in flow.active:
        op = flow.program.operators[i]
        name = flow.program.values[op.reads[0]].dtype if op.reads else "float32"
        if op.name in HEAVY_PRIMITIVES and name in _DTYPE:
            work[_DTYPE[name]] = work.get(_DTYPE[name], 0.0) + op.flops
    return max(work, key=lambda d: work[d], default="f32")
