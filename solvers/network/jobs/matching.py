"""Maximum-weight matching in a complete graph whose vertices come in kinds, exactly.

Edmonds' blossoms solve it without kinds. Here vertices of a kind are interchangeable, and a queue has few
kinds of jobs, so what is sought is how many pairs of each two kinds are made: an integer program for HiGHS
whose size is that of the kinds, without equal optima that only rename jobs.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from formulation.tables import Floats, Ints
from solvers.base import SolverFailed


def matched(count: Ints, weight: Floats) -> Ints:
    """Return how many pairs to make of each two kinds, int64[kinds, kinds], its upper triangle filled.

    ``count`` (kinds,) vertices there are; ``weight`` (kinds, kinds), symmetric, is worth of a pair; pairs of
    no positive weight are not made.

    Raises:
        SolverFailed: HiGHS found no optimum, though one exists.
    """
    kinds = len(count)
    pairs = np.zeros((kinds, kinds), dtype=np.int64)
    first, second = np.nonzero(np.triu(weight > 0))
    useful = (first != second) | (count[first] > 1)
    first, second = first[useful], second[useful]
    if len(first) == 0:
        return pairs
    columns = np.arange(len(first))
    uses = csr_array(
        (
            np.ones(2 * len(first)),  # twice in its row where a pair is of one kind
            (np.concatenate([first, second]), np.concatenate([columns, columns])),
        ),
        shape=(kinds, len(first)),
    )
    found = milp(
        -weight[first, second],
        integrality=np.ones(len(first), dtype=np.int64),
        bounds=Bounds(0, np.minimum(count[first], count[second]).astype(np.float64)),
        constraints=LinearConstraint(uses, -np.inf, count.astype(np.float64)),
        options={"mip_rel_gap": 0.0},
    )
    if not found.success:
        raise SolverFailed("highs", f"no matching: {found.message}")
    pairs[first, second] = np.rint(found.x).astype(np.int64)
    return pairs
