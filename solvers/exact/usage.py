"""The usage of rows as a matrix, and the unit of values, for the solvers that take them."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy import sparse

from tessera.formulation.round.problem import Problem

LARGEST: Final = 1e4
"""The largest value that a library sees, so that its absolute tolerances mean something."""


def usage_matrix(problem: Problem) -> sparse.csc_array:
    """Return the amount of each row that each column uses, int64[rows, columns]."""
    return sparse.csc_array(
        (problem.amount.copy(), problem.row.copy(), problem.usage_start.copy()),
        shape=(len(problem.rows), len(problem.cell)),
    )


def value_unit(problem: Problem) -> float:
    """Return the unit in which the largest value is ``LARGEST``."""
    return max(float(np.abs(problem.value).max(initial=0)), 1.0) / LARGEST
