"""The branching and knapsack stages against an enumeration of all choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver
from tessera.solvers.exact.answers import (
    is_answer,
    make_solution,
    objective_of,
    trivial_bound,
    without_answer,
)
from tessera.solvers.exact.branching import Branching, KnapsackFilling
from tessera.solvers.exact.branching import stated as statement
from tessera.solvers.exact.branching.fillings import FillingPool
from tessera.solvers.exact.branching.joining import find_classes
from tessera.solvers.exact.branching.stated import StatedKnapsacks, state_knapsacks
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.prices import price_problem
from tessera.solvers.exact.simplify import simplify
from tessera.solvers.exact.waiting_columns import with_waiting_as_columns
from tests.support.builders import a_random_problem as a_random_round
from tests.support.laws import examples
from tests.support.problems import a_problem, are_equal, brute_force
from tests.support.proofs import a_random_problem, best_choice, best_objective


class Simplified:
    """A solver that calls ``stage`` on the simplest numbers, with waiting as columns."""

    def __init__(self, stage: Solver) -> None:
        self._stage, self.name = stage, stage.name

    @with_waiting_as_columns
    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        """Return the stage's solution in terms of ``problem``."""
        simple = simplify(problem)
        return simple.lift(self._stage.solve(simple.problem, budget, simple.read_hint(hint)))


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


UNLIMITED = Budget(remaining_s=lambda: math.inf, gap=0.0)


def a_hint(problem: Problem, seed: int) -> Solution | None:
    """Return greedy's answer with random prices, or None if greedy finds none."""
    greedy = Greedy().solve(problem, UNLIMITED)
    if not greedy.has_answer:
        return None
    prices = np.random.default_rng(seed).exponential(2.0, len(problem.rows))
    return replace(greedy, prices=prices, bound=trivial_bound(problem))


def of_one_row(seed: int) -> Problem:
    """Return jobs that share one row; some are identical."""
    draw = np.random.default_rng(seed)
    kinds = [
        [
            (int(draw.integers(1, 30)), {0: int(draw.integers(1, 7))})
            for _ in range(int(draw.integers(1, 4)))
        ]
        for _ in range(4)
    ]
    jobs = [kinds[int(draw.integers(0, 4))] for _ in range(int(draw.integers(1, 7)))]
    return a_problem(jobs, [int(draw.integers(6, 20))])


@given(SEEDS)
def test_filled_knapsacks_are_feasible_and_their_certificate_proves_the_bound(seed: int) -> None:
    problem = of_two_types(seed)
    hint, best = a_hint(problem, seed), brute_force(problem)
    if hint is None or best is None:
        return
    solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, hint)
    assert is_answer(problem, solution.choice)
    assert hint.objective <= solution.objective == objective_of(problem, solution.choice) <= best
    assert best <= solution.bound <= hint.bound
    if solution.certificate is not None:
        assert solution.proved_by == "knapsacks"
        assert check_certificate(problem, solution.certificate) <= solution.bound


@given(SEEDS, st.integers(1, 3))
def test_fewer_passes_prove_less_but_nothing_false(seed: int, passes: int) -> None:
    problem = of_two_types(seed)
    hint, best = a_hint(problem, seed), brute_force(problem)
    if hint is None or best is None:
        return
    budget = replace(UNLIMITED, work={"knapsacks": passes})
    solution = Simplified(KnapsackFilling()).solve(problem, budget, hint)
    assert solution.objective <= best <= solution.bound
    assert dict(solution.work)["knapsacks"] <= passes


@given(SEEDS)
def test_a_round_of_one_row_is_solved_exactly(seed: int) -> None:
    problem = of_one_row(seed)
    nothing = np.full(len(problem.jobs), -1)
    hint = make_solution(
        problem, nothing, bound=trivial_bound(problem), solver="none", prices=np.ones(1)
    )
    solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, hint)
    assert solution.objective == solution.bound == brute_force(problem)
    assert solution.status is SolveStatus.OPTIMAL


