"""The Lagrangian dual as a function: of a whole problem, or of what prices near some leave undecided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulation.problem import Problem
from formulation.tables import Bools, Floats, Ints, ranges
from solvers.kernels.pricing import undecided
from solvers.prices import Priced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """L(p) = offset + p . capacity + sum over jobs of max(0 unless it must run, max_c v_c - p . u_c).

    It is that for ``low <= p <= high`` (float64[rows]). Jobs, columns and usage are in a Problem's arrays.
    """

    job_start: Ints
    value: Ints
    usage_start: Ints
    row: Ints
    amount: Ints
    must_run: Bools
    capacity: Floats  # float64[rows]; may be negative
    offset: float
    low: Floats
    high: Floats


def whole(problem: Problem) -> Surface:
    """Return L of ``problem`` at all prices."""
    rows = len(problem.rows)
    return Surface(
        job_start=problem.job_start, value=problem.value, usage_start=problem.usage_start,
        row=problem.row, amount=problem.amount, must_run=problem.must_run,
        capacity=problem.capacity.astype(np.float64), offset=0.0, low=np.zeros(rows),
        high=np.full(rows, np.inf),
    )  # fmt: skip


def near(problem: Problem, priced: Priced, drift: Floats) -> Surface:
    """Return L of ``problem`` at prices no further than ``drift`` (float64[rows]) from those of ``priced``.

    A job with one choice left adds a constant and takes its part of the capacity; the others keep the
    columns that may be best.
    """
    jobs = len(problem.jobs)
    count, columns = np.empty(jobs, np.int64), np.empty(len(problem.cell), np.int64)
    must_take = np.empty(jobs, np.bool_)
    total = undecided(
        problem.job_start, problem.usage_start, problem.row, problem.amount, problem.must_run,
        priced.margin, drift, count, columns, must_take,
    )  # fmt: skip
    settled = np.where(must_take, count == 1, count == 0)
    columns = columns[:total]
    is_settled = np.repeat(settled, count)
    chosen, columns = columns[is_settled], columns[~is_settled]
    taken = _usage(problem, chosen)
    open_ = _usage(problem, columns)
    used = np.bincount(taken[1], weights=taken[2], minlength=len(problem.rows))
    return Surface(
        job_start=np.append(0, np.cumsum(count[~settled])), value=problem.value[columns],
        usage_start=open_[0], row=open_[1], amount=open_[2], must_run=must_take[~settled],
        capacity=problem.capacity - used, offset=float(problem.value[chosen].sum()),
        low=np.maximum(priced.prices - drift, 0.0), high=priced.prices + drift,
    )  # fmt: skip


def _usage(problem: Problem, columns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return usage_start, row and amount of ``columns`` alone."""
    first = problem.usage_start[columns]
    uses = problem.usage_start[columns + 1] - first
    entries = ranges(first, uses)
    return np.append(0, np.cumsum(uses)), problem.row[entries], problem.amount[entries]
