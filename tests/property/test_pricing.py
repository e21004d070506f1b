"""Laws of prices: of the bounds that they prove, of rounds that know some, and of the default solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tessera.benchmarks.rounds.instances import FAMILIES, churn_round, make_instance
from tessera.formulation.answer.check import find_violations
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.tables import Floats
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer, make_solution, objective_of, trivial_bound
from tessera.solvers.exact.greedy import Greedy, find_better_choice
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.prices import price_near, price_problem
from tessera.solvers.exact.pricing import Pricing, dual
from tessera.solvers.exact.pricing.dual import descend, descend_near
from tessera.solvers.exact.pricing.surface import surface_near
from tessera.solvers.exact.relaxation import Relaxation
from tessera.solvers.kernels.greedy import least_loss
from tessera.solvers.kernels.planes import lowest_point
from tessera.solvers.kernels.pricing import price_best_columns
from tessera.solvers.registry import make_solver, solver_names
from tests.support.builders import a_random_problem
from tests.support.laws import examples
from tests.support.odd_problems import (
    KINDS,
    TooLarge,
    answer_faults,
    draw_prices,
    draw_problem,
    dynamic_optimum,
)
from tests.support.problems import are_equal, brute_force, problems

OURS = tuple(name for name in ("pricing", "portfolio") if name in solver_names())

EXACT = Budget(remaining_s=lambda: math.inf, gap=0.0)

USUAL = Budget(remaining_s=lambda: math.inf)

EXPIRED = Budget(remaining_s=lambda: 0.0)

SEEDS = st.integers(0, 2**32 - 1)


def find_faults(problem: Problem, found: Solution) -> list[str]:
    """Return the faults of a solution; objectives that dynamic programming cannot judge count as right."""
    try:
        return answer_faults(problem, found, dynamic_optimum(problem))
    except TooLarge:
        return answer_faults(problem, found, math.nan)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(seed=SEEDS)
def test_solutions_and_bounds_are_valid_on_artificial_problems_too(
    name: str, kind: str, seed: int
) -> None:
    problem = draw_problem(np.random.default_rng(seed), kind)

    assert find_faults(problem, make_solver(name).solve(problem, USUAL)) == []


@pytest.mark.parametrize("name", OURS)
@examples(100)
@given(seed=SEEDS)
def test_no_hint_makes_a_solution_or_a_bound_invalid(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = draw_problem(rng)
    hint = Solution(
        status=SolveStatus.FEASIBLE,
        solver="liar",
        objective=10**9,
        bound=-1.0,
        choice=rng.integers(-1, max(1, len(problem.cell)), len(problem.jobs)),
        prices=draw_prices(rng, problem),
    )

    assert find_faults(problem, make_solver(name).solve(problem, EXACT, hint)) == []


@pytest.mark.parametrize("family", FAMILIES)
@examples(5)
@given(seed=st.integers(0, 1000), running=st.sampled_from([0.0, 0.5, 1.0]))
def test_without_time_the_solution_is_never_worse_than_greedy(
    family: str, seed: int, running: float
) -> None:
    problem = build_problem(
        make_instance(60, 64, 4, seed, family=family, running=running), Policy()
    )
    greedy = make_solver("greedy").solve(problem, USUAL)

    solution = make_solver().solve(problem, EXPIRED)

    assert not find_violations(problem, solution)
    assert solution.objective >= greedy.objective
    assert solution.bound >= solution.objective


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_bounds_and_solutions_agree_with_stock_cp_sat(family: str, seed: int) -> None:
    problem = build_problem(make_instance(24, 24, 4, seed, family=family, running=0.5), Policy())
    stock = make_solver("stock-cp-sat").solve(problem, EXACT)

    assert stock.status is SolveStatus.OPTIMAL
    for name in OURS:
        solution = make_solver(name).solve(problem, USUAL)
        assert not find_violations(problem, solution)
        assert solution.objective <= stock.objective <= solution.bound
    assert solution.gap <= 1e-4  # the last solver is the portfolio


@examples(10)
@given(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_after_churn_the_last_solution_and_prices_help_to_reach_the_gap_again(
    seed: int, share: float
) -> None:
    snapshot = make_instance(60, 64, 4, seed)
    problem = build_problem(snapshot, Policy())
    first = make_solver().solve(problem, USUAL)
    later = build_problem(churn_round(snapshot, problem, first.choice, share, seed), Policy())
    hint = Solution(
        status=SolveStatus.FEASIBLE,
        choice=later.current,
        solver=first.solver,
        objective=objective_of(later, later.current),
        bound=trivial_bound(later),
        prices=first.prices,
    )

    solution = make_solver().solve(later, USUAL, hint)

    assert not find_violations(later, solution)
    assert solution.gap <= 1e-4
    assert solution.objective >= hint.objective


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
def test_recorded_work_repeats_pricing_bit_for_bit(seed: int) -> None:
    problem = a_random_problem(seed, jobs=60)
    hint = Greedy().solve(problem, FOREVER)
    left = iter([*[1.0] * 12, *[0.0] * 10_000])  # time runs out during the descent
    cut = Pricing().solve(problem, Budget(remaining_s=lambda: next(left)), hint)
    again = Pricing().solve(
        problem, Budget(remaining_s=lambda: math.inf, work=dict(cut.work)), hint
    )
    assert are_equal(cut, again)


def test_an_unsolvable_model_ends_the_ascent_with_a_valid_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, forever = a_random_problem(3, jobs=20), Budget(remaining_s=lambda: math.inf)
    whole = dual.descend(problem, forever, None, most=400, tolerance=1e-6)
    step, taken = dual._Descent._step, []

    def fails_at_the_third(descent: dual._Descent) -> tuple[Floats, float, bool] | None:
        taken.append(descent)
        return step(descent) if len(taken) < 3 else None

    monkeypatch.setattr(dual._Descent, "_step", fails_at_the_third)
    cut = dual.descend(problem, forever, None, most=400, tolerance=1e-6)
    assert cut.passes == 3 < whole.passes
    assert cut.total >= whole.total >= Greedy().solve(problem, forever).objective


SOME = examples(150)

PRICES = st.lists(st.floats(0, 10), min_size=3, max_size=3)


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