def test_a_job_that_must_run_runs_at_a_loss() -> None:
    # Without job 0, two jobs of value 5 fit; with it, only one does.
    problem = a_problem([[(-2, {0: 3})], [(5, {0: 3})], [(5, {0: 3})]], [6], must_run=[0])
    known = make_solution(
        problem, np.array([0, -1, -1]), bound=10.0, solver="none", prices=np.ones(1)
    )
    solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, known)
    assert solution.choice[0] == 0
    assert solution.objective == 3 <= solution.bound


def test_rows_of_which_a_column_uses_two_are_left_alone() -> None:
    # Row 2 counts what both types may run together: two jobs, although each type has room for two.
    jobs = [[(10 - j, {0: 1, 2: 1}), (9 - j, {1: 1, 2: 1})] for j in range(4)]
    problem = a_problem(jobs, [2, 2, 2])
    nothing = make_solution(
        problem, np.full(4, -1), bound=34.0, solver="none", prices=np.array([0.0, 0.0, 8.0])
    )
    stage = KnapsackFilling()
    assert not stage.suits(problem, nothing.choice)
    solution = Simplified(stage).solve(problem, UNLIMITED, nothing)
    assert solution.work == (("knapsacks", 0.0),)
    assert solution.objective == 0 < 19 <= solution.bound


def test_knapsacks_suit_rounds_in_which_few_jobs_fill_a_row() -> None:
    problem = a_problem([[(2, {0: 1})], [(3, {1: 1})]] * 40, [30, 30])
    stage, running = KnapsackFilling(), np.full(80, -1)
    assert stage.suits(problem, running)
    running[:40] = problem.job_start[:40]
    assert stage.suits(problem, running)
    running[40] = problem.job_start[40]
    assert not stage.suits(problem, running)
    assert not stage.suits(problem, None)
    alone = a_problem([[(2, {0: 1})]] * 80, [60])
    assert stage.suits(alone, np.arange(80))


@given(SEEDS)
def test_a_row_that_no_column_uses_stops_nothing(seed: int) -> None:
    problem = of_two_types(seed, unused=[5])
    hint, best = a_hint(problem, seed), brute_force(problem)
    assert hint is not None
    assert best is not None
    solution = KnapsackFilling().solve(problem, UNLIMITED, hint)
    assert solution.objective <= best <= solution.bound
    assert dict(solution.work)["knapsacks"] > 0 or solution.gap == 0
    if solution.certificate is not None:
        assert check_certificate(problem, solution.certificate) <= solution.bound


def test_too_large_rounds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = of_one_row(3)
    hint = a_hint(problem, 3)
    assert hint is not None
    monkeypatch.setattr(statement, "MOST_LOADS", 1)
    solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, hint)
    assert np.array_equal(solution.choice, hint.choice)
    assert solution.work == (("knapsacks", 0.0),)
    assert solution.bound >= brute_force(problem)  # type: ignore[operator]
    assert solution.certificate is None


def test_without_an_answer_there_is_nothing_to_fill() -> None:
    problem = of_one_row(5)
    unknown = without_answer(problem, SolveStatus.UNKNOWN, solver="none", prices=np.ones(1))
    for hint in (None, unknown):
        solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, hint)
        assert solution.status is SolveStatus.UNKNOWN
        assert solution.bound >= brute_force(problem)  # type: ignore[operator]


@examples(10)
@given(SEEDS, st.integers(10, 60), st.integers(1, 12))
def test_passes_that_a_clock_ended_are_repeated_by_their_number(
    seed: int, jobs: int, looks: int
) -> None:
    problem = a_random_round(seed, jobs=jobs)
    hint = a_hint(problem, seed)
    left = [looks]

    def ticking() -> float:
        left[0] -= 1
        return float(left[0])

    stage = KnapsackFilling()
    first = stage.solve(problem, Budget(remaining_s=ticking, gap=0.0, seed=seed), hint)
    again = Budget(remaining_s=lambda: math.inf, gap=0.0, seed=seed, work=dict(first.work))
    second = stage.solve(problem, again, hint)
    assert are_equal(first, second)
    assert first.certificate == second.certificate


