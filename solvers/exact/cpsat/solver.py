"""The CP-SAT solver with the settings that all its users here share."""

from __future__ import annotations

import math
import threading
from typing import Final

from ortools.sat.python import cp_model

from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.base.cancellation import never_cancelled
from tessera.solvers.base import Budget

STATUS: Final = {
    cp_model.OPTIMAL: SolveStatus.OPTIMAL,
    cp_model.FEASIBLE: SolveStatus.FEASIBLE,
    cp_model.INFEASIBLE: SolveStatus.INFEASIBLE,
    cp_model.UNKNOWN: SolveStatus.UNKNOWN,
}


POLL_S: Final = 0.05
"""Seconds between two checks whether anybody still waits for the answer."""


def solve_while_wanted(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    budget: Budget,
    on_answer: cp_model.CpSolverSolutionCallback | None = None,
) -> cp_model.CpSolverStatus:
    """Return the status of the search, which ends soon after the budget is cancelled.

    Raises:
        DeadlineTooShort: the budget is cancelled.
    """
    budget.check()
    if budget.cancelled is never_cancelled:
        return solver.solve(model, on_answer)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            if budget.cancelled():
                # Repeat this, since a call before the search begins has no effect.
                solver.stop_search()

    watcher = threading.Thread(target=watch, name="cp-sat-watcher", daemon=True)
    watcher.start()
    try:
        status = solver.solve(model, on_answer)
    finally:
        ended.set()
        watcher.join()
    budget.check()
    return status


def solver_of(budget: Budget) -> cp_model.CpSolver:
    """Return a solver with the budget's workers, seed and remaining time.

    It does not handle interrupts. CP-SAT would replace the signal handler and not restore it, so
    that from the first solve on, Ctrl-C would kill the process instead of ending it in order.
    """
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = budget.workers
    solver.parameters.random_seed = budget.seed
    limit_s = budget.time_limit_s()
    if math.isfinite(limit_s):
        solver.parameters.max_time_in_seconds = max(limit_s, 0.0)
    return solver
