"""The portfolio's proofs: who proved a bound, when CP-SAT is asked, and answers that a clock ended."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.certificate_check import check_certificate
from tessera.formulation.answer.solution import RecordedAnswer, Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver, SolverFailed
from tessera.solvers.exact.answers import is_answer, make_solution, objective_of, without_answer
from tessera.solvers.exact.branching import Branching, KnapsackFilling
from tessera.solvers.exact.branching.solver import MAX_CP_SAT_JOBS
from tessera.solvers.exact.cpsat import POLISHING_WORK, CpSat
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.pricing import Pricing
from tests.support.builders import a_random_problem as a_random_round
from tests.support.laws import scaled
from tests.support.problems import a_problem, are_equal
from tests.support.proofs import a_random_problem, best_objective

FOREVER = Budget(remaining_s=lambda: math.inf)
EXACT = replace(FOREVER, gap=0.0)


def three_jobs() -> Problem:
    """Return a round of optimum 110, which greedy and the shadow prices miss."""
    return a_problem([[(60, {0: 5})], [(50, {0: 5})], [(99, {0: 8})]], [10])


def checked(problem: Problem, solution: Solution) -> Solution:
    """Return the solution if it is an answer within its bound and its certificate proves the bound."""
    assert solution.has_answer
    assert is_answer(problem, solution.choice)
    assert solution.objective == objective_of(problem, solution.choice) <= solution.bound
    assert solution.certificate is not None
    proven = check_certificate(problem, solution.certificate)
    assert solution.is_certified == (proven <= solution.bound)
    assert solution.is_certified or solution.proved_by == "cp-sat"
    return solution


class StatedBound:
    """A stage that proves a bound of ``above`` over the answer so far."""

    name = "stated"

    def __init__(self, above: float) -> None:
        self._above = above

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        assert hint is not None
        bound = objective_of(problem, hint.choice) + self._above
        return make_solution(
            problem, hint.choice, bound=bound, solver=self.name, proved_by="cp-sat"
        )


class AskedCpSat(CpSat):
    """A CP-SAT that does nothing, and remembers with which gaps and limits it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        self.asked.append((budget.gap, budget.work.get(self.name, math.inf)))
        return without_answer(problem, SolveStatus.UNKNOWN, solver=self.name)


class CutCpSat(CpSat):
    """A CP-SAT that a clock ends: its answer stands, but its work cannot be repeated."""

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        return replace(super().solve(problem, EXACT, hint), work=((self.name, 0.0),))


class AbsentCpSat(CpSat):
    """A CP-SAT that nobody may ask."""

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        raise AssertionError("a repetition must not run this stage")


class LyingCpSat(CpSat):
    """A CP-SAT that returns a stated solution."""

    def __init__(self, lie: Solution) -> None:
        self._lie = lie

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        return self._lie


# labels


@pytest.mark.parametrize(
    ("stages", "label"),
    [
        ((Greedy(), Pricing(), Branching()), "branching"),
        ((Greedy(), Pricing(), KnapsackFilling()), "knapsacks"),
        ((Greedy(), Pricing(), CpSat()), "cp-sat"),
    ],
)
def test_the_stage_that_proves_the_bound_is_named(stages: tuple[Solver, ...], label: str) -> None:
    solution = checked(three_jobs(), Portfolio(stages).solve(three_jobs(), EXACT))
    assert (solution.objective, solution.bound, solution.proved_by) == (110, 110, label)


def test_prices_that_prove_the_answer_are_named() -> None:
    problem = a_problem([[(9, {0: 4})], [(8, {0: 4})], [(1, {0: 4})]], [8])
    solution = checked(problem, Portfolio().solve(problem, EXACT))
    assert (solution.bound, solution.proved_by) == (17, "prices")


def test_a_trivial_bound_has_a_certificate_of_prices_of_zero() -> None:
    late = replace(FOREVER, remaining_s=lambda: 0.0)
    solution = checked(three_jobs(), Portfolio().solve(three_jobs(), late))
    assert (solution.bound, solution.proved_by) == (209, "prices")


