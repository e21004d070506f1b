"""Helpers that all solvers share.

They measure a choice and make a Solution whose status follows from its bound.
"""

from __future__ import annotations

import math

import numpy as np

from tessera.formulation.answer.certificates import Certificate
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.problem import Problem, reduce_by_job


def objective_of(problem: Problem, choice: Ints) -> int:
    """Return the value of ``choice`` (int64[jobs], column or -1) in the problem's integers."""
    return int(problem.value[choice[choice >= 0]].sum())


def is_answer(problem: Problem, choice: Ints) -> bool:
    """Return whether ``choice`` is a feasible choice of ``problem``.

    Each job has one of its own columns or -1, every row has room, and every must-run job runs.
    """
    if len(choice) != len(problem.jobs):
        return False
    runs = choice >= 0
    own = (choice >= problem.job_start[:-1]) & (choice < problem.job_start[1:])
    if np.any(runs & ~own) or np.any(problem.must_run & ~runs):
        return False
    return bool(np.all(problem.used(choice) <= problem.capacity))


def usable_hint(problem: Problem, hint: Solution | None) -> Ints | None:
    """Return the hint's choice if it is feasible for this problem, else None.

    A hint is never trusted without this check.
    """
    if hint is None or not hint.has_answer or not is_answer(problem, hint.choice):
        return None
    return hint.choice


def trivial_bound(problem: Problem) -> float:
    """Return the sum over jobs of the value of their best column, capacity ignored.

    It is a true upper bound that is always known.
    """
    best = reduce_by_job(np.maximum, problem.value.astype(np.float64), problem.job_start)
    return float(np.where(problem.must_run, best, np.maximum(best, 0.0)).sum())


def proves_nothing(problem: Problem, solution: Solution, gap: float) -> bool:
    """Return whether the bound of ``solution`` is the trivial one, and its gap larger than ``gap``.

    If the answer comes close enough to a trivial bound, that is a proof like any other.
    """
    return solution.gap > gap and solution.bound >= math.floor(trivial_bound(problem))


def fits_alone(problem: Problem) -> Bools:
    """Return which columns fit into the empty cluster, bool[columns]."""
    fits = np.ones(len(problem.cell), dtype=np.bool_)
    fits[problem.usage_column[problem.amount > problem.capacity[problem.row]]] = False
    return fits


def find_unrunnable(problem: Problem) -> Ints:
    """Return the must-run jobs that have no column that fits, not even alone.

    If there are any, the problem is infeasible.
    """
    if not problem.must_run.any():
        return np.zeros(0, np.int64)
    possible = np.zeros(len(problem.jobs), dtype=np.bool_)
    possible[problem.column_job[fits_alone(problem)]] = True
    return np.flatnonzero(problem.must_run & ~possible)


def make_solution(
    problem: Problem,
    choice: Ints,
    *,
    bound: float,
    solver: str,
    prices: Floats | None = None,
    seed: int = 0,
    work: tuple[tuple[str, float], ...] = (),
    certificate: Certificate | None = None,
    proved_by: str = "",
) -> Solution:
    """Return the solution with this choice: OPTIMAL if no integer lies between it and the bound."""
    objective = objective_of(problem, choice)
    whole = math.floor(bound)  # values are integers, and so is the optimum
    return Solution(
        status=SolveStatus.OPTIMAL if whole <= objective else SolveStatus.FEASIBLE,
        choice=choice,
        objective=objective,
        bound=float(whole),
        solver=solver,
        prices=np.zeros(0) if prices is None else prices,
        seed=seed,
        work=work,
        certificate=certificate,
        proved_by=proved_by,
    )


def without_answer(
    problem: Problem,
    status: SolveStatus,
    *,
    solver: str,
    bound: float | None = None,
    prices: Floats | None = None,
    seed: int = 0,
    work: tuple[tuple[str, float], ...] = (),
) -> Solution:
    """Return a solution without a choice; ``status`` gives the reason.

    If ``bound`` is None, the bound is the trivial one.
    """
    return Solution(
        status=status,
        choice=np.full(len(problem.jobs), -1),
        objective=0,
        bound=trivial_bound(problem) if bound is None else bound,
        solver=solver,
        prices=np.zeros(0) if prices is None else prices,
        seed=seed,
        work=work,
    )


def make_result(
    problem: Problem,
    choice: Ints | None,
    *,
    bound: float,
    solver: str,
    status: SolveStatus = SolveStatus.UNKNOWN,
    prices: Floats | None = None,
    seed: int = 0,
    work: tuple[tuple[str, float], ...] = (),
    certificate: Certificate | None = None,
    proved_by: str = "",
) -> Solution:
    """Return the solution with this choice, or without an answer if it is None, because of ``status``."""
    if choice is None:
        return without_answer(
            problem, status, bound=bound, solver=solver, prices=prices, seed=seed, work=work
        )
    return make_solution(
        problem,
        choice,
        bound=bound,
        solver=solver,
        prices=prices,
        seed=seed,
        work=work,
        certificate=certificate,
        proved_by=proved_by,
    )


def is_within(gap: float, bound: float, value: float) -> bool:
    """Return whether an answer of ``value`` is within the relative ``gap`` of ``bound``."""
    return bound - value <= gap * max(abs(bound), 1.0)


def after_one_run(
    problem: Problem,
    status: SolveStatus,
    choice: Ints | None,
    bound: float,
    *,
    solver: str,
    seed: int,
) -> Solution:
    """Return the result of a single library call on the whole problem as a Solution.

    If ``choice`` is None, the library found no answer. The recorded work is 1, or 0 if the time
    ended first, since such a run cannot be repeated.
    """
    bound = min(bound, trivial_bound(problem))
    work = ((solver, float(status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE))),)
    if choice is not None:
        bound = max(bound, float(objective_of(problem, choice)))
    return make_result(
        problem, choice, bound=bound, solver=solver, status=status, seed=seed, work=work
    )
