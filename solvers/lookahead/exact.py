"""CP-SAT for admission: the admitted jobs and their schedules.

Among equal answers, it looks for the fewest GPU-seconds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from ortools.sat.python import cp_model

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.lookahead import Picks
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact.cpsat.solver import solve_while_wanted, solver_of
from tessera.solvers.lookahead.integers import IntegerAdmission

ENDED: Final = (cp_model.OPTIMAL, cp_model.INFEASIBLE)
ANSWERED: Final = (cp_model.OPTIMAL, cp_model.FEASIBLE)

LEAN_SHARE: Final = 0.2
"""Share of the work that is spent on leaner schedules once the weight is settled."""

Variables = dict[tuple[int, int], cp_model.IntVar]
"""A map from (option, slot) to the variable that says whether the option runs in the slot."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdmissionResult:
    """The result of the search; ``repeatable`` means that no wall clock cut it short."""

    picks: Picks | None
    admitted: Bools | None
    proven: bool
    repeatable: bool


def solve_admission(
    whole: IntegerAdmission, budget: Budget, limit: float, hint: tuple[Picks, Bools]
) -> AdmissionResult:
    """Maximize the admitted weight, and then reduce the GPU time if the weight beats the hint's.

    ``hint`` is a known answer. If it keeps all promises, every answer must. Otherwise as much of
    their weight as possible is kept.
    """
    model = cp_model.CpModel()
    x: Variables = {(int(o), int(k)): model.new_bool_var("") for o, k in np.argwhere(whole.allowed)}
    y = [model.new_bool_var("") for _ in range(len(whole.ahead.job))]
    require_one_option(model, x, whole)
    _stays_without_a_break(model, x, whole)
    starts = _starts(model, x, whole)
    require_work(model, x, y, starts, whole)
    limit_resources(model, x, whole)
    promised = whole.ahead.promised
    if hint[1][promised].all():
        for job in np.flatnonzero(promised).tolist():
            model.add(y[job] == 1)
    heavy = cp_model.LinearExpr.weighted_sum(y, whole.weight.tolist())
    model.maximize(heavy)
    _hint(model, x, y, *hint)
    first = _run(model, x, y, whole, budget, limit)
    if first.picks is None or first.admitted is None or not first.repeatable:
        return first
    best = weight_of(whole, first.admitted)
    if best <= weight_of(whole, hint[1]):
        return first
    model.add(heavy >= best)
    model.proto.clear_solution_hint()
    _hint(model, x, y, first.picks, first.admitted)
    model.minimize(
        cp_model.LinearExpr.weighted_sum(list(x.values()), [int(whole.gpu_time[key]) for key in x])
    )
    lean = _run(model, x, y, whole, budget, LEAN_SHARE * limit)
    if lean.picks is None:
        return replace(first, repeatable=lean.repeatable)
    return replace(lean, proven=first.proven)


def _run(
    model: cp_model.CpModel,
    x: Variables,
    y: list[cp_model.IntVar],
    whole: IntegerAdmission,
    budget: Budget,
    limit: float,
) -> AdmissionResult:
    solver = _solver(budget, limit)
    status = solve_while_wanted(solver, model, budget)
    if status == cp_model.MODEL_INVALID:
        raise SolverFailed("admission", solver.status_name(status))
    repeatable = status in ENDED or float(solver.response_proto.deterministic_time) >= limit
    if status not in ANSWERED:
        return AdmissionResult(picks=None, admitted=None, proven=False, repeatable=repeatable)
    picks = np.full((len(y), whole.ahead.slots), -1, dtype=np.int64)
    owner = whole.ahead.owner
    admitted = np.array([solver.boolean_value(v) for v in y], dtype=np.bool_)
    for (option, slot), variable in x.items():
        if solver.boolean_value(variable) and admitted[owner[option]]:
            picks[owner[option], slot] = option
    return AdmissionResult(
        picks=picks, admitted=admitted, proven=status == cp_model.OPTIMAL, repeatable=repeatable
    )


def require_one_option(model: cp_model.CpModel, x: Variables, whole: IntegerAdmission) -> None:
    """Require, for each job and slot: sum over its options of x[o, k] <= 1 (Eq. 24)."""
    groups: dict[tuple[int, int], list[cp_model.IntVar]] = defaultdict(list)
    owner = whole.ahead.owner.tolist()
    for (option, slot), variable in x.items():
        groups[owner[option], slot].append(variable)
    for group in groups.values():
        if len(group) > 1:
            model.add_at_most_one(group)


def _stays_without_a_break(model: cp_model.CpModel, x: Variables, whole: IntegerAdmission) -> None:
    for (option, slot), variable in x.items():
        if whole.ahead.stays[option] and slot:
            model.add_implication(variable, x[option, slot - 1])