# when CP-SAT is asked


def many_jobs(jobs: int) -> Problem:
    return a_problem([[(10**6 + job, {0: 1})] for job in range(jobs)], [jobs // 2])


@pytest.mark.parametrize(
    ("jobs", "above", "asked"),
    [
        (MAX_CP_SAT_JOBS, 1.0, [(0.0, POLISHING_WORK)]),
        (MAX_CP_SAT_JOBS + 1, 1.0, []),
        (MAX_CP_SAT_JOBS, 0.0, []),
        (MAX_CP_SAT_JOBS + 1, 1e6, [(FOREVER.gap, math.inf)]),
    ],
)
def test_cp_sat_is_asked_for_each_unproven_round_of_up_to_a_thousand_jobs(
    jobs: int, above: float, asked: list[tuple[float, float]]
) -> None:
    stage = AskedCpSat()
    Portfolio((Greedy(), StatedBound(above), stage)).solve(many_jobs(jobs), FOREVER)
    assert stage.asked == asked


def test_polishing_does_not_exceed_recorded_work() -> None:
    stage = AskedCpSat()
    budget = replace(FOREVER, work={"cp-sat": POLISHING_WORK / 2})
    Portfolio((Greedy(), StatedBound(1.0), stage)).solve(many_jobs(20), budget)
    assert stage.asked == [(0.0, POLISHING_WORK / 2)]


class TimedCpSat(CpSat):
    """A CP-SAT that does nothing, and remembers how long it might have taken."""

    def __init__(self) -> None:
        self.left_s = math.nan

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        self.left_s = budget.remaining_s()
        return without_answer(problem, SolveStatus.UNKNOWN, solver=self.name)


@pytest.mark.parametrize(("jobs", "left_s"), [(80, 15.0), (84, 90.0)])
def test_cp_sat_leaves_time_to_knapsacks_where_few_jobs_fill_a_row(
    jobs: int, left_s: float
) -> None:
    pairs = [[(10**6 + job, {job % 2: 1})] for job in range(jobs)]
    problem, stage = a_problem(pairs, [jobs // 4, jobs // 4]), TimedCpSat()  # half of them fit
    budget = Budget(remaining_s=lambda: 100.0)
    Portfolio((Greedy(), StatedBound(1e6), stage, KnapsackFilling())).solve(problem, budget)
    assert stage.left_s == pytest.approx(left_s)


# answers that a clock ended


@pytest.mark.parametrize("seed", range(scaled(100)))
def test_an_answer_that_a_clock_ended_is_kept_recorded_and_repeated(seed: int) -> None:
    problem = a_random_problem(seed)
    first = Portfolio((Greedy(), CutCpSat())).solve(problem, EXACT)
    assert dict(first.work)["cp-sat"] == 0.0
    if first.has_answer:
        assert first.objective == best_objective(problem)
        checked(problem, first)
    if first.status is SolveStatus.INFEASIBLE:
        return
    budget = replace(EXACT, work=dict(first.work), recorded=first.recorded)
    again = Portfolio((Greedy(), AbsentCpSat())).solve(problem, budget)
    assert are_equal(again, first)
    assert (again.recorded, again.proved_by) == (first.recorded, first.proved_by)
    assert again.certificate == first.certificate


def test_the_record_has_only_what_the_stage_changed() -> None:
    first = Portfolio((Greedy(), CutCpSat())).solve(three_jobs(), EXACT)
    before = Greedy().solve(three_jobs(), EXACT).choice
    changed = np.flatnonzero(before != first.choice)
    assert len(changed)
    assert first.recorded == (
        RecordedAnswer(
            stage="cp-sat",
            changes=tuple((int(j), int(first.choice[j])) for j in changed),
            bound=110.0,
        ),
    )


def test_answers_of_several_workers_are_recorded_and_repeated_with_the_same_work() -> None:
    several = replace(EXACT, workers=2)
    first = Portfolio((Greedy(), CpSat())).solve(three_jobs(), several)
    assert len(first.recorded) == 1
    budget = replace(EXACT, work=dict(first.work), recorded=first.recorded)
    again = Portfolio((Greedy(), AbsentCpSat())).solve(three_jobs(), budget)
    assert are_equal(again, first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (((0, 0), (2, 2)), "the answer of cp-sat is not one of this round"),
        (((0, 1), (1, 1)), "the answer of cp-sat is not one of this round"),
        (((0, 77),), "the answer of cp-sat is not one of this round"),
        (((5, 0),), "there is no job 5 in this round"),
        (((-1, 2),), "there is no job -1 in this round"),
    ],
)
def test_a_record_of_another_answer_is_refused(
    changes: tuple[tuple[int, int], ...], message: str
) -> None:
    tampered = RecordedAnswer(stage="cp-sat", changes=changes, bound=110.0)
    budget = replace(EXACT, recorded=(tampered,))
    with pytest.raises(InvalidInput, match=message):
        Portfolio((Greedy(), CpSat())).solve(three_jobs(), budget)


@pytest.mark.parametrize("bound", [-5.0, 0.0, 98.0])
def test_a_recorded_bound_below_the_recorded_answer_is_not_believed(bound: float) -> None:
    known = RecordedAnswer(stage="cp-sat", changes=((0, 0), (1, 1), (2, -1)), bound=bound)
    budget = replace(EXACT, recorded=(known,))
    solution = Portfolio((Greedy(), CpSat())).solve(three_jobs(), budget)
    assert solution.objective == 110 <= solution.bound


def test_a_recorded_bound_that_is_not_a_number_is_refused() -> None:
    tampered = RecordedAnswer(stage="cp-sat", changes=((0, 0), (1, 1), (2, -1)), bound=math.nan)
    with pytest.raises(InvalidInput, match="recorded"):
        Portfolio((Greedy(), CpSat())).solve(three_jobs(), replace(EXACT, recorded=(tampered,)))


@pytest.mark.parametrize("seed", range(scaled(40)))
@pytest.mark.parametrize("step_s", [2e-4, 2e-3, 0.05])
def test_a_round_that_a_clock_ended_anywhere_is_repeated_bit_for_bit(
    seed: int, step_s: float
) -> None:
    problem = a_random_round(seed, jobs=10 + 3 * (seed % 7))
    left = [0.4]

    def ticking() -> float:
        left[0] -= step_s
        return left[0]

    first = Portfolio().solve(problem, Budget(remaining_s=ticking, gap=0.0, seed=seed))
    checked(problem, first)
    budget = Budget(
        remaining_s=lambda: math.inf,
        gap=0.0,
        seed=seed,
        work=dict(first.work),
        recorded=first.recorded,
    )
    again = Portfolio().solve(problem, budget)
    assert are_equal(again, first)
    assert (again.recorded, again.proved_by) == (first.recorded, first.proved_by)
    assert again.certificate == first.certificate


# lies


def said(problem: Problem, choice: list[int], bound: float, **changes: object) -> Solution:
    solution = make_solution(
        problem, np.array(choice), bound=bound, solver="cp-sat", work=(("cp-sat", 1.0),)
    )
    return replace(solution, proved_by="cp-sat", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "bound", "changes"),
    [
        ([-1, -1, 2], 98.0, {}),  # a bound below the known answer
        ([0, 1, -1], 109.0, {}),  # a bound below its own answer
        ([-1, -1, -1], 0.0, {}),
        ([0, 1, 2], 209.0, {}),  # more than there is
        ([0, 1, 2], 110.0, {"objective": 110}),
        ([1, 0, -1], 110.0, {}),  # columns of other jobs
        ([-1, -1, 2], 110.0, {"objective": 110}),  # a value that it does not have
        ([-1, -1, -1], 0.0, {"status": SolveStatus.INFEASIBLE}),
    ],
)
def test_a_lie_of_cp_sat_is_never_believed(
    choice: list[int], bound: float, changes: dict[str, object]
) -> None:
    problem = three_jobs()
    liar = LyingCpSat(said(problem, choice, bound, **changes))
    solution = checked(problem, Portfolio((Greedy(), Pricing(), liar)).solve(problem, EXACT))
    assert solution.status is not SolveStatus.INFEASIBLE
    assert solution.bound >= 110
    assert solution.proved_by == "prices"
    (failure,) = solution.failures
    assert failure.startswith("cp-sat: ")


def test_the_certificate_of_a_bound_by_cp_sat_proves_what_prices_can() -> None:
    problem = three_jobs()
    by_prices = Portfolio((Greedy(), Pricing())).solve(problem, EXACT)
    solution = checked(problem, Portfolio((Greedy(), Pricing(), CpSat())).solve(problem, EXACT))
    assert (solution.bound, solution.is_certified) == (110, False)
    assert solution.certificate == by_prices.certificate
    assert solution.failures == ()


def test_a_stage_that_fails_is_named_and_the_others_decide() -> None:
    class FailingCpSat(CpSat):
        def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
            raise SolverFailed(self.name, "status 77")

    problem = three_jobs()
    stages = (Greedy(), Pricing(), FailingCpSat(), Branching())
    solution = checked(problem, Portfolio(stages).solve(problem, EXACT))
    assert (solution.bound, solution.failures) == (110, ("cp-sat: status 77",))


def test_no_lie_of_cp_sat_reaches_a_repetition() -> None:
    problem = three_jobs()
    lie = replace(said(problem, [0, 1, 2], 209.0), work=(("cp-sat", 0.0),))
    first = Portfolio((Greedy(), Pricing(), LyingCpSat(lie))).solve(problem, EXACT)
    assert first.recorded == ()
    low = replace(said(problem, [-1, -1, 2], 98.0), work=(("cp-sat", 0.0),))
    first = Portfolio((Greedy(), Pricing(), LyingCpSat(low))).solve(problem, EXACT)
    budget = replace(EXACT, work=dict(first.work), recorded=first.recorded)
    again = checked(problem, Portfolio((Greedy(), Pricing(), AbsentCpSat())).solve(problem, budget))
    assert again.bound >= 110


# extreme rounds


@pytest.mark.parametrize("seed", range(scaled(100)))
def test_random_rounds_are_proven_to_the_last_unit(seed: int) -> None:
    problem, best = a_random_problem(seed), best_objective(a_random_problem(seed))
    solution = Portfolio().solve(problem, FOREVER)
    if best is None:
        assert not solution.has_answer
        return
    checked(problem, solution)
    assert solution.objective == solution.bound == best
    assert solution.status is SolveStatus.OPTIMAL


@pytest.mark.full
def test_a_hundred_thousand_different_jobs_are_solved_within_limits() -> None:
    draw = np.random.default_rng(0)
    gpus = draw.choice([1, 2, 4, 8], 100_000)
    value = draw.permutation(400_000)[:100_000] + 100_000 * gpus
    problem = a_problem(
        [
            [(int(v), {0: int(g)}), (int(v) - 7, {1: int(g)})]
            for v, g in zip(value, gpus, strict=True)
        ],
        [60_000, 50_000],
    )
    assert len(set(value.tolist())) > 90_000
    solution = checked(problem, Portfolio().solve(problem, FOREVER))
    assert solution.gap <= FOREVER.gap
    again = replace(FOREVER, work=dict(solution.work), recorded=solution.recorded)
    assert are_equal(solution, Portfolio().solve(problem, again))


def test_rows_of_large_amounts_are_proven_to_the_last_unit() -> None:
    # Both jobs of value 8 and one of value 5 fill the row exactly: its price per unit is 2.5e-7.
    unit = 10_000_019
    jobs = [[(8, {0: 3 * unit})], [(8, {0: 3 * unit})], [(5, {0: 2 * unit})]]
    problem = a_problem([*jobs, *[[(3, {0: 2 * unit - 1})]] * 2], [8 * unit])
    solution = checked(problem, Portfolio().solve(problem, EXACT))
    assert solution.objective == solution.bound == 21
