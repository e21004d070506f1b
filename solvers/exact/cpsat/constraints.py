"""The constraints of a round, one function for each."""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.round.problem import Problem


def require_one_column(model: cp_model.CpModel, x: list[cp_model.IntVar], problem: Problem) -> None:
    """Require, for each job j that may wait: sum over its columns of x[c] <= 1 (2)."""
    for job in np.flatnonzero(~problem.must_run).tolist():
        columns = problem.columns_of(job)
        if len(columns) > 1:
            model.add_at_most_one(x[columns.start : columns.stop])


def require_must_run(model: cp_model.CpModel, x: list[cp_model.IntVar], problem: Problem) -> None:
    """Require, for each job j that must run: sum over its columns of x[c] = 1 (2)."""
    for job in np.flatnonzero(problem.must_run).tolist():
        columns = problem.columns_of(job)
        model.add_exactly_one(x[columns.start : columns.stop])


def limit_rows(model: cp_model.CpModel, x: list[cp_model.IntVar], problem: Problem) -> None:
    """Require, for each row r: sum over columns of usage[r, c] * x[c] <= capacity[r] (3)."""
    order = np.argsort(problem.row, kind="stable")
    bounds = np.searchsorted(problem.row[order], np.arange(len(problem.rows) + 1))
    entry_column = problem.usage_column
    for r, row in enumerate(problem.rows):
        entries = order[bounds[r] : bounds[r + 1]]
        if len(entries):
            users = [x[c] for c in entry_column[entries].tolist()]
            amounts = problem.amount[entries].tolist()
            model.add(cp_model.LinearExpr.weighted_sum(users, amounts) <= row.capacity)
