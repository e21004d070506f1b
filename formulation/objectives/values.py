"""What a linear objective says of each column."""

from __future__ import annotations

from dataclasses import dataclass

from formulation.problem import VALUE_SCALE
from formulation.tables import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Valued:
    """Worth of each column in ``unit``, float64[columns].

    ``gross`` is what the column is worth once it runs, ``price`` what its start, move or resize takes off
    (0 for what runs already). ``scale`` is how many solver integers make one unit.
    """

    gross: Floats
    price: Floats
    unit: str
    scale: float = float(VALUE_SCALE)
