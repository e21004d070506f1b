"""Parts of the exact solvers: exchanges, the work of branching, and certificates of prices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget
from tessera.solvers.exact import exchange
from tessera.solvers.exact.answers import is_answer, make_solution, objective_of, trivial_bound
from tessera.solvers.exact.branching import Branching
from tessera.solvers.exact.exchange import exchange_choices
from tessera.solvers.exact.prices import certificate_of_prices, price_problem
from tests.support.problems import a_problem
from tests.support.proofs import a_random_problem, best_choice, best_objective


def exchanged(problem: Problem, choice: list[int] | Ints, prices: list[float]) -> Ints:
    priced = price_problem(problem, np.array(prices, np.float64))
    return exchange_choices(problem, priced, np.array(choice, np.int64))


def changes_of(problem: Problem, choice: Ints, most: int) -> list[Ints]:
    """Return all answers that differ from ``choice`` in at most ``most`` jobs."""
    found = []
    for jobs in itertools.combinations(range(len(problem.jobs)), most):
        for columns in itertools.product(*([-1, *problem.columns_of(j)] for j in jobs)):
            other = choice.copy()
            other[list(jobs)] = columns
            if is_answer(problem, other):
                found.append(other)
    return found


def test_a_pair_is_found_where_no_single_change_gains() -> None:
    # Job 0 holds all 6 units. With 4 of them it is worth 2 less, and job 1 gains 5 on the other 2.
    problem = a_problem([[(10, {0: 6}), (8, {0: 4})], [(5, {0: 2})]], [6])
    start = np.array([0, -1])
    single = changes_of(problem, start, 1)
    assert max(objective_of(problem, one) for one in single) == objective_of(problem, start)
    better = exchanged(problem, start, [2.0])
    assert better.tolist() == [1, 2]
    assert start.tolist() == [0, -1]  # the given answer is left as it is


@pytest.mark.parametrize("seed", range(60))
def test_exchanges_are_feasible_and_never_worse(seed: int) -> None:
    problem = a_random_problem(seed, jobs=6, with_idle=False)
    best = best_choice(problem)
    if best is None:
        return
    draw = np.random.default_rng(seed)
    start = best.copy()
    start[(draw.random(len(start)) < 0.6) & ~problem.must_run] = -1
    if not is_answer(problem, start):
        return
    better = exchanged(problem, start, draw.exponential(2.0, len(problem.rows)).tolist())
    assert is_answer(problem, better)
    assert objective_of(problem, start) <= objective_of(problem, better)
    assert objective_of(problem, better) <= objective_of(problem, best)


@pytest.mark.parametrize("seed", range(40))
def test_no_change_of_two_jobs_gains_afterwards(seed: int) -> None:
    problem = a_random_problem(seed, jobs=5, with_idle=False)
    start = np.full(len(problem.jobs), -1)
    if not is_answer(problem, start):
        return
    prices = np.random.default_rng(seed).exponential(1.0, len(problem.rows))
    better = exchanged(problem, start, prices.tolist())
    reached = objective_of(problem, better)
    for most in (1, 2):
        for other in changes_of(problem, better, most):
            assert objective_of(problem, other) <= reached


def test_the_work_of_a_scan_and_the_steps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem([[(k + 1, {0: 1})] for k in range(20)], [20])
    monkeypatch.setattr(exchange, "MOST_STEPS", 3)
    assert np.count_nonzero(exchanged(problem, [-1] * 20, [1.0]) >= 0) in range(3, 7)


def test_a_stage_that_needs_exchanges_only_has_work_that_repeats_it() -> None:
    problem = a_problem([[(5, {0: 3})], [(9, {0: 3})]], capacity=[6])
    hint = make_solution(problem, np.array([0, -1]), bound=trivial_bound(problem), solver="greedy")
    free = Budget(remaining_s=lambda: math.inf)

    first = Branching().solve(problem, free, hint)

    assert first.objective == 14 > hint.objective
    assert dict(first.work) == {"branching": 1.0}
    again = Branching().solve(
        problem, Budget(remaining_s=lambda: math.inf, work=dict(first.work)), hint
    )
    assert again.choice.tolist() == first.choice.tolist()


SEEDS = range(200)


def test_any_prices_prove_a_bound_that_our_checker_accepts() -> None:
    for seed in SEEDS:
        problem = a_random_problem(seed)
        prices = np.random.default_rng([seed, 3]).uniform(-1, 6, len(problem.rows))
        certificate = certificate_of_prices(problem, prices)
        proven = check_certificate(problem, certificate)
        best = best_objective(problem)
        assert best is None or best <= proven <= certificate.bound


def test_the_bound_is_that_of_the_prices_but_for_rounding() -> None:
    for seed in SEEDS:
        problem = a_random_problem(seed, with_idle=False)
        if (np.diff(problem.job_start)[problem.must_run] == 0).any():
            continue  # such a job makes any bound true
        prices = np.random.default_rng([seed, 4]).uniform(0, 6, len(problem.rows))
        certificate = certificate_of_prices(problem, prices)
        assert certificate.bound <= price_problem(problem, prices).total + 1e-3


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf, -math.inf])
def test_a_price_that_is_no_price_counts_as_0(price: float) -> None:
    problem = a_problem([[(4, {0: 4})], [(5, {1: 4})]], [8, 4])
    certificate = certificate_of_prices(problem, np.array([price, 1.0]))
    assert certificate == certificate_of_prices(problem, np.array([0.0, 1.0]))
    assert check_certificate(problem, certificate) == certificate.bound == 4 + 1 + 4


def test_values_and_prices_beyond_64_bits_are_exact() -> None:
    problem = a_problem([[(2**49, {0: 2**40})], [(2**49 - 1, {0: 2**40})]], [2**40])
    certificate = certificate_of_prices(problem, np.array([2.0**30]))
    assert check_certificate(problem, certificate) == certificate.bound == 2**70
    certificate = certificate_of_prices(problem, np.array([1e300]))
    assert check_certificate(problem, certificate) == certificate.bound == 2**93


def test_a_row_that_nothing_uses_costs_nothing_however_high_its_price() -> None:
    problem = a_problem([[(5, {0: 1, 1: 0})], [(3, {0: 1})]], [1, 7, 7])
    certificate = certificate_of_prices(problem, np.array([3.0, 1e300, 1e18]))
    assert certificate.bound == 5
    assert check_certificate(problem, certificate) == 5
