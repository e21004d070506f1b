"""The integer programs of published schedulers, stated as a Problem and solved by the portfolio."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.capacity import gpu_rows
from tessera.formulation.round.problem import (
    VALUE_SCALE,
    CouplingRow,
    Problem,
    RowKind,
    bound_values,
    scale_values,
)
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions

GAP: Final = 1e-4
"""Relative gap at which an integer program counts as solved."""

WORK: Final = {"cp-sat": 1.0}
"""Deterministic seconds of the last stage, so that every machine finds the same answer."""


def choose_most_valuable(
    seen: SchedulerView,
    options: JobOptions,
    value: Floats,
    allowed: Bools,
    *,
    max_changes: int = -1,
) -> Ints:
    """Return the columns that maximize the sum of ``value``, int64[jobs]; -1 if a job waits.

    ``value`` (float64[options]) is of the order of one. Only options ``allowed`` (bool[options])
    may be chosen. At most ``max_changes`` running jobs leave the option that they run on, unless
    more must; -1 means any number.
    """
    problem, kept = _problem(seen, options, value, allowed, max_changes)
    budget = Budget(
        remaining_s=lambda: math.inf,
        seed=seen.seed,
        gap=GAP,
        work=dict(WORK),
        cancelled=seen.cancelled,
    )
    solution = Portfolio().solve(problem, budget)
    if not solution.has_answer:  # nodes were lost, so more jobs must change than may
        return choose_most_valuable(seen, options, value, allowed)
    if not len(kept):
        return solution.choice
    return np.where(solution.choice >= 0, options.column[kept[solution.choice]], -1)


def _problem(
    seen: SchedulerView, options: JobOptions, value: Floats, allowed: Bools, max_changes: int
) -> tuple[Problem, Ints]:
    """Return the problem with one row per GPU type, and the option of each of its columns."""
    draft, jobs = seen.draft, len(options.current)
    kept = np.flatnonzero(allowed)
    job = options.job[kept]
    current = np.full(jobs, -1, dtype=np.int64)
    stays = np.flatnonzero(options.is_current[kept])
    current[job[stays]] = stays
    rows = [*gpu_rows(draft.snapshot)]
    runs = np.zeros(jobs, dtype=np.bool_)
    if max_changes >= 0:
        rows.append(CouplingRow(kind=RowKind.CHANGES, capacity=max_changes))
        runs[job[stays]] = True
    changes = runs[job]
    changes[stays] = False
    uses = 1 + changes.astype(np.int64)
    usage_start = np.append(0, np.cumsum(uses)).astype(np.int64)
    row = np.full(int(usage_start[-1]), len(rows) - 1, dtype=np.int64)
    amount = np.ones(len(row), dtype=np.int64)
    row[usage_start[:-1]], amount[usage_start[:-1]] = options.gpu_type[kept], options.gpus[kept]
    counts = np.count_nonzero(runs)
    job_start, none = np.searchsorted(job, np.arange(jobs + 1)), np.zeros(len(kept))
    bounded, _ = bound_values(value[kept], none, VALUE_SCALE, job_start)
    return Problem(
        jobs=draft.snapshot.jobs.name,
        job_start=job_start,
        cells=draft.cells,
        plans=draft.snapshot.plans,
        cell=draft.cell[options.column[kept]],
        value=scale_values(bounded, VALUE_SCALE),
        restart_price=np.zeros(len(kept), np.int64),
        scale=float(VALUE_SCALE),
        unit="value to the policy",
        rows=tuple(rows),
        usage_start=usage_start,
        row=row,
        amount=amount,
        idle_start=np.append(0, np.cumsum(runs)).astype(np.int64),
        idle_row=np.full(counts, len(rows) - 1),
        idle_amount=np.ones(counts, np.int64),
        must_run=np.zeros(jobs, np.bool_),
        least_rate=np.zeros(jobs),
        movable=np.ones(jobs, np.bool_),
        current=current,
        restart_share=np.zeros(jobs),
        weight=np.ones(jobs),
    ), kept
