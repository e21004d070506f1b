"""A solver against random problems that nobody would state."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import Annotated, Final

import numpy as np
import typer

from benchmarks.progress import steps
from benchmarks.registry import Report, case
from benchmarks.rounds.fuzzing import TooLarge, a_problem, optimum, some_prices
from benchmarks.rounds.instances import FAMILIES, instance
from formulation.check import violations
from formulation.policy import Policy
from formulation.problem import Problem
from formulation.solution import Solution, SolveStatus
from formulation.statement import build_problem
from solvers.answers import is_answer, objective_of, trivial_bound
from solvers.base import Budget, Solver
from solvers.registry import DEFAULT
from solvers.registry import solver as make_solver

logger = logging.getLogger(__name__)

SHORT_S: Final = (0.005, 0.01, 0.02, 0.05)
"""Budgets from which there must be an answer, for up to 300 jobs."""
LONG_S: Final = 10.0
"""Budget of a problem that is to be solved."""
INTERRUPTED: Final = 0.2
"""Share of the problems whose budget ends at once or within two milliseconds."""
FEW_JOBS: Final = 300
LARGE: Final = 0.2
"""Share of the short rounds that have more jobs, and the time that greedy takes."""


@case(
    "fuzz",
    smoke={"cases": 100, "short": 6},
    violations=("==", 0),
    wrong_bounds=("==", 0),
    crashes=("==", 0),
    wrong_proofs=("==", 0),
    below_greedy=("==", 0),
)
def fuzz(
    cases: Annotated[int, typer.Option(help="Random problems.")] = 2_000,
    short: Annotated[int, typer.Option(help="Rounds given 5 to 50 ms, or greedy's time.")] = 100,
    solver: Annotated[str, typer.Option(help="Solver to try.")] = DEFAULT,
    first: Annotated[int, typer.Option(help="Number of the first, to repeat one.")] = 0,
    seed: int = 0,
) -> Report:
    """Solve random problems and compare with their optimum: degenerate, empty, infeasible, huge, tiny ones.

    The optimum comes from a dynamic program over what is used, or from CP-SAT where that would be too large;
    ``unjudged`` are those that neither solves. Each problem is asked with a gap of 0 or of 1e-4, with no hint
    or one that has a greedy answer, or nonsense, and any prices; a fifth with next to no time.
    ``violations`` are those of the checker; ``wrong_bounds`` below the optimum, or an objective above it;
    ``wrong_proofs`` "optimal" that is not, or "infeasible" where there is an answer; ``crashes`` anything
    raised. ``below_greedy``: rounds of up to 300 jobs given 5 to 50 ms, or of up to 3,000 given the
    time that greedy takes, that end without an answer or with less than greedy's; ``worst_overrun_s``
    is by how much the slowest of them missed its time.
    """
    by, tally, overrun_s = make_solver(solver), Counter[str](), 0.0
    for k in (first + step for step in steps(cases, "problems")):
        rng = np.random.default_rng([seed, k])
        _judge(a_problem(rng), by, rng, tally, k)
    for k in (first + step for step in steps(short, "short budgets")):
        rng = np.random.default_rng([seed, k, 1])
        overrun_s = max(overrun_s, _hurry(by, rng, tally, k))
    names = (
        "violations", "wrong_bounds", "wrong_proofs", "crashes", "below_greedy", "unjudged",
        "optimal", "feasible", "infeasible", "unknown",
    )  # fmt: skip
    return Report(
        seed=seed,
        figures={
            "cases": cases,
            "short": short,
            **{n: tally[n] for n in names},
            "worst_overrun_s": overrun_s,
        },
    )


def _judge(
    problem: Problem, by: Solver, rng: np.random.Generator, tally: Counter[str], k: int
) -> None:
    """Solve one problem and count what is wrong with the answer."""
    limit_s = max(0.0, rng.uniform(-0.001, 0.002)) if rng.random() < INTERRUPTED else LONG_S
    gap, hint = float(rng.choice([0.0, 1e-4])), _hint(problem, rng)
    end_s = time.perf_counter() + limit_s
    budget = Budget(remaining_s=lambda: end_s - time.perf_counter(), gap=gap, seed=k)
    found = _asked(problem, by, budget, hint, tally, k)
    if found is None:
        return
    tally[str(found.status)] += 1
    for name in faults(problem, found, _best(problem, tally)):
        logger.error("problem %d: %s by %s", k, name, by.name, extra={"action": "fuzz-fault"})
        tally[name] += 1


def faults(problem: Problem, found: Solution, best: int | float | None) -> list[str]:
    """Return what is wrong with an answer, given the optimum; None: there is none, NaN: not known."""
    wrong = []
    if (found.has_answer and violations(problem, found)) or len(found.choice) != len(problem.jobs):
        wrong.append("violations")
    if best is None:
        if found.has_answer:
            wrong.append("wrong_proofs")
        return wrong
    if math.isnan(best):
        return wrong
    if not found.bound >= best or (found.has_answer and found.objective > best):
        wrong.append("wrong_bounds")
    untrue = found.status is SolveStatus.OPTIMAL and found.objective != best
    if untrue or found.status is SolveStatus.INFEASIBLE:
        wrong.append("wrong_proofs")
    return wrong


def _asked(
    problem: Problem, by: Solver, budget: Budget, hint: Solution | None, tally: Counter[str], k: int
) -> Solution | None:
    """Return the answer; None, and a crash counted, where the solver raised."""
    try:
        return by.solve(problem, budget, hint)
    except Exception:
        logger.exception("problem %d: %s raised", k, by.name)
        tally["crashes"] += 1
        return None


def _hint(problem: Problem, rng: np.random.Generator) -> Solution | None:
    """Draw no hint, or one with any prices and greedy's answer or nonsense."""
    if rng.random() < 0.5:
        return None
    prices = some_prices(rng, problem) if rng.random() < 0.7 else np.zeros(0)
    choice = rng.integers(-1, max(1, len(problem.cell)), len(problem.jobs))
    if rng.random() < 0.7:
        choice = make_solver("greedy").solve(problem, Budget(remaining_s=lambda: math.inf)).choice
    fits = is_answer(problem, choice)
    return Solution(
        status=SolveStatus.FEASIBLE, choice=choice, solver="hint", prices=prices,
        objective=objective_of(problem, choice) if fits else 0, bound=trivial_bound(problem),
    )  # fmt: skip


