"""The statement of a problem as knapsacks: rows of which no column uses two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.problem import Problem, reduce_by_job
from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.branching.joining import find_classes
from tessera.solvers.kernels.knapsacks import (
    LARGEST,
    Knapsacks,
    SackColumns,
    Workspace,
    bound_by_knapsacks,
)
from tessera.solvers.prices import PricedProblem, price_scale, whole_prices

MOST_LOADS: Final = 400_000_000
"""Columns times loads of all knapsacks: an evaluation takes at most 0.4 s, and usually a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatedKnapsacks:
    """The knapsacks of a problem, and arrays to solve them.

    ``price`` is int64[classes], the jobs' first prices times ``scale``.
    """

    rows: Bools  # bool[rows], which are knapsacks
    prices: Ints  # int64[rows], of the other rows, times the scale
    scale: int
    first: Ints  # int64[classes], the first job of each class
    price: Ints
    sacks: Knapsacks
    columns: SackColumns
    space: Workspace

    @property
    def is_whole(self) -> bool:
        """Return whether each column uses one knapsack and no other row."""
        return bool(self.rows.all()) and int(self.sacks.group_start[-2]) == len(self.sacks.job)

    def bound(self, price: Ints) -> int:
        """Return the bound at the jobs' prices, int64[classes]. Both are times the scale."""
        taken = np.zeros(len(price), dtype=np.int64)
        return int(bound_by_knapsacks(self.sacks, price, taken, self.space))

    def capacity_prices(self) -> Floats:
        """Return shadow prices, float64[rows]: of knapsacks, those at which they were last filled."""
        prices = self.prices.astype(np.float64)
        prices[self.rows] = self.space.unit
        return prices / self.scale


def state_knapsacks(problem: Problem, priced: PricedProblem) -> StatedKnapsacks | None:
    """Return the knapsacks of ``problem``, or None without any, or if they are too large."""
    scale = price_scale(problem)
    rows = _separate_rows(problem)
    uses = np.bincount(problem.row, minlength=len(problem.rows))
    loads = int((uses * problem.capacity)[rows].sum())
    every = whole_prices(problem, priced.prices, scale)
    prices = np.where(rows, 0.0, every)
    largest = float(np.abs(priced.best).sum()) * scale + float(prices @ problem.capacity)
    if not rows.any() or loads > MOST_LOADS or not largest < LARGEST:
        return None
    first, label = find_classes(problem, np.ones(len(problem.jobs), dtype=np.bool_))
    whole = prices.astype(np.int64)
    sacks, row_of = _knapsacks(problem, rows, whole, scale, first, label)
    price = np.where(sacks.alone, 0.0, np.ceil(priced.best[first] * scale))
    groups = int(np.diff(sacks.group_start[:-1]).max(initial=1))
    return StatedKnapsacks(
        rows=rows,
        prices=whole,
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
            unit=np.minimum(every[rows], LARGEST // np.maximum(sacks.capacity, 1)).astype(np.int64),
            width=np.zeros(int(rows.sum()), dtype=np.int64),
            effort=np.zeros(1, dtype=np.int64),
        ),
    )


def _separate_rows(problem: Problem) -> Bools:
    """Return rows of which no column uses two, bool[rows]: those with the most columns first."""
    used = problem.amount > 0  # an amount of 0 does not put a column into a knapsack
    row, column = problem.row[used], problem.usage_column[used]
    uses = np.bincount(row, minlength=len(problem.rows))
    taken = np.zeros(len(problem.cell), dtype=np.bool_)
    rows = np.zeros(len(problem.rows), dtype=np.bool_)
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(len(problem.rows) + 1))
    for r in np.argsort(-uses, kind="stable").tolist():
        own = column[order[bounds[r] : bounds[r + 1]]]
        if len(own) and not taken[own].any():
            rows[r] = True
            taken[own] = True
    return rows


def _knapsacks(
    problem: Problem, rows: Bools, prices: Ints, scale: int, first: Ints, label: Ints
) -> tuple[Knapsacks, Ints]:
    """Return the knapsacks of ``rows``, and the knapsack of each column, int64[columns]."""
    chosen, number = np.flatnonzero(rows), np.cumsum(rows) - 1
    separate = rows[problem.row] & (problem.amount > 0)
    where = np.full(len(problem.cell), len(chosen), dtype=np.int64)
    weight, cost = np.zeros((2, len(problem.cell)), dtype=np.int64)
    where[problem.usage_column[separate]] = number[problem.row[separate]]
    weight[problem.usage_column[separate]] = problem.amount[separate]
    np.add.at(cost, problem.usage_column, prices[problem.row] * problem.amount)
    low, high = (
        reduce_by_job(by, where.astype(np.float64), problem.job_start)[first]
        for by in (np.minimum, np.maximum)
    )
    order = np.lexsort((problem.column_job, where))
    job, row = problem.column_job[order], where[order]
    begins = np.flatnonzero((np.diff(job, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
    sacks = Knapsacks(
        group_start=np.searchsorted(row[begins], np.arange(len(chosen) + 2)),
        item_start=np.append(begins, len(order)),
        owner=label[job[begins]],
        job=job[begins],
        column=order,
        weight=weight[order],
        worth=(problem.value * scale - cost)[order],
        capacity=problem.capacity[chosen],
        members=np.bincount(label, minlength=len(first)),
        must=problem.must_run[first],
        alone=(low == high) & ~problem.must_run[first],
        sold=int((prices * problem.capacity).sum()),
    )
    return sacks, where
