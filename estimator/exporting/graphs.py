"""The conversion of a PyTorch module to a graph of layers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tessera.estimator.exporting.elementwise import ACTIVATIONS
from tessera.estimator.exporting.nodes import ExportedProgram
from tessera.estimator.exporting.translate import program_of
from tessera.estimator.graph import Graph, Untraceable, graph_of, layer_of
from tessera.estimator.programs.layers import LayeredProgram, divide_into_layers
from tessera.estimator.programs.targets import accepts_argument, check_call, function_of
from tessera.formulation.base.errors import Unavailable
from tessera.formulation.base.release import install_hint

SAMPLE_COUNTS: Final = (2, 4)
"""The two numbers of samples with which a function that takes ``samples`` is exported."""

_AMOUNTS_PER_SAMPLE: Final = (
    "flops",
    "touched",
    "boundary",
    "kept",
    "unsplit",
    "working",
    "unfused",
    "reduced",
    "exchanged",
)
_ROUNDING: Final = 1e-9


def export_graph(target: str, arguments: Mapping[str, Any] | None = None) -> Graph:
    """Return the graph of the module that ``module:function`` makes with these keyword arguments.

    The function returns ``(module, args)`` or ``(module, args, kwargs)``. If it takes ``samples``,
    the amounts of a sample are the difference between exports with two numbers of samples. Inputs
    that do not grow with the samples are then not part of the batch. Otherwise the samples are the
    first axis of all tensors among the arguments, and amounts are divided by their number.

    Raises:
        Untraceable: the module cannot be exported; the message says why and what to do.
        Unavailable: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable(f"torch cannot be imported; install it with {install_hint('torch')}")
    from tessera.estimator.exporting import reading  # noqa: PLC0415 - PyTorch starts slowly

    make, given = function_of(target), dict(arguments or {})
    if not accepts_argument(make, "samples") or "samples" in given:
        check_call(target, make, given)
        whole = reading.make_module(target, make, given)
        return graph_of_samples(
            target, reading.export_module(target, whole), reading.leading_sizes(*whole[1:])
        )
    few, many = ({**given, "samples": n} for n in SAMPLE_COUNTS)
    check_call(target, make, few)
    first, second = (
        reading.export_module(target, reading.make_module(target, make, asked))
        for asked in (few, many)
    )
    return graph_of_difference(target, first, second, SAMPLE_COUNTS)


def graph_of_samples(name: str, exported: ExportedProgram, leading: set[int | None]) -> Graph:
    """Return the graph of one export. ``leading`` has the sizes of the first axes of its inputs.

    Raises:
        Untraceable: the sizes differ, so that the number of samples is unknown.
    """
    sizes = [size for size in leading if size]
    if len(leading) != 1 or len(sizes) != 1:
        begin = ", ".join(sorted(map(str, leading))) or "nothing"
        raise Untraceable(
            f"{name}: the tensors among the arguments begin with {begin}; all must have the same number of"
            " samples as their first axis, or the function must take `samples`"
        )
    made = divide_into_layers(
        name, program_of(name, exported, exported.inputs), sizes[0], ACTIVATIONS
    )
    return _named(made, exported)


def graph_of_difference(
    name: str, few: ExportedProgram, many: ExportedProgram, samples: tuple[int, int]
) -> Graph:
    """Return the graph of the amounts that one sample adds, from exports with ``samples`` samples.

    Raises:
        Untraceable: no input grows with the samples, or the exports have different layers.
    """
    if len(few.inputs) != len(many.inputs):
        raise Untraceable(f"{name}: the number of arguments changes with `samples`; keep it fixed")
    grows = [
        n
        for n, (a, b) in enumerate(zip(few.inputs, many.inputs, strict=True))
        if few.values[a].shape != many.values[b].shape
    ]
    if not grows:
        raise Untraceable(
            f"{name}: no argument grows with `samples`; give the example arguments that many samples"
        )
    low, high = (
        divide_into_layers(name, program_of(name, e, [e.inputs[n] for n in grows]), 1, ACTIVATIONS)
        for e in (few, many)
    )
    if len(low.graph) != len(high.graph):
        raise Untraceable(
            f"{name} has {len(low.graph)} layers with {samples[0]} samples and {len(high.graph)} with"
            f" {samples[1]}; make the module's structure the same whatever `samples` is"
        )
    named, step = _named(low, few), samples[1] - samples[0]
    amounts: dict[str, Any] = {}
    for field in _AMOUNTS_PER_SAMPLE:
        one, other = getattr(low.graph, field), getattr(high.graph, field)
        amounts[field] = np.where(
            np.abs(other - one) <= _ROUNDING * other, 0.0, (other - one) / step
        )
    graph = replace(named, **amounts)
    return graph_of(name, graph.dtype, [layer_of(graph, n) for n in range(len(graph))])


def _named(made: LayeredProgram, exported: ExportedProgram) -> Graph:
    """Return the graph with kinds named after the modules of the layers, without their numbers."""
    path = {v: node.path for node in exported.nodes for v in node.writes if v >= 0}
    kinds, start = [], 0
    for kind, end in zip(made.graph.kind, made.ends, strict=True):
        operators = [made.flow.program.operators[i] for i in made.flow.active[start:end]]
        paths = {p for op in operators for v in op.writes if (p := path.get(v))}
        common = _common([p.split(".") for p in sorted(paths)])
        kinds.append(f"{common}-{kind.rpartition('-')[2]}" if common else kind)
        start = end
    return replace(made.graph, kind=tuple(kinds))


def _common(paths: list[list[str]]) -> str:
    """Return the path of the innermost common module, without numbers of repeated blocks."""
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return re.sub(r"(^|\.)\d+(?=\.|$)", "", ".".join(shared)).strip(".")
