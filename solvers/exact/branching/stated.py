"""The statement of a problem as knapsacks: its rows, if each column uses one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem, reduce_by_job
from tessera.solvers.exact.branching.joining import find_classes
from tessera.solvers.exact.prices import PricedProblem, price_scale, whole_prices
from tessera.solvers.kernels.knapsacks import (
    LARGEST,
    Knapsacks,
    SackColumns,
    Workspace,
    bound_by_knapsacks,
)

MOST_LOADS: Final = 400_000_000
"""Columns times loads of all knapsacks: an evaluation takes at most 0.4 s, and usually a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatedKnapsacks:
    """The knapsacks of a problem, and arrays to solve them.

    ``price`` is int64[classes], the jobs' first prices times ``scale``.
    """

    scale: int
    first: Ints  # int64[classes], the first job of each class
    price: Ints
    sacks: Knapsacks
    columns: SackColumns
    space: Workspace

    def bound(self, price: Ints) -> int:
        """Return the bound at the jobs' prices, int64[classes]. Both are times the scale."""
        taken = np.zeros(len(price), dtype=np.int64)
        return int(bound_by_knapsacks(self.sacks, price, taken, self.space))

    def capacity_prices(self) -> Floats:
        """Return shadow prices, float64[rows]: those at which knapsacks were last filled."""
        return self.space.unit / self.scale


def count_knapsacks(problem: Problem) -> int:
    """Return the number of rows that columns use, or 0 if a column does not use exactly one."""
    used = problem.amount > 0  # an amount of 0 does not put a column into a knapsack
    uses = np.bincount(problem.usage_column[used], minlength=len(problem.cell))
    rows = np.bincount(problem.row[used], minlength=len(problem.rows))
    return int(np.count_nonzero(rows)) if (uses == 1).all() else 0


def state_knapsacks(problem: Problem, priced: PricedProblem) -> StatedKnapsacks | None:
    """Return the knapsacks of ``problem``, or None if it has other rows, or too large ones."""
    scale = price_scale(problem)
    uses = np.bincount(problem.row, minlength=len(problem.rows))
    loads = int((uses * problem.capacity).sum())
    largest = float(np.abs(priced.best).sum()) * scale
    if not count_knapsacks(problem) or loads > MOST_LOADS or not largest < LARGEST:
        return None
    first, label = find_classes(problem, np.ones(len(problem.jobs), dtype=np.bool_))
    sacks, row_of = _knapsacks(problem, scale, first, label)
    every = whole_prices(problem, priced.prices, scale)
    price = np.where(sacks.alone, 0.0, np.ceil(priced.best[first] * scale))
    groups = int(np.diff(sacks.group_start).max(initial=1))
    return StatedKnapsacks(
        scale=scale,
        first=first,
        price=price.astype(np.int64),
        sacks=sacks,
        columns=SackColumns(
            value=problem.value,
            usage_start=problem.usage_start,
            row=problem.row,
            amount=problem.amount,
            must_run=problem.must_run,
            row_of=row_of,
        ),
        space=Workspace(
            table=np.empty((groups, int(sacks.capacity.max()) + 1), dtype=np.int32),
            lines=np.zeros(1, dtype=np.int64),
            groups=np.empty(groups, dtype=np.int64),
            kept=np.empty(int(np.diff(sacks.item_start).max(initial=1)), dtype=np.int64),
            unit=np.minimum(every, LARGEST // np.maximum(sacks.capacity, 1)).astype(np.int64),
            width=np.zeros(len(problem.rows), dtype=np.int64),
            effort=np.zeros(1, dtype=np.int64),
        ),
    )


def _knapsacks(problem: Problem, scale: int, first: Ints, label: Ints) -> tuple[Knapsacks, Ints]:
    """Return the knapsacks, and the knapsack of each column, int64[columns]."""
    used, rows = problem.amount > 0, len(problem.rows)
    where, weight = np.zeros((2, len(problem.cell)), dtype=np.int64)
    where[problem.usage_column[used]] = problem.row[used]
    weight[problem.usage_column[used]] = problem.amount[used]
    low, high = (
        reduce_by_job(by, where.astype(np.float64), problem.job_start)[first]
        for by in (np.minimum, np.maximum)
    )
    order = np.lexsort((problem.column_job, where))
    job, row = problem.column_job[order], where[order]
    begins = np.flatnonzero((np.diff(job, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
    sacks = Knapsacks(
        group_start=np.searchsorted(row[begins], np.arange(rows + 1)),
        item_start=np.append(begins, len(order)),
        owner=label[job[begins]],
        job=job[begins],
        column=order,
        weight=weight[order],
        worth=(problem.value * scale)[order],
        capacity=problem.capacity,
        members=np.bincount(label, minlength=len(first)),
        must=problem.must_run[first],
        alone=(low == high) & ~problem.must_run[first],
    )
    return sacks, where
