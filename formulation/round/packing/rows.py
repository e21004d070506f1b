"""Packing rows made from weights of shares. Whatever the weights are, the rows are true (Eq. 3b)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np

from tessera.formulation.round.draft import RowUse
from tessera.formulation.round.packing.shapes import ANY_SHAPE, ShapeClass, ShapeClasses
from tessera.formulation.round.packing.shares import MAX_NODE_GPUS, Sizes, least_weight, most_weight
from tessera.formulation.round.problem import CouplingRow, RowKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingWeights:
    """The weight of a share of each number of GPUs of a type.

    ``weight[s]`` is that of a share of s GPUs, at least 0, for s from 0 to the size of the largest
    node; that of 0 GPUs is 0.
    """

    gpu_type: str
    weight: tuple[int, ...]

    @property
    def subject(self) -> str:
        """Return the subject of the row, e.g. ``a100: shares of 3-4 count 1, 5-8 count 2``."""
        spans = []
        for weight, run in groupby(range(1, len(self.weight)), key=lambda s: self.weight[s]):
            sizes = list(run)
            span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
            if weight:
                spans.append(f"{span} count {weight}")
        return f"{self.gpu_type}: shares of {', '.join(spans)}"

    @classmethod
    def from_name(cls, name: str) -> Self | None:
        """Return the weights that the name of a row states, or None if it is no packing row's."""
        kind, _, subject = name.partition("/")
        gpu_type, marker, spans = subject.rpartition(": shares of ")
        if kind != RowKind.PACKING or not marker:
            return None
        weight = [0] * (MAX_NODE_GPUS + 1)
        for part in spans.split(", "):
            span, counts, amount = part.partition(" count ")
            first, _, last = span.partition("-")
            if not (counts and amount.isdecimal() and first.isdecimal()):
                return None
            for size in range(int(first), int(last or first) + 1):
                if not 1 <= size <= MAX_NODE_GPUS:
                    return None
                weight[size] = int(amount)
        return cls(gpu_type=gpu_type, weight=tuple(weight))

    def up_to(self, size: int) -> Self:
        """Return the weights of shares of at most ``size`` GPUs."""
        weight = (*self.weight, *(0,) * (size + 1 - len(self.weight)))[: size + 1]
        return type(self)(gpu_type=self.gpu_type, weight=weight)


def amount_of(shape: ShapeClass, sizes: Sizes, weight: tuple[int, ...]) -> int:
    """Return what a column of this class uses of a row: the least that its shares weigh."""
    if ANY_SHAPE in shape.nodes:
        return 0
    return min(least_weight(shape.gpus, n, sizes, weight) for n in shape.nodes)


def packing_rows(
    classes: ShapeClasses, types: dict[str, int], weights: Iterable[PackingWeights]
) -> list[RowUse]:
    """Return the row of each of ``weights``.

    ``types`` maps the names of types to their indices. Each type must have classes.
    """
    rows = []
    for one in weights:
        kind = types[one.gpu_type]
        sizes, counts = classes.sizes[kind], classes.count[kind]
        own = one.up_to(sizes[-1])
        of_class = np.array(
            [
                amount_of(shape, sizes, own.weight) if shape.gpu_type == kind else 0
                for shape in classes.classes
            ],
            dtype=np.int64,
        )
        capacity = sum(n * most_weight(size, own.weight) for size, n in counts.items())
        amount = np.append(of_class, 0)[classes.of_column]  # -1, the last, is no class
        column = np.flatnonzero(amount > 0)
        rows.append(
            RowUse(
                row=CouplingRow(kind=RowKind.PACKING, subject=own.subject, capacity=capacity),
                column=column,
                amount=amount[column],
            )
        )
    return rows
