"""The assessment of columns by an objective: values that are summed, or levels to compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import Levels
from tessera.formulation.round.problem import VALUE_SCALE


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


def require_values(draft: Draft, objective: str, values: object) -> ColumnValues:
    """Return what the plug-in ``objective`` returned for ``draft``, if it can be decided by.

    Raises:
        InvalidInput: it is not ``ColumnValues`` with a finite number for each column.
    """
    if not isinstance(values, ColumnValues):
        raise InvalidInput(
            "objective", f"{objective} returned {type(values).__name__}; return ColumnValues"
        )
    columns = len(draft.cell)
    for name, array in (("gross", values.gross), ("price", values.price)):
        if not isinstance(array, np.ndarray) or array.shape != (columns,):
            raise InvalidInput(
                "objective",
                f"{objective}: {name} has shape {np.shape(array)}, not ({columns},); return a number"
                " for each column of the draft",
            )
        if array.dtype != np.float64 or not np.isfinite(array).all():
            raise InvalidInput("objective", f"{objective}: {name} must be finite float64 numbers")
    if not (values.price >= 0).all():
        raise InvalidInput("objective", f"{objective}: price must not be negative")
    if not (np.isfinite(values.scale) and values.scale > 0):
        raise InvalidInput("objective", f"{objective}: scale must be above 0, not {values.scale}")
    return values


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
