"""Throughput: the weighted sum of effective GPUs (Arena Eq. 5; Eqs. 5 to 7 of docs/mathematics.md)."""

from __future__ import annotations

import numpy as np

from tessera.formulation.round.draft import Draft
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.formulation.round.problem import VALUE_SCALE


def throughput_values(draft: Draft) -> ColumnValues:
    """Return w_j r_c / u_j of each column, its effective GPUs. A restart costs the share s_j of it.

    Arena sums raw samples/s, which favors small models. So does ``policy.raw_throughput``.
    """
    raw = draft.policy.raw_throughput
    unit_of = np.ones(len(draft.unit_rate)) if raw else draft.unit_rate
    # A million jobs have tens of millions of columns, so arrays are written in place.
    gross = draft.weight[draft.job]
    with np.errstate(invalid="ignore"):
        gross *= draft.rate
        gross /= unit_of[draft.job]
    price = draft.restart_share[draft.job]
    price *= gross
    price[~draft.starts] = 0.0
    return ColumnValues(
        gross=gross,
        price=price,
        unit="samples/s" if raw else "effective GPUs",
        # Raw samples/s are a thousand times larger than normalized rates.
        scale=float(VALUE_SCALE / 1000 if raw else VALUE_SCALE),
    )
