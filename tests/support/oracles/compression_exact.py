"""The best levels by CP-SAT, as a direct Max K-Cut of the contention DAG without upward edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.base.tables import Ints
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.cpsat.solver import STATUS, solve_while_wanted, solver_of
from tessera.solvers.network.compression.dag import Dag


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """The result of CP-SAT. If it found no levels in its time, ``level`` is None."""

    status: SolveStatus
    level: Ints | None  # (V,)
    lost: int


def exact(dag: Dag, levels: int, budget: Budget) -> Exact:
    """Minimise the weight of edges inside levels.

    Raises:
        SolverFailed: CP-SAT reports that there are no such levels, although one level for all
            always is a solution.
    """
    model = cp_model.CpModel()
    level = [model.new_int_var(0, levels - 1, "") for _ in range(len(dag.job))]
    inside = [model.new_bool_var("") for _ in range(dag.edges)]
    source = np.repeat(np.arange(len(dag.job)), np.diff(dag.start))
    for edge, (a, b) in enumerate(zip(source.tolist(), dag.target.tolist(), strict=True)):
        model.add(level[a] >= level[b])
        model.add(level[a] + inside[edge] >= level[b] + 1)
    model.minimize(cp_model.LinearExpr.weighted_sum(inside, dag.weight[source].tolist()))
    solver = solver_of(budget)
    status = STATUS.get(solve_while_wanted(solver, model, budget))
    if status is None or status is SolveStatus.INFEASIBLE:
        raise SolverFailed("cp-sat", "no levels of a contention graph")
    if status is SolveStatus.UNKNOWN:
        return Exact(status=status, level=None, lost=0)
    solution = np.array([solver.value(variable) for variable in level], dtype=np.int64)
    return Exact(status=status, level=solution, lost=int(dag.inside(solution) @ dag.weight))
