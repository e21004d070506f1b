"""Exchanges: one or two changes of an answer that gain together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tessera.formulation.problem import Problem
from tessera.formulation.tables import Ints
from tessera.solvers import exchange
from tessera.solvers.answers import is_answer, objective_of
from tessera.solvers.exchange import exchange_choices
from tessera.solvers.prices import price_problem
from tests.support.problems import a_problem
from tests.support.proofs import a_random_problem, best_choice


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
