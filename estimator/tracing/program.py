"""The forward pass of a training step as one flat list of operators, from its jaxpr.

Calls (``jit``, ``checkpoint``, custom derivatives) are inlined, scans are unrolled, and only the
costliest branch of a conditional is kept. Operators that cannot be counted are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from tessera.estimator.graph import Untraceable
from tessera.estimator.programs.counts import flops_of
from tessera.estimator.programs.program import Operator, Program, Value

CALL_PRIMITIVES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Primitives that only call a jaxpr, with the parameter that holds it."""

OPAQUE_PRIMITIVES = (
    "pallas_call",
    "ffi_call",
    "pure_callback",
    "io_callback",
    "custom_call",
    "shard_map",
)
"""Primitives whose work cannot be seen from outside."""

MAX_UNROLLED_OPERATORS = 50_000
"""Largest number of operators to which a scan is unrolled. A longer scan remains a single operator.
"""


@dataclass(slots=True)
class JaxProgram(Program):
    """A program that can be run, with JAX's shapes, known values and each operator's function."""

    avals: list[jax.ShapeDtypeStruct] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    runs: list[Callable[..., Sequence[Any]]] = field(default_factory=list)

    def new(self, shape: Sequence[Any], dtype: Any) -> int:
        """Return the number of a new value. A random key counts four bytes per word."""
        if any(not isinstance(d, int) for d in shape):
            raise Untraceable(
                f"a value has the dynamic shape {tuple(shape)}; give the example batch fixed integer sizes"
            )
        aval = jax.ShapeDtypeStruct(tuple(shape), dtype)
        self.avals.append(aval)
        key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        return self.append(
            Value(
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                itemsize=4 if key else aval.dtype.itemsize,
                floating=bool(jnp.issubdtype(aval.dtype, jnp.inexact)),
            )
        )

    def _add(self, operator: Operator, run: Callable[..., Sequence[Any]]) -> None:
        self.operators.append(operator)
        self.runs.append(run)

    def inline(self, closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        """Append a jaxpr's operators and return the values of its outputs."""
        return self._walk(closed.jaxpr, [self.constant(c) for c in closed.consts], inputs)

    def constant(self, what: Any) -> int:
        """Add a known value and return its number."""
        number = self.new(np.shape(what), jax.dtypes.result_type(what))
        self.constants[number] = what
        return number

    def _walk(self, jaxpr: Jaxpr, consts: Sequence[int], inputs: Sequence[int]) -> list[int]:
        known: dict[Var, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Var | Literal) -> int:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(a) for a in equation.invars])
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, reads: list[int]) -> list[int]:
        name = equation.primitive.name
        if name in CALL_PRIMITIVES:
            called = equation.params[CALL_PRIMITIVES[name]]
            if isinstance(called, ClosedJaxpr):
                return self.inline(called, reads)
            return self._walk(called, [], reads)
        if name == "while":
            raise Untraceable(
                "the step has a loop whose number of turns depends on data, so its work is unknown; use "
                "jax.lax.scan, or jax.lax.fori_loop with bounds that are Python integers"
            )
        if name in OPAQUE_PRIMITIVES:
            raise Untraceable(
                f"the step calls {name}, whose work cannot be counted; trace the step with that "
                "kernel's plain jax.numpy version, or describe the model by a configuration"
            )
        if name == "cond":
            return self._branch(equation, reads)
        if (
            name == "scan"
            and equation.params["length"] * _size(equation.params["jaxpr"])
            <= MAX_UNROLLED_OPERATORS
        ):
            return self._scan(equation.params, reads)
        writes = [self.new(v.aval.shape, v.aval.dtype) for v in equation.outvars]  # type: ignore[attr-defined]
        self._add(
            Operator(name, tuple(reads), tuple(writes), equation_flops(equation), equation.params),
            _runner(equation),
        )
        return writes

    def _branch(self, equation: JaxprEqn, reads: list[int]) -> list[int]:
        branches = equation.params["branches"]
        return self.inline(max(branches, key=_flops), reads[1:])

    def _scan(self, params: dict[str, Any], reads: list[int]) -> list[int]:
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry, columns = reads[:consts], reads[consts:][:carried], reads[consts + carried :]
        steps = range(params["length"])
        rows: dict[int, list[int]] = {}
        for i in reversed(steps) if params["reverse"] else steps:
            slices = [self._slice(column, i) for column in columns]
            outputs = self.inline(params["jaxpr"], [*fixed, *carry, *slices])
            carry, rows[i] = outputs[:carried], outputs[carried:]
        stacks = zip(*(rows[i] for i in steps), strict=True)
        return [*carry, *(self._stack(stack) for stack in stacks)]

    def _slice(self, column: int, index: int) -> int:
        aval = self.avals[column]
        out = self.new(aval.shape[1:], aval.dtype)
        self._add(
            Operator("slice_of", (column,), (out,), 0.0, {"index": index}), lambda a: (a[index],)
        )
        return out

    def _stack(self, rows: Sequence[int]) -> int:
        aval = self.avals[rows[0]]
        out = self.new((len(rows), *aval.shape), aval.dtype)
        self._add(Operator("stack_of", tuple(rows), (out,), 0.0, {}), lambda *a: (jnp.stack(a),))
        return out


def _runner(equation: JaxprEqn) -> Callable[..., Sequence[Any]]:
    """Return the function that computes an equation without inner calls from its inputs."""

    def run(*values: Any) -> Sequence[Any]:
        out = equation.primitive.bind(*values, **equation.params)
        return tuple(out) if equation.primitive.multiple_results else (out,)

    return run


def equation_flops(equation: JaxprEqn) -> float:
    """Return the FLOPs of one equation, including those of its jaxprs."""
    if equation.primitive.name == "scan":
        return float(equation.params["length"] * _flops(equation.params["jaxpr"]))
    if equation.primitive.name == "cond":
        return max(_flops(branch) for branch in equation.params["branches"])
    if (call := CALL_PRIMITIVES.get(equation.primitive.name)) is not None:
        return _flops(equation.params[call])
    ins = [tuple(getattr(a.aval, "shape", ())) for a in equation.invars]
    outs = [tuple(getattr(v.aval, "shape", ())) for v in equation.outvars]
    return flops_of(equation.primitive.name, ins, outs, equation.params)


def _flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    return sum(equation_flops(e) for e in _plain(jaxpr).eqns)


def _size(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Return the number of operators to which a jaxpr unrolls, at least 1."""
    size = 1
    for e in _plain(jaxpr).eqns:
        inner = e.params.get(CALL_PRIMITIVES.get(e.primitive.name, ""))
        if e.primitive.name == "scan":
            size += e.params["length"] * _size(e.params["jaxpr"])
        else:
            size += 1 if inner is None else _size(inner)
    return size


def _plain(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
