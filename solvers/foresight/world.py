"""The jobs and resources of a round, in the form in which answers are rolled forward."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem, RowKind
from tessera.formulation.rates import expected_rate, unit_rate, work_left
from tessera.formulation.replans import start_duration_s
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Bools, Floats
from tessera.solvers.kernels.foresight import ForesightProblem
from tessera.solvers.kernels.jit import as_fixed_array

LASTING_ROWS: Final = frozenset(
    {RowKind.GPUS, RowKind.CPUS, RowKind.HOST_MEMORY, RowKind.QUOTA, RowKind.HELD}
)
"""The rows that limit later rounds, too. The others hold for this round alone."""
MAX_VISITS: Final = 4_000_000
"""The largest number of columns, times rounds, that a roll-out visits."""
MIN_ROUNDS: Final = 8
"""The number of rounds that a roll-out decides, however many columns there are."""


def state_future(snapshot: Snapshot, policy: Policy, problem: Problem) -> ForesightProblem:
    """Return the jobs of ``problem`` with the rows that last, for rounds to come.

    Jobs without columns, and profiling tasks, do not count. Neither do jobs without weight.
    """
    jobs, columns = len(problem.jobs), len(problem.cell)
    unit = unit_rate(snapshot, problem.cells)
    expected = expected_rate(snapshot, problem.cells, problem.weight)
    known = np.isfinite(unit) & np.isfinite(expected)
    counts = known & (np.diff(problem.job_start) > 0) & ~snapshot.profiling()
    began_s = snapshot.jobs.since_s + start_duration_s(snapshot) - snapshot.now_s
    lasting = np.array([row.kind in LASTING_ROWS for row in problem.rows], dtype=np.bool_)
    return _with_rows(
        problem,
        lasting,
        ForesightProblem(
            job_start=as_fixed_array(problem.job_start),
            rate=as_fixed_array(problem.cells.rate[problem.cell]),
            usage_start=as_fixed_array(problem.usage_start),
            row=as_fixed_array(problem.row),
            amount=as_fixed_array(problem.amount),
            size=as_fixed_array(np.zeros(columns)),
            capacity=as_fixed_array(problem.capacity),
            current=as_fixed_array(problem.current),
            lag_s=as_fixed_array(np.where(problem.current >= 0, np.maximum(began_s, 0.0), 0.0)),
            work=as_fixed_array(work_left(snapshot)),
            unit_rate=as_fixed_array(np.where(counts, unit, 1.0)),
            expected_rate=as_fixed_array(np.where(counts, expected, 1.0)),
            restart_s=as_fixed_array(snapshot.jobs.restart_s),
            weight=as_fixed_array(problem.weight),
            stays=as_fixed_array(problem.must_run),
            counts=as_fixed_array(counts & (problem.weight > 0)),
            round_s=policy.round_s,
            horizon_s=policy.restart_horizon_s,
            restart_share=policy.max_restart_share,
            most=max(MIN_ROUNDS, min(2 * jobs + MIN_ROUNDS, MAX_VISITS // max(1, columns))),
        ),
    )


def with_every_row(problem: Problem, future: ForesightProblem) -> ForesightProblem:
    """Return ``future`` with all rows of ``problem``, as they hold in this round."""
    return _with_rows(problem, np.ones(len(problem.rows), dtype=np.bool_), future)


def _with_rows(problem: Problem, rows: Bools, future: ForesightProblem) -> ForesightProblem:
    """Return ``future`` with the rows where ``rows`` (bool[rows of the problem]) is true."""
    keep, columns = rows[problem.row], len(problem.cell)
    column = problem.usage_column[keep]
    row, amount = (np.cumsum(rows) - 1)[problem.row[keep]], problem.amount[keep]
    capacity = problem.capacity[rows]
    share = amount / np.maximum(capacity, 1)[row]
    count = np.bincount(column, minlength=columns)
    size = np.bincount(column, weights=share, minlength=columns).astype(np.float64)
    return future._replace(
        usage_start=as_fixed_array(np.append(0, np.cumsum(count))),
        row=as_fixed_array(row),
        amount=as_fixed_array(amount),
        size=as_fixed_array(size),
        capacity=as_fixed_array(capacity),
    )


def value_columns(
    future: ForesightProblem, problem: Problem, factor: Floats, restarts: float = 1.0
) -> Floats:
    """Return the value of each column: its rate times ``factor`` (float64[jobs]), less a restart.

    A restart is charged ``restarts`` times, but never more than the policy allows.
    """
    gross = factor[problem.column_job] * future.rate
    starts = np.ones(len(gross), dtype=np.bool_)
    starts[problem.current[problem.current >= 0]] = False
    share = np.minimum(future.restart_share, restarts * problem.restart_share)[problem.column_job]
    return np.where(starts, gross * (1.0 - share), gross)
