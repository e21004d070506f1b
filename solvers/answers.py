"""What all solvers share: measuring a choice, and making a Solution whose status follows from its bound."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

from tessera.formulation.problem import Problem, jobwise
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Bools, Floats, Ints


def objective_of(problem: Problem, choice: Ints) -> int:
    """Return the value of ``choice`` (int64[jobs], column or -1) in the problem's integers."""
    return int(problem.value[choice[choice >= 0]].sum())


def is_answer(problem: Problem, choice: Ints) -> bool:
    """Return whether ``choice`` has an own column or -1 a job, fits every row, and runs what must."""
    if len(choice) != len(problem.jobs):
        return False
    runs = choice >= 0
    own = (choice >= problem.job_start[:-1]) & (choice < problem.job_start[1:])
    if np.any(runs & ~own) or np.any(problem.must_run & ~runs):
        return False
    return bool(np.all(problem.used(choice) <= problem.capacity))


def usable_hint(problem: Problem, hint: Solution | None) -> Ints | None:
    """Return the hint's choice if it answers this problem; a hint is never trusted unseen."""
    if hint is None or not hint.has_answer or not is_answer(problem, hint.choice):
        return None
    return hint.choice


def trivial_bound(problem: Problem) -> float:
    """Return the value of every job on its best column, whatever fits: a true bound, always known."""
    best = jobwise(np.maximum, problem.value.astype(np.float64), problem.job_start)
    return float(np.where(problem.must_run, best, np.maximum(best, 0.0)).sum())


def proves_nothing(problem: Problem, found: Solution, gap: float) -> bool:
    """Return whether the bound of ``found`` is the trivial one, and its gap larger than ``gap``.

    A trivial bound that the answer comes close to is a proof like any other.
    """
    return found.gap > gap and found.bound >= math.floor(trivial_bound(problem))


def usage_matrix(problem: Problem) -> sparse.csc_array:
    """Return how much of each row each column uses, int64[rows, columns]."""
    return sparse.csc_array(
        (problem.amount.copy(), problem.row.copy(), problem.usage_start.copy()),
        shape=(len(problem.rows), len(problem.cell)),
    )


def lonely_fit(problem: Problem) -> Bools:
    """Return, bool[columns], which columns fit into the empty cluster."""
    fits = np.ones(len(problem.cell), dtype=np.bool_)
    fits[problem.usage_column[problem.amount > problem.capacity[problem.row]]] = False
    return fits


def cannot_run(problem: Problem) -> Ints:
    """Return the jobs that must run and have no column that fits even alone: proof of infeasibility."""
    if not problem.must_run.any():
        return np.zeros(0, np.int64)
    possible = np.zeros(len(problem.jobs), dtype=np.bool_)
    possible[problem.column_job[lonely_fit(problem)]] = True
    return np.flatnonzero(problem.must_run & ~possible)


def answer(
    problem: Problem,
    choice: Ints,
    *,
    bound: float,
    solver: str,
    prices: Floats | None = None,
    seed: int = 0,
    work: tuple[tuple[str, float], ...] = (),
) -> Solution:
    """Return the solution of ``choice``: OPTIMAL where no integer lies between it and the bound."""
    objective = objective_of(problem, choice)
    whole = math.floor(bound)  # values are integers, so the optimum is one
    return Solution(
        status=SolveStatus.OPTIMAL if whole <= objective else SolveStatus.FEASIBLE,
        choice=choice,
        objective=objective,
        bound=float(whole),
        solver=solver,
        prices=np.zeros(0) if prices is None else prices,
        seed=seed,
        work=work,
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
    """Return the solution that says why there is none; its bound is the trivial one unless given."""
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


def after_one_run(
    problem: Problem,
    status: SolveStatus,
    choice: Ints | None,
    bound: float,
    *,
    solver: str,
    seed: int,
) -> Solution:
    """Return what a library's one run on the whole problem came to; ``choice`` None: no answer.

    Work is 1, or 0 where the time ended first: such a run cannot be repeated.
    """
    bound = min(bound, trivial_bound(problem))
    work = ((solver, float(status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE))),)
    if choice is None:
        return without_answer(problem, status, solver=solver, bound=bound, seed=seed, work=work)
    bound = max(bound, float(objective_of(problem, choice)))
    return answer(problem, choice, bound=bound, solver=solver, seed=seed, work=work)
