"""Sums of products that are the same on every processor.

``@`` on floats goes to BLAS, which adds in another order on each kind of processor. The last digit of
a shadow price then differs, and with it a decision between equals. A replica must decide a recorded
round as another one did, so what decides a round uses these sums. NumPy's own reductions add in an
order that depends on the shape alone.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats, Ints


def dot(left: Floats, right: Floats | Ints) -> float:
    """Return the sum of the products of two arrays of one length."""
    return float(np.add.reduce(left * right))


def dot_rows(matrix: Floats, vector: Floats) -> Floats:
    """Return the sum of products of each row of a matrix with a vector, float64[rows]."""
    products: Floats = np.add.reduce(matrix * vector, axis=1)
    return products
