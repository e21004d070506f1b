"""CP-SAT's solver as all who use it here begin with it."""

from __future__ import annotations

import math
from typing import Final

from ortools.sat.python import cp_model

from formulation.solution import SolveStatus
from solvers.base import Budget

STATUS: Final = {
    cp_model.OPTIMAL: SolveStatus.OPTIMAL,
    cp_model.FEASIBLE: SolveStatus.FEASIBLE,
    cp_model.INFEASIBLE: SolveStatus.INFEASIBLE,
    cp_model.UNKNOWN: SolveStatus.UNKNOWN,
}


def solver_of(budget: Budget) -> cp_model.CpSolver:
    """Return a solver with the budget's workers, seed and what is left of its time.

    It leaves interrupts alone: CP-SAT would take the signal's handler and not give it back, so that from the
    first solve on Ctrl-C killed the process instead of ending it in order.
    """
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False
    solver.parameters.num_workers = budget.workers
    solver.parameters.random_seed = budget.seed
    remaining_s = budget.remaining_s()
    if math.isfinite(remaining_s):
        solver.parameters.max_time_in_seconds = max(remaining_s, 0.0)
    return solver