def test_a_column_that_uses_nothing_of_a_row_is_not_in_its_knapsack() -> None:
    # Column 1 names row 0 with an amount of 0. As part of that knapsack, it would exclude column 0.
    problem = a_problem([[(9, {0: 3}), (8, {0: 0, 1: 3})]] * 2, [5, 5])
    hint = a_hint(problem, 0)
    assert hint is not None
    solution = Simplified(KnapsackFilling()).solve(problem, UNLIMITED, hint)
    assert solution.objective == 17 <= solution.bound
    if solution.certificate is not None:
        assert check_certificate(problem, solution.certificate) <= solution.bound


def of_two_types(seed: int, unused: Sequence[int] = ()) -> Problem:
    """Return jobs that each run on one of two types; some are identical.

    ``unused`` are the capacities of types on which none of them runs.
    """
    draw = np.random.default_rng(seed)
    kinds = [
        [
            (int(draw.integers(1, 40)), {int(draw.integers(0, 2)): int(draw.integers(1, 6))})
            for _ in range(int(draw.integers(1, 5)))
        ]
        for _ in range(5)
    ]
    jobs = [kinds[int(draw.integers(0, 5))] for _ in range(int(draw.integers(2, 7)))]
    return a_problem(jobs, [int(draw.integers(4, 12)), int(draw.integers(4, 12)), *unused])


def a_statement(problem: Problem) -> StatedKnapsacks | None:
    return state_knapsacks(problem, price_problem(problem, np.ones(len(problem.rows))))


@given(SEEDS)
def test_dives_and_combinations_of_fillings_are_answers(seed: int) -> None:
    problem = of_two_types(seed)
    stated = a_statement(problem)
    if stated is None:
        return
    pool, best = FillingPool(problem, stated), brute_force(problem)
    assert best is not None
    for turn in range(2):
        dived = pool.dive(stated.price, UNLIMITED, turn)
        assert dived is not None
        choice, price = dived
        assert is_answer(problem, choice)
        assert objective_of(problem, choice) <= best
        pool.add_answer(choice)
        assert stated.bound(price) >= best * stated.scale
        combined = pool.combine(UNLIMITED)
        assert combined is not None
        assert is_answer(problem, combined)
        assert objective_of(problem, choice) <= objective_of(problem, combined) <= best


@given(SEEDS)
def test_the_bound_does_not_depend_on_what_the_workspace_remembers(seed: int) -> None:
    problem = of_two_types(seed)
    fresh, used = a_statement(problem), a_statement(problem)
    if fresh is None or used is None:
        return
    draw = np.random.default_rng(seed)
    used.space.unit[:] = draw.integers(0, 50 * used.scale, len(used.space.unit))
    used.space.width[:] = draw.integers(0, 50 * used.scale, len(used.space.width))
    for _ in range(3):
        price = draw.integers(0, 30 * fresh.scale, len(fresh.price))
        assert {one.bound(price) for one in (fresh, used)} == {a_plain_bound(problem, fresh, price)}


def a_plain_bound(problem: Problem, stated: StatedKnapsacks, price: np.ndarray) -> int:
    """Return the bound at the jobs' prices by filling each row load by load, with all items."""
    sacks = stated.sacks
    total = int((price * sacks.members).sum())
    for row in range(len(sacks.capacity)):
        best = [0] * (int(sacks.capacity[row]) + 1)
        for g in range(int(sacks.group_start[row]), int(sacks.group_start[row + 1])):
            items = range(int(sacks.item_start[g]), int(sacks.item_start[g + 1]))
            best = [
                max(
                    [best[load]]
                    + [
                        best[load - int(sacks.weight[i])]
                        + int(sacks.worth[i] - price[sacks.owner[g]])
                        for i in items
                        if sacks.weight[i] <= load
                    ]
                )
                for load in range(len(best))
            ]
        total += best[-1]
    return total
