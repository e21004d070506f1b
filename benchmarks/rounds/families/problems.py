"""A problem from rectangular arrays of options."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import CouplingRow, Problem
from tessera.formulation.state.cells import one_cell


def state_options(
    value: Ints,
    amount: Ints,
    rows: Sequence[CouplingRow],
    row: Ints | None = None,
    *,
    must_run: bool = False,
) -> Problem:
    """Return the problem in which each job takes at most one of its options, or one if it must run.

    ``value`` is int64[jobs, options] and ``amount`` is int64[jobs, options, uses]. ``row`` has the
    row of each use, rising among the uses of an option; without it, use r is of row r. Amounts of 0
    are left out. No job runs yet.
    """
    jobs, options = value.shape
    if row is None:
        row = np.broadcast_to(np.arange(amount.shape[2]), amount.shape)
    used = amount > 0
    return Problem(
        jobs=tuple(f"job-{j}" for j in range(jobs)),
        job_start=np.arange(jobs + 1) * options,
        cells=one_cell(),
        plans=("",),
        cell=np.zeros(value.size, np.int64),
        value=value.ravel(),
        restart_price=np.zeros(value.size, np.int64),
        scale=1.0,
        unit="units",
        rows=tuple(rows),
        usage_start=np.append(0, np.cumsum(used.sum(axis=2).ravel())),
        row=row[used],
        amount=amount[used],
        idle_start=np.zeros(jobs + 1, np.int64),
        idle_row=np.zeros(0, np.int64),
        idle_amount=np.zeros(0, np.int64),
        must_run=np.full(jobs, must_run),
        current=np.full(jobs, -1),
        restart_share=np.zeros(jobs),
        weight=np.ones(jobs),
        least_rate=np.zeros(jobs),
        movable=np.ones(jobs, np.bool_),
    )
