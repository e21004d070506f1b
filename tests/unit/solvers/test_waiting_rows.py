"""Rows that count waiting jobs, rewritten for solvers that support only columns."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera import solvers
from tessera.benchmarks.rounds.fuzzing import draw_problem as fuzzed_problem
from tessera.benchmarks.rounds.fuzzing import dynamic_optimum
from tessera.formulation.check import find_violations
from tessera.formulation.draft import RowUse
from tessera.formulation.problem import CouplingRow, Problem, RowKind
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers import baselines as baselines
from tessera.solvers.answers import make_solution, trivial_bound
from tessera.solvers.base import Budget
from tessera.solvers.baselines.pop import Pop
from tessera.solvers.fixing import core_of
from tessera.solvers.goals.rows import with_rows
from tessera.solvers.greedy import Greedy
from tessera.solvers.prices import price_problem
from tessera.solvers.registry import make_solver
from tessera.solvers.waiting_columns import WaitingAsColumns, spell_out
from tests.support.goals import every_answer
from tests.support.laws import examples
from tests.support.problems import a_problem, problems

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


def a_problem_of_three_jobs(most: int) -> Problem:
    job = [(-1, {0: 1}), (5, {0: 3})]
    return at_most_waiting(a_problem([job, job, job], capacity=[3], current={1: 0}), most)


def test_waiting_becomes_the_last_column_of_each_job_whose_waiting_uses_a_row() -> None:
    problem = at_most_waiting(a_problem([[], [(1, {0: 1})], [(2, {0: 1}), (3, {})]]), 1)
    spelled, origin = spell_out(problem)
    assert spelled.job_start.tolist() == [0, 0, 2, 5]
    assert origin.tolist() == [0, -1, 1, 2, -1]
    assert spelled.value.tolist() == [1, 0, 2, 3, 0]
    assert spelled.must_run.tolist() == [False, True, True]
    assert [spelled.usage_of(c) for c in range(5)] == [{0: 1}, {1: 1}, {0: 1}, {}, {1: 1}]
    assert not len(spelled.idle_row)


def solver_classes() -> list[type[Any]]:
    """Return the class of each solver, as importing code gets it."""
    modules = [info.name for info in pkgutil.iter_modules(solvers.__path__, "tessera.solvers.")]
    modules += [
        info.name for info in pkgutil.iter_modules(baselines.__path__, "tessera.solvers.baselines.")
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
    problem = fuzzed_problem(np.random.default_rng(seed), "counts who waits")
    best = dynamic_optimum(problem)
    solution = cls().solve(problem, EXACT)

    assert not solution.has_answer or not find_violations(problem, solution)
    if best is None:
        assert not solution.has_answer
    else:
        assert solution.status is not SolveStatus.INFEASIBLE
        assert solution.bound >= best >= (solution.objective if solution.has_answer else best)


def test_a_core_counts_only_what_decided_jobs_use_by_waiting() -> None:
    problem = a_problem_of_three_jobs(1)
    known = np.array([0, 2, -1])  # the third job waits, which one job may
    priced = price_problem(problem, np.zeros(2))

    core = core_of(problem, priced, known, reach=100.0)

    assert core.jobs.tolist() == [0, 1, 2]
    assert core.problem.capacity.tolist() == [3, 1]


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


class HintRecordingGreedy:
    """Greedy that records the hint that it receives."""

    name = "asked"

    def __init__(self) -> None:
        self.hint: Solution | None = None

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        self.hint = hint
        return Greedy().solve(problem, budget, hint)


def test_a_hint_is_translated_to_the_columns_that_the_solver_sees() -> None:
    problem, inner = a_problem_of_three_jobs(1), HintRecordingGreedy()
    hint = make_solution(
        problem, np.array([0, 2, -1]), bound=trivial_bound(problem), solver="earlier"
    )
    solution = WaitingAsColumns(inner).solve(problem, EXACT, hint)
    assert inner.hint is not None
    assert inner.hint.choice.tolist() == [0, 3, 8]
    assert solution.objective >= hint.objective


def test_a_hint_that_breaks_the_row_is_not_passed_on() -> None:
    problem, inner = a_problem_of_three_jobs(1), HintRecordingGreedy()
    hint = make_solution(problem, np.array([-1, -1, 5]), bound=9.0, solver="earlier")
    WaitingAsColumns(inner).solve(problem, EXACT, hint)
    assert inner.hint is None


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
