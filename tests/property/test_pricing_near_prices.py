"""Laws of rounds that start from known prices: bounds near them, early stops of greedy, final solutions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.check import find_violations
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.tables import Floats
from tessera.solvers.answers import is_answer, make_solution, objective_of, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy, find_better_choice
from tessera.solvers.kernels.greedy import least_loss
from tessera.solvers.kernels.pricing import price_best_columns
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.prices import price_near, price_problem
from tessera.solvers.pricing.dual import descend_near
from tessera.solvers.pricing.surface import surface_near
from tests.support.laws import examples
from tests.support.problems import brute_force, problems

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)
SOME = examples(150)
PRICES = st.lists(st.floats(0, 10), min_size=3, max_size=3)
SEEDS = st.integers(0, 2**32 - 1)


def price_hint(problem: Problem, prices: Floats) -> Solution:
    """Return a hint that contains only prices."""
    return Solution(
        status=SolveStatus.UNKNOWN,
        choice=np.full(len(problem.jobs), -1),
        objective=0,
        bound=math.inf,
        solver="last round",
        prices=prices,
    )


@SOME
@given(problems(), PRICES, SEEDS)
def test_columns_open_near_the_prices_give_the_same_bound_as_all_columns(
    problem: Problem, prices: list[float], seed: int
) -> None:
    if not all(len(problem.columns_of(j)) for j in np.flatnonzero(problem.must_run).tolist()):
        return
    rng = np.random.default_rng(seed)
    here = np.array(prices[: len(problem.rows)])
    drift = rng.choice([0.0, 0.1, 1.0, 5.0], len(here))
    surface = surface_near(problem, *price_near(problem, here, drift)).surface
    there = np.clip(here + drift * rng.uniform(-1, 1, len(here)), surface.low, surface.high)
    used = np.zeros(len(here))
    total = (
        surface.offset
        + there @ surface.capacity
        + price_best_columns(
            surface.job_start,
            surface.value,
            surface.usage_start,
            surface.row,
            surface.amount,
            surface.must_run,
            there,
            used,
        )
    )
    assert total == pytest.approx(price_problem(problem, there).total, rel=1e-12, abs=1e-9)


@SOME
@given(problems(), PRICES)
def test_the_bound_near_prices_is_valid_and_no_worse_than_at_the_prices(
    problem: Problem, prices: list[float]
) -> None:
    here = np.array(prices[: len(problem.rows)])
    best = brute_force(problem)
    if best is None or here @ problem.capacity < 1e-3:
        return
    found = descend_near(problem, here, 1e-6)
    assert found.shown.bound >= best
    assert found.shown.bound <= price_problem(problem, here).bound
    assert found.shown.bound == price_problem(problem, found.shown.prices).bound


@SOME
@given(problems(), PRICES)
def test_a_jobs_loss_is_the_shortfall_of_its_best_column_of_no_less_value(
    problem: Problem, prices: list[float]
) -> None:
    here = np.array(prices[: len(problem.rows)])
    priced = price_problem(problem, here)
    columns = (
        problem.job_start,
        problem.value,
        problem.usage_start,
        problem.row,
        problem.amount,
        np.zeros(len(problem.cell)),
    )
    watch = here, problem.must_run, priced.choice, 0.0
    for column, job in enumerate(problem.column_job.tolist()):
        mine = problem.columns_of(job)
        within = slice(mine.start, mine.stop)
        reachable = priced.margin[within][problem.value[within] >= problem.value[column]]
        left = reachable.max() if len(reachable) else -math.inf
        same = priced.margin[column]  # another column of equal value is not reachable
        more = priced.margin[within][problem.value[within] > problem.value[column]]
        lost = priced.best[job] - max(same, more.max(initial=-math.inf))
        loss = least_loss(columns, watch, job, column)
        assert loss <= lost
        assert loss >= min(lost, priced.best[job] - left) - 1e-6 * (1 + abs(lost))


@SOME
@given(problems(), PRICES, SEEDS)
def test_greedy_is_given_up_only_if_it_cannot_end_with_more(
    problem: Problem, prices: list[float], seed: int
) -> None:
    greedy = Greedy().solve(problem, EXACT)
    best = Portfolio().solve(problem, EXACT)
    if not greedy.has_answer:
        return
    shown = price_problem(problem, np.array(prices[: len(problem.rows)])).shown()
    # the lowest choice to beat is greedy's own
    nothing = Greedy().solve(problem, EXACT).choice
    assert (
        find_better_choice(problem, best.choice, shown) is None or best.objective < greedy.objective
    )
    assert find_better_choice(problem, nothing, shown) is None
    if problem.must_run.any():
        return
    poor = np.where(np.random.default_rng(seed).random(len(problem.jobs)) < 0.5, greedy.choice, -1)
    choice = find_better_choice(problem, poor, shown)
    value = objective_of(problem, poor)
    if greedy.objective > value:
        assert choice is not None
        assert objective_of(problem, choice) == greedy.objective
    else:
        assert choice is None


@SOME
@given(problems(), PRICES, st.sampled_from([0.0, 1e-4, 0.1, 0.5]))
def test_a_round_with_known_prices_is_valid_and_never_below_greedy(
    problem: Problem, prices: list[float], gap: float
) -> None:
    here = np.array(prices[: len(problem.rows)])
    solution = Portfolio().solve(
        problem, Budget(remaining_s=lambda: math.inf, gap=gap), price_hint(problem, here)
    )
    best, greedy = brute_force(problem), Greedy().solve(problem, EXACT)
    assert solution.has_answer == (best is not None)
    if best is not None:
        assert find_violations(problem, solution) == []
        assert greedy.objective <= solution.objective <= best <= solution.bound
        assert solution.gap <= gap


@SOME
@given(problems(), SEEDS)
def test_the_checker_agrees_with_the_solvers_own_checks(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = len(problem.cell)
    choice = rng.integers(-1, max(columns, 1) if rng.random() < 0.1 else 1, len(problem.jobs))
    own = rng.integers(problem.job_start[:-1] - 1, problem.job_start[1:])
    choice = np.where(own < problem.job_start[:-1], -1, own) if rng.random() < 0.9 else choice
    if not columns:
        choice = np.full(len(problem.jobs), -1)
    bound = trivial_bound(problem) if rng.random() < 0.8 else -1.0
    solution = make_solution(problem, choice, bound=bound, solver="drawn")
    value = objective_of(problem, choice) if is_answer(problem, choice) else None
    keeps_rules = value is not None and value == solution.objective <= solution.bound + 0.5
    assert keeps_rules == (find_violations(problem, solution) == [])
