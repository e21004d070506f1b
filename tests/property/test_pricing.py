"""Laws of the default solver and of pricing alone, on artificial problems and on hard rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.rounds.bench_fuzz import answer_faults
from tessera.benchmarks.rounds.fuzzing import (
    KINDS,
    TooLarge,
    draw_prices,
    draw_problem,
    dynamic_optimum,
)
from tessera.benchmarks.rounds.instances import FAMILIES, churn_round, make_instance
from tessera.formulation.check import find_violations
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import build_problem
from tessera.solvers.answers import objective_of, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver, solver_names
from tests.support.laws import examples

OURS = tuple(name for name in ("pricing", "portfolio") if name in solver_names())
EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)
USUAL = Budget(remaining_s=lambda: math.inf)
EXPIRED = Budget(remaining_s=lambda: 0.0)
SEEDS = st.integers(0, 2**32 - 1)


def find_faults(problem: Problem, found: Solution) -> list[str]:
    """Return the faults of a solution; objectives that dynamic programming cannot judge count as right."""
    try:
        return answer_faults(problem, found, dynamic_optimum(problem))
    except TooLarge:
        return answer_faults(problem, found, math.nan)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(seed=SEEDS)
def test_solutions_and_bounds_are_valid_on_artificial_problems_too(
    name: str, kind: str, seed: int
) -> None:
    problem = draw_problem(np.random.default_rng(seed), kind)

    assert find_faults(problem, make_solver(name).solve(problem, USUAL)) == []


@pytest.mark.parametrize("name", OURS)
@examples(100)
@given(seed=SEEDS)
def test_no_hint_makes_a_solution_or_a_bound_invalid(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng)
    hint = Solution(
        status=SolveStatus.FEASIBLE,
        solver="liar",
        objective=10**9,
        bound=-1.0,
        choice=rng.integers(-1, max(1, len(problem.cell)), len(problem.jobs)),
        prices=draw_prices(rng, problem),
    )

    assert find_faults(problem, make_solver(name).solve(problem, EXACT, hint)) == []


@pytest.mark.parametrize("family", FAMILIES)
@examples(5)
@given(seed=st.integers(0, 1000), running=st.sampled_from([0.0, 0.5, 1.0]))
def test_without_time_the_solution_is_never_worse_than_greedy(
    family: str, seed: int, running: float
) -> None:
    problem = build_problem(
        make_instance(60, 64, 4, seed, family=family, running=running), Policy()
    )
    greedy = make_solver("greedy").solve(problem, USUAL)

    solution = make_solver().solve(problem, EXPIRED)

    assert not find_violations(problem, solution)
    assert solution.objective >= greedy.objective
    assert solution.bound >= solution.objective


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_bounds_and_solutions_agree_with_stock_cp_sat(family: str, seed: int) -> None:
    problem = build_problem(make_instance(24, 24, 4, seed, family=family, running=0.5), Policy())
    stock = make_solver("stock-cp-sat").solve(problem, EXACT)

    assert stock.status is SolveStatus.OPTIMAL
    for name in OURS:
        solution = make_solver(name).solve(problem, USUAL)
        assert not find_violations(problem, solution)
        assert solution.objective <= stock.objective <= solution.bound
    assert solution.gap <= 1e-4  # the last solver is the portfolio


@examples(10)
@given(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_after_churn_the_last_solution_and_prices_help_to_reach_the_gap_again(
    seed: int, share: float
) -> None:
    snapshot = make_instance(60, 64, 4, seed)
    problem = build_problem(snapshot, Policy())
    first = make_solver().solve(problem, USUAL)
    later = build_problem(churn_round(snapshot, problem, first.choice, share, seed), Policy())
    hint = Solution(
        status=SolveStatus.FEASIBLE,
        choice=later.current,
        solver=first.solver,
        objective=objective_of(later, later.current),
        bound=trivial_bound(later),
        prices=first.prices,
    )

    solution = make_solver().solve(later, USUAL, hint)

    assert not find_violations(later, solution)
    assert solution.gap <= 1e-4
    assert solution.objective >= hint.objective
