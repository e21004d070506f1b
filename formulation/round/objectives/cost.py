"""The objective cost: dollars or watts of running jobs, and the data it needs (Eqs. 11 and 12)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import Linear
from tessera.formulation.round.objectives.obligations import must_keep_running
from tessera.formulation.round.objectives.values import ColumnValues
from tessera.formulation.round.problem import VALUE_SCALE, bound_values, reduce_by_job, scale_values

_RATE_TOLERANCE: Final = 1e-9
"""Relative rounding error of a rate that still counts as reaching the floor."""


def price_of_gpu(draft: Draft) -> Floats:
    """Return dollars/h or kW of one GPU of each type, float64[types]. It is 0 if not known."""
    types = draft.snapshot.gpu_types
    if draft.policy.cost_of == "watts":
        return np.array([t.watts / 1000 for t in types])
    return np.array([t.dollars_per_hour for t in types])


def cost_values(draft: Draft) -> ColumnValues:
    """Return the cost of each column's GPUs as a loss (Eq. 11).

    A start also costs its restart share.
    """
    spent = draft.gpus * price_of_gpu(draft)[draft.gpu_type]
    return ColumnValues(
        gross=-spent,
        price=np.where(draft.starts, spent * draft.restart_share[draft.job], 0.0),
        unit="kW" if draft.policy.cost_of == "watts" else "dollars/h",
    )


def jobs_running(draft: Draft) -> Linear:
    """Return the goal that jobs of the greatest total weight run, on any columns (Eq. 12)."""
    scale, none = float(VALUE_SCALE), np.zeros(len(draft.job))
    value, _ = bound_values(draft.weight[draft.job], none, scale, draft.job_start)
    return Linear(
        name="jobs running",
        unit="weight",
        value=scale_values(value, scale),
        restart_price=np.zeros(len(draft.cell), np.int64),
        scale=scale,
    )


def priced_and_fast_enough(draft: Draft) -> Draft:
    """Drop columns of types without a GPU cost, and columns below the rate floor.

    The floor is a share of the rate at the requested GPUs. If a pin, a bound or an avoided node
    excludes that rate, it is a share of the best rate that is left to the job. The current column
    of a job that must keep running stays.
    """
    unpriced = price_of_gpu(draft)[draft.gpu_type] == 0
    best = reduce_by_job(np.maximum, draft.rate, draft.job_start)
    with np.errstate(invalid="ignore"):
        floor = draft.policy.rate_floor * np.minimum(draft.requested_rate, best)
        slow = draft.rate < floor[draft.job] * (1 - _RATE_TOLERANCE)
    stays = np.zeros(len(draft.cell), dtype=np.bool_)
    stays[draft.current[must_keep_running(draft) & (draft.current >= 0)]] = True
    keep = ~(unpriced | slow) | stays
    left = np.bincount(draft.job[keep], minlength=len(draft.current))
    lost = np.flatnonzero(draft.has_columns & (left == 0)).tolist()
    return draft.only(keep, {job: _missing(draft, job, unpriced) for job in lost})


def _missing(draft: Draft, job: int, unpriced: Bools) -> Reason:
    own = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    types = [
        draft.snapshot.gpu_types[t].name
        for t in np.unique(draft.gpu_type[own][unpriced[own]]).tolist()
    ]
    names, field = ", ".join(types), _FIELD[draft.policy.cost_of]
    message = f"the objective cost needs {field} of {names}, which is not set"
    if not unpriced[own].all():
        message += (
            f"; on the other types, no Cell reaches the rate floor, {draft.policy.rate_floor:g} of the"
            " job's rate at the requested GPUs"
        )
    return Reason(
        code=ReasonCode.MISSING_DATA,
        message=message,
        next_step=f"set {field} of these GPU types, or choose another objective",
        evidence=(
            ("types", names),
            ("field", field),
            ("rate floor", f"{draft.policy.rate_floor:g}"),
        ),
    )


_FIELD: Final = {"dollars": "dollars_per_hour", "watts": "watts"}
