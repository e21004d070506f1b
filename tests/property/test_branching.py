"""The branching stage against an enumeration of all choices, with waiting, must-run and equal jobs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.certificate_check import check_certificate
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers.answers import (
    is_answer,
    make_solution,
    objective_of,
    trivial_bound,
    without_answer,
)
from tessera.solvers.base import Budget
from tessera.solvers.branching import Branching
from tessera.solvers.branching.joining import find_classes
from tests.support.builders import a_random_problem as a_random_round
from tests.support.laws import examples
from tests.support.problems import a_problem, are_equal
from tests.support.proofs import a_random_problem, best_choice, best_objective
from tests.support.simplified import Simplified

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0, work={"branching": 2000})
SEEDS = st.integers(0, 2**32 - 1)
NONSENSE = (0.0, -3.0, math.inf, -math.inf, math.nan, 1e-300, 1e300)


def a_hint_of_prices(problem: Problem, seed: int, *, nonsense: bool) -> Solution:
    """Return a hint without an answer, whose prices are random, or not even prices."""
    draw = np.random.default_rng([seed, 9])
    prices = draw.exponential(2.0, len(problem.rows))
    if nonsense:
        odd = draw.random(len(prices)) < 0.6
        prices[odd] = draw.choice(NONSENSE, int(odd.sum()))
    return without_answer(problem, SolveStatus.UNKNOWN, solver="elsewhere", prices=prices)


def require_truth(problem: Problem, solution: Solution, best: int | None) -> None:
    """Fail unless the bound holds, the answer is one, and the certificate proves the bound."""
    assert solution.status is not SolveStatus.INFEASIBLE or best is None
    if solution.has_answer:
        assert best is not None
        assert is_answer(problem, solution.choice)
        assert solution.objective == objective_of(problem, solution.choice) <= best
    if best is not None:
        assert solution.bound >= best
    if solution.certificate is not None:
        assert solution.proved_by == "branching"
        assert check_certificate(problem, solution.certificate) <= solution.bound


@given(SEEDS)
def test_branching_finds_and_proves_the_optimum_of_small_problems(seed: int) -> None:
    problem = a_random_problem(seed)
    best = best_objective(problem)
    solution = Simplified(Branching()).solve(problem, EXACT)
    require_truth(problem, solution, best)
    assert solution.has_answer == (best is not None)
    if best is not None:
        assert solution.objective == solution.bound == best
        assert solution.status is SolveStatus.OPTIMAL


@given(SEEDS, st.booleans())
def test_branching_is_true_at_any_prices(seed: int, nonsense: bool) -> None:
    problem = a_random_problem(seed)
    hint = a_hint_of_prices(problem, seed, nonsense=nonsense)
    best = best_objective(problem)
    solution = Simplified(Branching()).solve(problem, replace(EXACT, work={}), hint)
    require_truth(problem, solution, best)


@given(SEEDS, st.integers(1, 40), st.booleans())
def test_fewer_nodes_prove_less_but_nothing_false(seed: int, nodes: int, with_prices: bool) -> None:
    problem = a_random_problem(seed)
    hint = a_hint_of_prices(problem, seed, nonsense=False) if with_prices else None
    best = best_objective(problem)
    solution = Simplified(Branching()).solve(
        problem, replace(EXACT, work={"branching": nodes}), hint
    )
    require_truth(problem, solution, best)
    assert dict(solution.work)["branching"] <= nodes


@given(SEEDS)
def test_a_search_from_a_known_answer_is_never_worse_than_it(seed: int) -> None:
    problem = a_random_problem(seed)
    best = best_choice(problem)
    if best is None:
        return
    draw = np.random.default_rng(seed)
    known = best.copy()
    known[(draw.random(len(known)) < 0.5) & ~problem.must_run] = -1
    if not is_answer(problem, known):
        return
    hint = replace(
        make_solution(problem, known, bound=trivial_bound(problem), solver="elsewhere"),
        prices=draw.exponential(2.0, len(problem.rows)),
    )
    solution = Simplified(Branching()).solve(problem, EXACT, hint)
    require_truth(problem, solution, best_objective(problem))
    assert solution.objective >= objective_of(problem, known)
    assert solution.objective == objective_of(problem, best)


@pytest.mark.parametrize("choice", [[1, 1], [0, 2], [5, -1], [-1, -1], [0]])
def test_a_hint_that_is_no_answer_is_ignored(choice: list[int]) -> None:
    # Job 0 has columns 0 and 1, and job 1 has 2 and must run; 0 and 2 do not fit together.
    problem = a_problem([[(9, {0: 6}), (4, {0: 3})], [(1, {0: 5})]], [8], must_run=[1])
    free = Simplified(Branching()).solve(problem, EXACT)
    assert (free.objective, free.bound) == (5, 5)
    false = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array(choice),
        objective=100,
        bound=100.0,
        solver="elsewhere",
    )
    assert are_equal(Simplified(Branching()).solve(problem, EXACT, false), free)


@examples(10)
@given(SEEDS, st.integers(10, 40), st.integers(1, 60))
def test_a_search_that_its_clock_ended_is_repeated_by_its_work(
    seed: int, jobs: int, looks: int
) -> None:
    problem, stage = a_random_round(seed, jobs=jobs), Branching()
    left = [looks]

    def ticking() -> float:
        left[0] -= 1
        return float(left[0])

    first = stage.solve(problem, Budget(remaining_s=ticking, gap=0.0))
    forever = Budget(remaining_s=lambda: math.inf, gap=0.0, work=dict(first.work))
    assert are_equal(first, stage.solve(problem, forever))


@given(SEEDS)
def test_identical_jobs_are_one_class_and_others_are_not(seed: int) -> None:
    problem = a_random_problem(seed, jobs=8, with_idle=False)
    first, label = find_classes(problem, np.ones(len(problem.jobs), np.bool_))

    def content(job: int) -> object:
        columns = [(int(problem.value[c]), problem.usage_of(c)) for c in problem.columns_of(job)]
        return columns, bool(problem.must_run[job])

    assert np.array_equal(first, np.sort(first))
    for job in range(len(problem.jobs)):
        assert content(job) == content(int(first[label[job]]))
        same = [other for other in range(job) if content(other) == content(job)]
        assert first[label[job]] == (same[0] if same else job)


def test_a_thousand_identical_jobs_are_decided_by_counts() -> None:
    # 700 units hold 233 jobs of 3 units, worth 7 each, and 1 unit is left for one of value 2.
    problem = a_problem([[(7, {0: 3}), (2, {0: 1})]] * 1000, [700])
    solution = Simplified(Branching()).solve(problem, EXACT)
    assert solution.objective == solution.bound == 233 * 7 + 2
    assert solution.certificate is not None
    assert check_certificate(problem, solution.certificate) == solution.bound
