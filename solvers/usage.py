"""The usage of rows as a matrix, for the solvers that take one."""

from __future__ import annotations

from scipy import sparse

from tessera.formulation.problem import Problem


def usage_matrix(problem: Problem) -> sparse.csc_array:
    """Return the amount of each row that each column uses, int64[rows, columns]."""
    return sparse.csc_array(
        (problem.amount.copy(), problem.row.copy(), problem.usage_start.copy()),
        shape=(len(problem.rows), len(problem.cell)),
    )
