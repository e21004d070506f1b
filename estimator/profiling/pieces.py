"""Layers of a traced step as separate functions, with inputs to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.estimator.programs.flow import Flow
from tessera.estimator.programs.program import Operator, Program
from tessera.estimator.tracing.trace import TracedStep

_BLOCK = 2**20 + 7  # odd, so that rows of a matrix differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One layer. ``run`` maps the arrays of ``floats`` and ``others`` to the results handed on.

    The backward pass computes the gradients of ``floats``: the layer's weights, and activations of
    earlier layers.
    """

    floats: tuple[jax.ShapeDtypeStruct, ...]
    others: tuple[jax.ShapeDtypeStruct, ...]
    largest_index: int  # integer inputs are below it
    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]]

    def with_backward(self, floats: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the layer's results and the gradients of ``floats``."""
        results, pull = jax.vjp(lambda now: self.run(now, others), list(floats))
        return results, pull([_ones(r) for r in results])


def piece_of(traced: TracedStep, layer: int) -> Piece:
    """Return one layer of a traced step."""
    flow, program = traced.flow, traced.program
    start = traced.ends[layer - 1] if layer else 0
    own = list(flow.active[start : traced.ends[layer]])
    indices = sorted({*own, *_free(flow, own)})
    operators = [program.operators[i] for i in indices]
    written = {v for op in operators for v in op.writes}
    reads = dict.fromkeys(v for op in operators for v in op.reads if v not in written)
    inputs = [v for v in reads if v not in program.constants]
    floats = [v for v in inputs if _trained(flow, v)]
    others = [v for v in inputs if v not in floats]
    outputs = [
        v
        for v in dict.fromkeys(w for i in own for w in program.operators[i].writes)
        if v == program.loss or _read_later(program, flow, traced.ends[layer], v)
    ]

    def run(now: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        known = dict(program.constants) | dict(zip([*floats, *others], [*now, *rest], strict=True))
        for index, op in zip(indices, operators, strict=True):
            results = program.runs[index](*(known[v] for v in op.reads))
            known |= dict(zip(op.writes, results, strict=True))
        return [known[v] for v in outputs]

    return Piece(
        floats=tuple(program.avals[v] for v in floats),
        others=tuple(program.avals[v] for v in others),
        largest_index=_largest_index(program, operators),
        run=run,
    )


def example_inputs(avals: Sequence[jax.ShapeDtypeStruct], below: int, seed: int = 0) -> list[Any]:
    """Return arrays of these shapes: normal numbers (a repeated block), or integers below ``below``.

    NumPy makes them, because JAX would compile for each shape.
    """
    rng = np.random.default_rng(seed)
    block = 0.02 * rng.standard_normal(_BLOCK, dtype=np.float32)
    return [_example(aval, block, rng, below) for aval in avals]


def _example(aval: Any, block: Any, rng: np.random.Generator, below: int) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jnp.asarray(np.resize(block, aval.shape).astype(aval.dtype))
    if aval.dtype == np.bool_:
        return jnp.asarray(np.ones(aval.shape, dtype=np.bool_))
    most = min(below, int(np.iinfo(aval.dtype).max))
    return jnp.asarray(rng.integers(0, most, aval.shape).astype(aval.dtype))


def _ones(result: Any) -> Any:
    if jnp.issubdtype(result.dtype, jnp.floating):
        return jnp.ones(result.shape, result.dtype)
    return np.zeros(result.shape, jax.dtypes.float0)


def _free(flow: Flow, own: Sequence[int]) -> set[int]:
    """Return the operators without batch or weights (masks, positions) that ``own`` needs."""
    program = flow.program
    writer = {v: i for i, op in enumerate(program.operators) for v in op.writes}
    free: set[int] = set()
    stack = [v for i in own for v in program.operators[i].reads]
    while stack:
        value = stack.pop()
        index = writer.get(value, -1)
        if (
            index >= 0
            and index not in free
            and not flow.from_batch[value]
            and not flow.sources.get(value)
        ):
            free.add(index)
            stack.extend(program.operators[index].reads)
    return free


def _trained(flow: Flow, value: int) -> bool:
    """Return whether a value gets a gradient."""
    floating = flow.program.values[value].floating
    return floating and (bool(flow.sources.get(value)) or flow.activation(value))


def _read_later(program: Program, flow: Flow, end: int, value: int) -> bool:
    return any(value in program.operators[i].reads for i in flow.active[end:])


def _largest_index(program: Program, operators: Sequence[Operator]) -> int:
    """Return a bound below which integer inputs index every table of the layer."""
    tables = [max(program.shape(op.reads[0])) for op in operators if op.name == "gather"]
    return min(tables, default=2)
