"""Reduced-cost fixing: the small core of a problem that shadow prices leave undecided.

Let p >= 0 be shadow prices, ``total`` their Lagrangian bound, and ``loss[c] = best[job of c] -
margin[c] >= 0``. If job j waits, its loss is ``best[j]``. Any feasible choice is worth at most
``total`` less the losses of what it chooses. The reason is that its value is the sum of its margins
plus p . usage, and p . usage <= p . capacity. So a choice that contains a loss above ``reach`` is
worth less than ``total - reach``. If these options are left out, then

    optimum <= max(optimum of the rest, total - reach)

holds for every ``reach``. With ``reach = total - (value of a known answer)``, nothing better than
the known answer is left out, and the rest decides the problem exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.formulation.round.problem import Problem, restrict_problem
from tessera.solvers.exact.answers import objective_of
from tessera.solvers.exact.prices import PricedProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Core:
    """The undecided part of a problem; it always contains the columns of the known answer.

    ``problem`` holds the undecided jobs. ``jobs`` and ``columns`` map its jobs and columns to those
    of the whole problem. ``fixed`` is int64[jobs of the whole problem]: the columns that are
    decided, and -1 elsewhere. ``offset`` is the value of the decided columns. ``outside`` is an
    upper bound on every answer that uses something that was left out; it is -inf if nothing was.
    """

    problem: Problem
    jobs: Ints
    columns: Ints
    fixed: Ints
    offset: int
    outside: float

    def lift(self, choice: Ints) -> Ints:
        """Return the choice of the whole problem that corresponds to ``choice`` of the core."""
        whole = self.fixed.copy()
        runs = choice >= 0
        whole[self.jobs[runs]] = self.columns[choice[runs]]
        return whole

    def lower(self, choice: Ints) -> Ints:
        """Return the core's choice for ``choice`` of the whole problem.

        ``choice`` must use columns of the core only.
        """
        in_core = choice[self.jobs]
        return np.where(in_core >= 0, np.searchsorted(self.columns, in_core), -1)


def column_losses(problem: Problem, priced: PricedProblem) -> Floats:
    """Return each column's loss against its job's best choice, float64[columns], >= 0."""
    return priced.best[problem.column_job] - priced.margin


def core_of(problem: Problem, priced: PricedProblem, known: Ints, reach: float) -> Core:
    """Return the core of all columns whose loss is at most ``reach``, and of those of ``known``."""
    keep = column_losses(problem, priced) <= reach
    keep[known[known >= 0]] = True
    may_idle = ((priced.best <= reach) | (known < 0)) & ~problem.must_run
    left_out = not keep.all() or not np.array_equal(may_idle, ~problem.must_run)
    count = np.bincount(problem.column_job[keep], minlength=len(problem.jobs))
    settled = (count == 1) & ~may_idle
    open_jobs = np.flatnonzero((count > 0) & ~settled)
    fixed = np.where(settled, known, -1)
    room = _room_next_to(problem, fixed, open_jobs)
    columns = np.flatnonzero(keep & np.isin(problem.column_job, open_jobs))
    return Core(
        problem=restrict_problem(problem, open_jobs, columns, capacity=room, must_run=~may_idle),
        jobs=open_jobs,
        columns=columns,
        fixed=fixed,
        offset=objective_of(problem, fixed),
        outside=priced.total + priced.slack - reach if left_out else -np.inf,
    )


def _room_next_to(problem: Problem, fixed: Ints, undecided: Ints) -> Ints:
    """Return the part of each row that the decided jobs leave free, int64[rows].

    A job without a column in ``fixed`` waits, and uses the rows that waiting uses. The jobs in
    ``undecided`` are an exception, since it is not yet settled whether they wait.
    """
    room = problem.capacity - problem.used(fixed)
    open_job = np.zeros(len(problem.jobs), dtype=np.bool_)
    open_job[undecided] = True
    idle = open_job[problem.idle_job]
    np.add.at(room, problem.idle_row[idle], problem.idle_amount[idle])
    return np.asarray(room)
