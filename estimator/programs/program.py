"""A forward pass as one flat list of operators over numbered values.

Operators have the names of JAX's primitives, with a few of ours. Other tracers translate to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """The shape and data type of a value. A ``floating`` one can be a parameter and have a gradient."""

    shape: Dims
    dtype: str
    itemsize: int
    floating: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. ``reads`` and ``writes`` are numbers of values."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float
    params: dict[str, Any]


@dataclass(slots=True)
class Program:
    """Operators in order over numbered values.

    Values that no operator writes are inputs or constants.
    """

    values: list[Value] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    loss: int = -1
    residuals: list[int] = field(default_factory=list)
    """The values that are kept for the backward pass if nothing is computed again."""

    def append(self, value: Value) -> int:
        """Add a value and return its number."""
        self.values.append(value)
        return len(self.values) - 1

    def bytes_of(self, value: int) -> float:
        """Return the bytes of a value."""
        what = self.values[value]
        return float(math.prod(what.shape)) * what.itemsize

    def shape(self, value: int) -> Dims:
        """Return the shape of a value."""
        return self.values[value].shape