def _best(problem: Problem, tally: Counter[str]) -> int | float | None:
    """Return the optimum; None: there is no answer; NaN, counted, where it is not known."""
    try:
        return optimum(problem)
    except TooLarge:
        end_s = time.perf_counter() + LONG_S
        budget = Budget(remaining_s=lambda: end_s - time.perf_counter(), gap=0.0)
        exact = make_solver("stock-cp-sat").solve(problem, budget)
        if exact.status is SolveStatus.INFEASIBLE:
            return None
        if exact.status is not SolveStatus.OPTIMAL:
            tally["unjudged"] += 1
            return math.nan
        return exact.objective


def _hurry(by: Solver, rng: np.random.Generator, tally: Counter[str], k: int) -> float:
    """Solve a round within milliseconds; count an answer that is missing, broken or below greedy's.

    Returns the seconds by which it was late.
    """
    large = rng.random() < LARGE
    jobs = int(rng.integers(FEW_JOBS + 1, 3_000) if large else rng.integers(1, FEW_JOBS + 1))
    types = int(rng.integers(1, 11))
    snapshot = instance(
        jobs, max(types, int(jobs * rng.uniform(0.2, 3.0))), types, k,
        family=str(rng.choice(FAMILIES)), running=float(rng.choice([0.0, 0.5, 1.0])),
    )  # fmt: skip
    problem = build_problem(snapshot, Policy())
    began_s = time.perf_counter()
    greedy = make_solver("greedy").solve(problem, Budget(remaining_s=lambda: math.inf))
    now_s = time.perf_counter()
    end_s = now_s + (now_s - began_s if large else float(rng.choice(SHORT_S)))
    budget = Budget(remaining_s=lambda: end_s - time.perf_counter())
    found = _asked(problem, by, budget, None, tally, k)
    late_s = max(0.0, time.perf_counter() - end_s)
    if found is None:
        return late_s
    if violations(problem, found):
        tally["violations"] += 1
    if found.bound < greedy.objective:
        tally["wrong_bounds"] += 1
    if not found.has_answer or found.objective < greedy.objective:
        logger.error("round %d: below greedy by %s", k, by.name, extra={"action": "fuzz-fault"})
        tally["below_greedy"] += 1
    return late_s
