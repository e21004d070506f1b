"""What an objective says of each column: a worth that is summed, or a level that is compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.goals import Levels
from tessera.formulation.problem import VALUE_SCALE
from tessera.formulation.tables import Floats


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


def compared(
    draft: Draft, *, name: str, unit: str, level: Floats, waiting: Floats, sign: int = 1
) -> Levels:
    """Return the levels where jobs without weight or any Cell, and profiling tasks, count nowhere: -inf."""
    counts = (draft.weight > 0) & ~np.isnan(draft.unit_rate) & ~draft.snapshot.profiling()
    return Levels(
        name=name,
        unit=unit,
        sign=sign,
        level=np.where(counts[draft.job], level, -np.inf),
        waiting=np.where(counts, waiting, -np.inf),
    )
