"""Bounds that prices prove, against an enumeration of all solutions and a library's linear programs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.kernels.planes import lowest_point
from tessera.solvers.prices import price_problem
from tessera.solvers.pricing import Pricing
from tessera.solvers.pricing.dual import descend
from tessera.solvers.relaxation import Relaxation
from tests.support.builders import a_random_problem
from tests.support.laws import examples
from tests.support.problems import a_problem, are_equal, brute_force, problems

FOREVER = Budget(remaining_s=lambda: math.inf)


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_the_lowest_point_of_planes_matches_a_linear_program(
    seed: int, planes: int, unknowns: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)
    slopes, height = rng.normal(size=(planes, unknowns)), rng.normal(size=planes)
    if coarse:  # rounding makes ties and repeated planes
        slopes, height = np.round(slopes), np.round(height)
    low, high = -rng.random(unknowns), rng.random(unknowns)
    low[rng.random(unknowns) < 0.3] = 0.0
    point = np.empty(unknowns)
    lowest = lowest_point(height, slopes, low, high, point)
    known = linprog(
        np.append(np.zeros(unknowns), 1.0),
        A_ub=np.column_stack([slopes, -np.ones(planes)]),
        b_ub=-height,
        bounds=[*zip(low.tolist(), high.tolist(), strict=True), (None, None)],
    )
    assert known.status == 0
    assert lowest == pytest.approx(known.fun, abs=1e-8)
    assert (height + slopes @ point).max() == pytest.approx(lowest, abs=1e-8)
    assert np.all((low <= point) & (point <= high))


@given(problems(), st.integers(0, 2**32 - 1))
def test_any_prices_give_a_valid_bound(problem: Problem, seed: int) -> None:
    prices = np.random.default_rng(seed).normal(0.5, 2.0, len(problem.rows))
    best = brute_force(problem)
    assert best is None or price_problem(problem, prices).bound >= best


@examples(15)
@given(st.integers(0, 2**32 - 1), st.integers(20, 120))
def test_the_dual_reaches_the_optimum_of_the_linear_program(seed: int, jobs: int) -> None:
    problem = a_random_problem(seed, jobs=jobs)
    ours = descend(problem, FOREVER, None, most=math.inf, tolerance=1e-7)
    lp = Relaxation().solve(problem, Budget(remaining_s=lambda: math.inf, gap=1e-7))
    assert ours.total == pytest.approx(lp.bound, rel=1e-5)
    assert ours.total >= lp.objective


@examples(15)
@given(st.integers(0, 2**32 - 1))
def test_known_prices_that_are_still_good_need_one_pass(seed: int) -> None:
    problem = a_random_problem(seed, jobs=150)
    cold = Pricing().solve(problem, Budget(remaining_s=lambda: math.inf, gap=1e-2))
    hint = Solution(
        status=SolveStatus.UNKNOWN,
        choice=np.full(150, -1),
        objective=0,
        bound=math.inf,
        solver="last round",
        prices=cold.prices,
    )
    loose = Budget(remaining_s=lambda: math.inf, gap=5e-2)
    warm = Pricing().solve(problem, loose, hint)
    assert dict(warm.work)["pricing"] == 1.0
    assert warm.gap <= 5e-2


@examples(15)
@given(st.integers(0, 2**32 - 1))
def test_recorded_work_repeats_pricing_bit_for_bit(seed: int) -> None:
    problem = a_random_problem(seed, jobs=60)
    hint = Greedy().solve(problem, FOREVER)
    left = iter([*[1.0] * 12, *[0.0] * 10_000])  # time runs out during the descent
    cut = Pricing().solve(problem, Budget(remaining_s=lambda: next(left)), hint)
    again = Pricing().solve(
        problem, Budget(remaining_s=lambda: math.inf, work=dict(cut.work)), hint
    )
    assert are_equal(cut, again)


def test_must_run_jobs_that_cannot_run_are_proven_infeasible_by_prices_alone() -> None:

    problem = a_problem([[(5, {0: 5})], [(5, {0: 5})], [(5, {0: 4})]], [9], must_run=[0, 1])
    solution = Pricing().solve(problem, FOREVER)
    assert solution.status is SolveStatus.INFEASIBLE
