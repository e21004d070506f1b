"""Construction of a program from ATen nodes: operators, trained values, and what autograd saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.estimator.exporting.nodes import ExportedProgram, Node
from tessera.estimator.programs.counts import flops_of
from tessera.estimator.programs.program import Operator, Program, Value

Dims = tuple[int, ...]


@dataclass(slots=True)
class ProgramBuilder:
    """A program under construction.

    ``trained`` are the values through which gradients flow. ``saved`` are the values that autograd
    keeps for the backward pass. ``layout`` maps a value that is a view or another layout of an
    original value to that original, and to whether it is a copy. ``attended`` are the results of
    fused attention. Its kernels write heads next to each other, as the following product reads them.
    """

    program: Program
    trained: set[int]
    saved: dict[int, None] = field(default_factory=dict)
    layout: dict[int, tuple[int, bool]] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, exported: ExportedProgram, batch: Sequence[int]) -> ProgramBuilder:
        """Return the start of a program whose batch is these values."""
        program = Program(
            values=list(exported.values), parameters=list(exported.parameters), batch=list(batch)
        )
        floating = {v for v in exported.parameters if exported.values[v].floating}
        return cls(program=program, trained=floating)

    def shape(self, value: int) -> Dims:
        """Return the shape of a value."""
        return self.program.shape(value)

    def floating(self, value: int) -> bool:
        """Return whether a value is floating-point."""
        return self.program.values[value].floating

    def temporary(self, like: int, shape: Iterable[int]) -> int:
        """Return a new value with the data type of another."""
        what = self.program.values[like]
        return self.program.append(Value(tuple(shape), what.dtype, what.itemsize, what.floating))

    def emit(self, name: str, reads: Sequence[int], *writes: int, **params: Any) -> None:
        """Append an operator. Its results are trained if any of its inputs is."""
        ins, outs = [self.shape(v) for v in reads], [self.shape(v) for v in writes]
        flops = flops_of(name, ins, outs, params)
        self.program.operators.append(Operator(name, tuple(reads), tuple(writes), flops, params))
        if any(v in self.trained for v in reads):
            self.trained.update(v for v in writes if self.floating(v))

    def view(self, name: str, source: int, write: int, **params: Any) -> None:
        """Append an operator that only views or lays out a value differently."""
        self.emit(name, (source,), write, **params)
        self.layout[write] = (source, name == "clone")

    def save(self, *values: int) -> None:
        """Record the values that the backward pass needs."""
        self.saved.update(dict.fromkeys(values))

    def save_factors(self, left: int, right: int) -> None:
        """Record the values for the derivative of a product: for each factor, the other one."""
        if left in self.trained:
            self.save(right)
        if right in self.trained:
            self.save(left)

    def origin(self, value: int) -> tuple[int, bool]:
        """Return the value of which this one is another layout, and whether it is a copy."""
        copied = False
        while value in self.layout:
            value, copies = self.layout[value]
            copied = copied or copies
        return value, copied

    def headed(self, value: int, heads: int) -> int:
        """Return keys, queries or values as a direct view of the hidden axis from which they were cut.

        Their shape is (batch, heads, sequence, width). Intermediate layouts are skipped, so that a
        division of the hidden axis can be followed.
        """
        source, copied = self.origin(value)
        shape = self.shape(source)
        if source == value or len(shape) not in (2, 3) or shape[-1] % heads:
            return value
        seen = self.temporary(value, self.shape(value))
        self.emit("headed_clone" if copied else "headed", (source,), seen)
        return seen

    def scalar(self, results: Iterable[int]) -> int | None:
        """Return the loss: a single floating-point result, or else the sum over all results.

        If there is no floating-point result, return None.
        """
        floating = [v for v in results if self.floating(v)]
        if single := [v for v in floating if math.prod(self.shape(v)) == 1]:
            return single[0]
        total: int | None = None
        for value in floating:
            part = self.temporary(value, ())
            self.emit("reduce_sum", (value,), part, axes=tuple(range(len(self.shape(value)))))
            if total is None:
                total = part
                continue
            both = self.temporary(value, ())
            self.emit("add", (total, part), both)
            total = both
        return total


Rule = Callable[[ProgramBuilder, Node], None]
"""A function that adds a node of one kind to a program."""
