"""The assessment of columns by an objective: values that are summed, or levels to compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.draft import Draft
from tessera.formulation.goals import Levels
from tessera.formulation.problem import VALUE_SCALE
from tessera.formulation.tables import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnValues:
    """The value of each column in ``unit``, float64[columns].

    ``gross`` is the value of the column once it runs. ``price`` is the cost of its start, move or
    resize (0 if it runs already). ``scale`` is the number of solver integers in one unit.
    """

    gross: Floats
    price: Floats
    unit: str
    scale: float = float(VALUE_SCALE)


def make_levels(
    draft: Draft, *, name: str, unit: str, level: Floats, waiting: Floats, sign: int = 1
) -> Levels:
    """Return the levels, with -inf for jobs that do not count.

    These are jobs without weight or without any Cell, and profiling tasks.
    """
    counts = (draft.weight > 0) & ~np.isnan(draft.unit_rate) & ~draft.snapshot.profiling()
    return Levels(
        name=name,
        unit=unit,
        sign=sign,
        level=np.where(counts[draft.job], level, -np.inf),
        waiting=np.where(counts, waiting, -np.inf),
    )
