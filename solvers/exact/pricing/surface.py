"""The Lagrangian dual as a function, of a whole problem or of its undecided part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.round.problem import Problem
from tessera.solvers.exact.prices import OpenPart, PricedProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """A function L of shadow prices p, the Lagrangian dual.

        L(p) = offset + p . capacity + sum over jobs of max(0 unless it must run, max_c v_c - p .
            u_c)

    It is valid for ``low <= p <= high`` (float64[rows]). Jobs, columns and usage are arrays as in a
    Problem.
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


def whole_surface(problem: Problem) -> Surface:
    """Return L of ``problem`` at all prices."""
    rows = len(problem.rows)
    return Surface(
        job_start=problem.job_start,
        value=problem.value,
        usage_start=problem.usage_start,
        row=problem.row,
        amount=problem.amount,
        must_run=problem.must_run,
        capacity=problem.capacity.astype(np.float64),
        offset=0.0,
        low=np.zeros(rows),
        high=np.full(rows, np.inf),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenSurface:
    """The part of a problem that nearby prices leave undecided: its surface, jobs and columns.

    ``settled`` is int64[jobs]: the choice of all other jobs, and -1 for these.
    """

    surface: Surface
    jobs: Ints
    columns: Ints
    settled: Ints


def surface_near(problem: Problem, priced: PricedProblem, open_part: OpenPart) -> OpenSurface:
    """Return L of ``problem`` at prices no further from those of ``priced`` than ``open_part`` allows.

    A job with one choice left adds a constant and takes its part of the capacity. The others keep
    the columns that may be best.
    """
    only = np.where(open_part.must_take, open_part.count == 1, open_part.count == 0)
    fixed = np.repeat(only, open_part.count)
    chosen, columns = open_part.columns[fixed], open_part.columns[~fixed]
    settled = np.full(len(problem.jobs), -1, dtype=np.int64)
    settled[only & open_part.must_take] = chosen
    _, row, amount = _usage(problem, chosen)
    used = np.bincount(row, weights=amount, minlength=len(problem.rows))
    usage_start, row, amount = _usage(problem, columns)
    surface = Surface(
        job_start=np.append(0, np.cumsum(open_part.count[~only])),
        value=problem.value[columns],
        usage_start=usage_start,
        row=row,
        amount=amount,
        must_run=open_part.must_take[~only],
        capacity=problem.capacity.astype(np.float64) - used,
        offset=float(problem.value[chosen].sum()),
        low=np.maximum(priced.prices - open_part.drift, 0.0),
        high=priced.prices + open_part.drift,
    )
    return OpenSurface(
        surface=surface, jobs=np.flatnonzero(~only), columns=columns, settled=settled
    )


def _usage(problem: Problem, columns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return usage_start, row and amount of ``columns`` alone."""
    first = problem.usage_start[columns]
    uses = problem.usage_start[columns + 1] - first
    entries = concatenate_ranges(first, uses)
    return np.append(0, np.cumsum(uses)), problem.row[entries], problem.amount[entries]
