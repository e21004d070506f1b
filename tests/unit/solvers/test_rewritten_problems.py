"""Problems rewritten for solvers: in their simplest numbers, and with waiting as columns."""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera import solvers
from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import RecordedAnswer, Solution, SolveStatus
from tessera.formulation.round.draft import RowUse
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind
from tessera.solvers.base import Budget
from tessera.solvers.exact import baselines as baselines
from tessera.solvers.exact.answers import is_answer, make_solution, objective_of, without_answer
from tessera.solvers.exact.baselines.pop import Pop
from tessera.solvers.exact.branching import Branching
from tessera.solvers.exact.fixing import core_of
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.prices import price_problem
from tessera.solvers.exact.simplify import simplify
from tessera.solvers.goals.rows import with_rows
from tessera.solvers.registry import make_solver
from tests.support.goals import every_answer
from tests.support.laws import examples
from tests.support.odd_problems import draw_problem as draw_odd_problem
from tests.support.odd_problems import dynamic_optimum
from tests.support.problems import a_problem, brute_force, problems
from tests.support.proofs import a_random_certificate, a_random_problem

FOREVER = Budget(remaining_s=lambda: math.inf, gap=0.0)


def coarse() -> Problem:
    """Return a round whose values are multiples of 6 and amounts multiples of 4.

    Column 0, and all columns of job 1, are too large.
    """
    return a_problem(
        [[(60, {0: 16}), (30, {0: 8})], [(90, {0: 20})], [(18, {0: 4}), (36, {0: 12})]], [15]
    )


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


EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)


def at_most_waiting(problem: Problem, most: int) -> Problem:
    """Return the problem in which at most ``most`` jobs with columns wait."""
    jobs, none = np.flatnonzero(np.diff(problem.job_start) > 0), np.zeros(0, np.int64)
    row = RowUse(
        row=CouplingRow(kind=RowKind.CHANGES, subject="waiting", capacity=most),
        column=none,
        amount=none,
        idle_job=jobs,
        idle_amount=np.ones(len(jobs), np.int64),
    )
    return with_rows(problem, [row])


def solver_classes() -> list[type[Any]]:
    """Return the class of each solver, as importing code gets it."""
    modules = [info.name for info in pkgutil.iter_modules(solvers.__path__, "tessera.solvers.")]
    modules += [
        info.name
        for info in pkgutil.iter_modules(baselines.__path__, "tessera.solvers.exact.baselines.")
    ]
    found = {}
    for module in map(importlib.import_module, modules):
        for name, cls in vars(module).items():
            if isinstance(cls, type) and isinstance(getattr(cls, "name", None), str):
                found[name] = cls
    return [*found.values(), Pop]


@pytest.mark.parametrize("cls", solver_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("seed", range(8))
def test_an_unwrapped_solver_counts_waiting_jobs(cls: type[Any], seed: int) -> None:
    problem = draw_odd_problem(np.random.default_rng(seed), "counts who waits")
    best = dynamic_optimum(problem)
    solution = cls().solve(problem, EXACT)

    assert not solution.has_answer or not find_violations(problem, solution)
    if best is None:
        assert not solution.has_answer
    else:
        assert solution.status is not SolveStatus.INFEASIBLE
        assert solution.bound >= best >= (solution.objective if solution.has_answer else best)


@given(
    problem=problems(jobs=4),
    most=st.integers(0, 3),
    reach=st.floats(0, 30),
    prices=st.lists(st.floats(0, 10), min_size=4, max_size=4),
)
@examples(200)
def test_a_core_with_rows_that_count_waiting_jobs_has_a_valid_bound(
    problem: Problem, most: int, reach: float, prices: list[float]
) -> None:
    limited = at_most_waiting(problem, most)
    known, best = Greedy().solve(limited, EXACT), dynamic_optimum(limited)
    if not known.has_answer or best is None:
        return
    priced = price_problem(limited, np.array(prices[: len(limited.rows)]))

    core = core_of(limited, priced, known.choice, reach)

    inside = dynamic_optimum(core.problem)
    assert inside is not None, "the core must contain the known answer"
    assert best <= max(inside + core.offset, core.outside)
    assert inside + core.offset <= best


@given(problem=problems(jobs=4), most=st.integers(0, 3))
@examples(60)
def test_spelled_out_waiting_changes_no_optimum(problem: Problem, most: int) -> None:
    limited = at_most_waiting(problem, most)
    solution = make_solver("cp-sat").solve(limited, EXACT)
    answers = every_answer(limited)
    if not answers:
        assert solution.status is SolveStatus.INFEASIBLE
        return
    best = max(sum(int(limited.value[c]) for c in choice if c >= 0) for choice in answers)
    assert (solution.objective, solution.bound) == (best, best)
    assert not find_violations(limited, solution)
