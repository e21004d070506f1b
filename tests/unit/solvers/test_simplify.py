"""A round in its simplest numbers, and all that is carried over to the round as it was stated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.certificate_check import check_certificate
from tessera.formulation.certificates import Branch, Certificate, PriceLeaf
from tessera.formulation.problem import Problem
from tessera.formulation.solution import RecordedAnswer, Solution, SolveStatus
from tessera.solvers.answers import is_answer, make_solution, objective_of, without_answer
from tessera.solvers.base import Budget
from tessera.solvers.branching import Branching
from tessera.solvers.simplify import simplify
from tests.support.problems import a_problem, brute_force
from tests.support.proofs import a_random_certificate, a_random_problem

FOREVER = Budget(remaining_s=lambda: math.inf, gap=0.0)


def coarse() -> Problem:
    """Return a round whose values are multiples of 6 and amounts multiples of 4.

    Column 0, and all columns of job 1, are too large.
    """
    return a_problem(
        [[(60, {0: 16}), (30, {0: 8})], [(90, {0: 20})], [(18, {0: 4}), (36, {0: 12})]], [15]
    )


def test_columns_that_do_not_fit_are_left_out() -> None:
    simple = simplify(coarse())
    assert simple.columns is not None
    assert simple.columns.tolist() == [1, 3, 4]
    assert simple.problem.job_start.tolist() == [0, 1, 1, 3]


def test_capacity_is_rounded_down_to_what_columns_can_use_and_values_are_divided() -> None:
    simple = simplify(coarse())
    assert simple.problem.capacity.tolist() == [12]
    assert simple.divisor == 6
    assert simple.problem.value.tolist() == [5, 3, 6]
    assert simple.problem.scale == pytest.approx(coarse().scale / 6)


def test_a_round_in_its_simplest_numbers_is_left_as_it_is() -> None:
    problem = a_problem([[(3, {0: 2}), (4, {0: 3})]], [5])
    simple = simplify(problem)
    assert simple.is_original
    solution = make_solution(problem, np.array([1]), bound=4.0, solver="none")
    assert simple.lift(solution) is solution
    assert simple.read_hint(solution) is solution


@pytest.mark.parametrize(
    ("jobs", "capacity"),
    [
        ([], [4]),
        ([[], []], [4]),
        ([[(0, {0: 1})], [(0, {})]], [4]),
        ([[(7, {0: 5})]], [4]),
        ([[(-6, {0: 0})], [(-9, {0: 2})]], [0]),
        ([[(5, {})]], []),
    ],
)
def test_empty_and_trivial_rounds_are_simplified(
    jobs: list[list[tuple[int, dict[int, int]]]], capacity: list[int]
) -> None:
    problem = a_problem(jobs, capacity)
    simple = simplify(problem)
    assert brute_force(simple.problem) == (brute_force(problem) or 0) // simple.divisor
    nothing = np.full(len(jobs), -1)
    lifted = simple.lift(make_solution(simple.problem, nothing, bound=3.0, solver="none"))
    assert lifted.choice.tolist() == [-1] * len(jobs)


@pytest.mark.parametrize("seed", range(60))
def test_answers_bounds_and_certificates_of_the_simple_round_hold_for_the_original(
    seed: int,
) -> None:
    problem = a_random_problem(seed, with_idle=False)
    simple, best = simplify(problem), brute_force(problem)
    inner = Branching().solve(simple.problem, FOREVER)
    lifted = simple.lift(inner)
    assert lifted.bound == inner.bound * simple.divisor
    if best is None:
        assert not lifted.has_answer
        return
    assert is_answer(problem, lifted.choice)
    assert lifted.objective == objective_of(problem, lifted.choice) == lifted.bound == best
    if lifted.certificate is not None:
        assert lifted.certificate.bound == best
        assert check_certificate(problem, lifted.certificate) == best


@pytest.mark.parametrize("seed", range(60))
def test_a_certificate_of_the_simple_round_proves_the_same_of_the_original(seed: int) -> None:
    problem = a_random_problem(seed, with_idle=False)
    simple = simplify(problem)
    certificate = a_random_certificate(simple.problem, seed)
    solution = without_answer(simple.problem, SolveStatus.UNKNOWN, solver="none")
    lifted = simple.lift(replace(solution, certificate=certificate)).certificate
    assert lifted is not None
    proven = check_certificate(simple.problem, certificate) * simple.divisor
    assert check_certificate(problem, lifted) <= proven == lifted.bound


def test_columns_prices_and_branches_of_a_certificate_are_translated() -> None:
    simple = simplify(coarse())
    leaf = PriceLeaf(prices=((0, 2),), branch_prices=(3,))
    knapsack = PriceLeaf(prices=(), knapsacks=(0,), job_prices=((2, 1),), branch_prices=(0,))
    certificate = Certificate(
        bound=8, denominator=2, root=Branch(columns=(0, 2), most=1, below=leaf, above=knapsack)
    )
    solution = without_answer(simple.problem, SolveStatus.UNKNOWN, solver="none")
    lifted = simple.lift(replace(solution, certificate=certificate)).certificate
    assert lifted == Certificate(
        bound=48,
        denominator=2,
        root=Branch(
            columns=(1, 4),
            most=1,
            below=PriceLeaf(prices=((0, 12),), branch_prices=(18,)),
            above=PriceLeaf(prices=(), knapsacks=(0,), job_prices=((2, 6),), branch_prices=(0,)),
        ),
    )


def test_a_hint_is_read_in_the_numbers_of_the_simple_round() -> None:
    simple = simplify(coarse())
    known = make_solution(
        coarse(), np.array([1, -1, 3]), bound=100.0, solver="none", prices=np.array([12.0])
    )
    hint = simple.read_hint(known)
    assert hint is not None
    assert hint.choice.tolist() == [0, -1, 1]
    assert (hint.objective, hint.bound, hint.prices.tolist()) == (8, 16.0, [2.0])
    assert simple.lift(hint).choice.tolist() == known.choice.tolist()


@pytest.mark.parametrize("choice", [[0, -1, -1], [-1, 2, -1], [1, -1, 4], [9, 9, 9], [1]])
def test_of_a_hint_that_is_no_answer_only_the_prices_are_read(choice: list[int]) -> None:
    simple = simplify(coarse())
    false = Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array(choice),
        objective=600,
        bound=600.0,
        solver="none",
        prices=np.array([12.0]),
    )
    hint = simple.read_hint(false)
    assert hint is not None
    assert not hint.has_answer
    assert hint.prices.tolist() == [2.0]


def test_recorded_answers_are_translated_back_and_forth() -> None:
    simple = simplify(coarse())
    inner = (
        RecordedAnswer(stage="cp-sat", changes=((0, 0), (2, 2), (1, -1)), bound=11.0),
        RecordedAnswer(stage="cp-sat", changes=(), bound=9.0),
    )
    solution = without_answer(simple.problem, SolveStatus.UNKNOWN, solver="none")
    lifted = simple.lift(replace(solution, recorded=inner)).recorded
    assert lifted == (
        RecordedAnswer(stage="cp-sat", changes=((0, 1), (2, 4), (1, -1)), bound=66.0),
        RecordedAnswer(stage="cp-sat", changes=(), bound=54.0),
    )
    assert simple.read_record(lifted) == inner


def test_a_recorded_bound_keeps_its_unit_whatever_the_divisor() -> None:
    for divisor in range(2, 200):  # 49 * (1 / 49) is less than 1
        simple = simplify(a_problem([[(divisor, {0: 1})], [(2 * divisor, {0: 1})]], [2]))
        assert simple.divisor == divisor
        recorded = (RecordedAnswer(stage="cp-sat", changes=(), bound=float(divisor)),)
        assert simple.read_record(recorded)[0].bound == 1.0
