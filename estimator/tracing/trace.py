"""A step as a graph of layers: ``trace`` for the graph, ``traced`` for all that is known of the program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.graph import DTYPE_BYTES, Graph, Layer, Untraceable, graph_of
from estimator.tracing.counts import HEAVY
from estimator.tracing.cutting import ends_of, kind_of
from estimator.tracing.flow import Flow, flow_of
from estimator.tracing.forward import parameter_order, program_of
from estimator.tracing.kernels import Footprint, footprints
from estimator.tracing.parallel import Division, divide
from estimator.tracing.step import Step, load_step

_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A step's graph with the program it was made from. ``ends``: of layers, positions in ``flow.active``."""

    step: Step
    graph: Graph
    flow: Flow
    ends: tuple[int, ...]
    division: Division


def trace(step: Step | str) -> Graph:
    """Return the graph of a step, or of the one that ``module:function`` makes.

    Amounts are divided by the samples of the step's batch. Reductions, exchanges and what is divided follow
    Megatron's rule and GShard's (:mod:`estimator.tracing.parallel`).

    Raises:
        Untraceable: why it cannot be traced, and what to do.
    """
    return traced(step).graph


def traced(step: Step | str) -> Traced:
    """Return the graph with the program it is made from; raises as :func:`trace` does."""
    step = load_step(step) if isinstance(step, str) else step
    samples = step.samples
    flow = flow_of(program_of(step))
    if not flow.active:
        raise Untraceable(f"{step.name}: the loss does not depend on the batch; use it in the loss")
    cuts = ends_of(flow)
    division, prints, dtype = divide(flow, cuts), footprints(flow, cuts), _dtype(flow)
    scalar = DTYPE_BYTES[dtype] * samples
    weights = _weights(flow, cuts, division)
    layers, start = [], 0
    for n, end in enumerate(cuts):
        layers.append(_layer(flow, start, end, prints[n], weights[n], scalar, samples, division, n))
        start = end
    graph = graph_of(step.name, dtype, layers)
    return Traced(step=step, graph=graph, flow=flow, ends=tuple(cuts), division=division)


def _layer(
    flow: Flow, start: int, end: int, footprint: Footprint, weights: dict[str, float], scalar: float,
    samples: int, division: Division, n: int,
) -> Layer:  # fmt: skip
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
    """Return the activations alive after the first ``end`` active operators."""
    written = {flow.root[v] for i in flow.active[:end] for v in flow.program.operators[i].writes}
    return {v for v in written if flow.last_read[v] >= end and flow.activation(v)}


def _weights(flow: Flow, ends: list[int], division: Division) -> list[dict[str, float]]:
    """Return each layer's weights by how they are divided; shared ones count where they are used first."""
    divided = set[int]().union(*(flow.sources[v] for v in division.weight_axis))
    expert = set[int]().union(*(flow.sources[v] for v in division.expert_axis))
    seen: set[int] = set()
    found, start = [], 0
    for end in ends:
        reads = {v for i in flow.active[start:end] for v in flow.program.operators[i].reads}
        used = set[int]().union(*(flow.sources.get(v, frozenset()) for v in reads)) - seen
        counts = {"weights": 0.0, "expert_weights": 0.0, "shared_weights": 0.0}
        for value in used:
            if not np.issubdtype(flow.program.avals[value].dtype, np.integer):
                shape = flow.program.shape(value)
                many = len(shape) > 1
                field = (
                    "expert_weights" if value in expert
                    else "weights" if value in divided and many
                    else "shared_weights"
                )  # fmt: skip
                counts[field] += float(np.prod(shape, dtype=np.float64))
        seen |= used
        found.append(counts)
        start = end
    return found


def parameter_axes(result: Traced) -> dict[int, tuple[str, int]]:
    """Return how each leaf of the step's parameters is divided: ``("tensor" or "expert", axis)``.

    Leaves that are not divided, or whose axis cannot be followed back to the leaf, are absent.
    """
    program, flow = result.flow.program, result.flow
    leaf = dict(zip(program.parameters, parameter_order(result.step.params), strict=True))
    origin = {
        op.writes[0]: next(iter(flow.sources[op.reads[0]]))
        for op in program.operators
        if op.name == "slice_of" and flow.sources.get(op.writes[0]) == frozenset(op.writes)
    }
    found: dict[int, tuple[str, int]] = {}
    for how, axes in (
        ("tensor", result.division.weight_axis),
        ("expert", result.division.expert_axis),
    ):
        for value, axis in axes.items():
            for source in flow.sources[value]:
                if program.shape(source) != program.shape(value):
                    continue
                parameter, place = (
                    (origin[source], axis + 1) if source in origin else (source, axis)
                )
                found.setdefault(leaf[parameter], (how, place))
    return found


def _dtype(flow: Flow) -> str:
    """Return the type in which most products are computed."""
    work: dict[str, float] = {}
    for i in flow.active:
        op = flow.program.operators[i]
        name = str(flow.program.avals[op.reads[0]].dtype) if op.reads else "float32"
        if op.name in HEAVY and name in _DTYPE:
            work[_DTYPE[name]] = work.get(_DTYPE[name], 0.0) + op.flops
    return max(work, key=lambda d: work[d], default="f32")