def _starts(model: cp_model.CpModel, x: Variables, whole: IntegerAdmission) -> Variables:
    """Return s[o, k] >= x[o, k] - x[o, k - 1] for options that cost something to start (Eq. 26)."""
    starts: Variables = {}
    for (option, slot), variable in x.items():
        if whole.cost[option] > 0:
            before = x.get((option, slot - 1))
            starts[option, slot] = variable if before is None else model.new_bool_var("")
            if before is not None:
                model.add_bool_or(~variable, before, starts[option, slot])
    return starts


def require_work(
    model: cp_model.CpModel,
    x: Variables,
    y: list[cp_model.IntVar],
    starts: Variables,
    whole: IntegerAdmission,
) -> None:
    """Require, for each job: samples trained - cost of starts >= remaining work * y (Eq. 25)."""
    terms: dict[int, list[cp_model.IntVar]] = defaultdict(list)
    factors: dict[int, list[int]] = defaultdict(list)
    owner = whole.ahead.owner.tolist()
    for key, variable in x.items():
        terms[owner[key[0]]].append(variable)
        factors[owner[key[0]]].append(int(whole.gain[key]))
    for key, variable in starts.items():
        terms[owner[key[0]]].append(variable)
        factors[owner[key[0]]].append(-int(whole.cost[key[0]]))
    for job, admitted in enumerate(y):
        done = cp_model.LinearExpr.weighted_sum(terms[job], factors[job])
        model.add(done >= int(whole.need[job]) * admitted)


def limit_resources(model: cp_model.CpModel, x: Variables, whole: IntegerAdmission) -> None:
    """Require, per resource and slot: usage + what steady jobs keep <= what is free (Eq. 27)."""
    ahead = whole.ahead
    users: dict[tuple[int, int], list[cp_model.IntVar]] = defaultdict(list)
    amounts: dict[tuple[int, int], list[int]] = defaultdict(list)
    keeps = _keeps(model, x, whole)
    kinds, owner = ahead.cells.gpu_type[ahead.cell].tolist(), ahead.owner.tolist()
    for (option, slot), variable in x.items():
        for resource in np.flatnonzero(ahead.use[option]).tolist():
            amount = int(ahead.use[option, resource])
            if resource == kinds[option] and (owner[option], resource) in keeps:
                amount -= int(ahead.floor[option])
            users[resource, slot].append(variable)
            amounts[resource, slot].append(amount)
    for (_, kind), (variable, floor) in keeps.items():
        for slot in range(ahead.slots):
            users[kind, slot].append(variable)
            amounts[kind, slot].append(floor)
    for (resource, slot), variables in users.items():
        # After a loss, steady jobs may hold more than is left. They then get nothing in addition.
        least = sum(
            floor
            for (job, kind), (_, floor) in keeps.items()
            if kind == resource and ahead.held[job] == kind
        )
        room = max(int(ahead.capacity[resource, slot]), least)
        model.add(cp_model.LinearExpr.weighted_sum(variables, amounts[resource, slot]) <= room)


def _keeps(
    model: cp_model.CpModel, x: Variables, whole: IntegerAdmission
) -> dict[tuple[int, int], tuple[cp_model.IntVar, int]]:
    """Return, by steady job and GPU type, whether it keeps GPUs to the end, and their number."""
    ahead = whole.ahead
    keeps: dict[tuple[int, int], tuple[cp_model.IntVar, int]] = {}
    for job in np.flatnonzero(ahead.steady).tolist():
        for option in ahead.options_of(job):
            kind = int(ahead.cells.gpu_type[ahead.cell[option]])
            if (job, kind) not in keeps:
                keeps[job, kind] = model.new_bool_var(""), int(ahead.floor[option])
                if kind == ahead.held[job]:
                    model.add(keeps[job, kind][0] == 1)
            for slot in np.flatnonzero(whole.allowed[option]).tolist():
                model.add_implication(x[option, slot], keeps[job, kind][0])
    return keeps


def _hint(
    model: cp_model.CpModel, x: Variables, y: list[cp_model.IntVar], picks: Picks, admitted: Bools
) -> None:
    chosen: set[tuple[int, int]] = {
        (int(picks[j, k]), int(k)) for j, k in np.argwhere(picks >= 0).tolist()
    }
    for key, variable in x.items():
        model.add_hint(variable, key in chosen)
    for job, variable in enumerate(y):
        model.add_hint(variable, bool(admitted[job]))


def _solver(budget: Budget, limit: float) -> cp_model.CpSolver:
    solver = solver_of(budget)
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = limit
    return solver


def weight_of(whole: IntegerAdmission, admitted: Bools) -> int:
    """Return the integer weight of the admitted jobs; any promise outweighs all new jobs."""
    chosen: Ints = whole.weight[admitted]
    return int(chosen.sum())
