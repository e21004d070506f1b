"""Individual cases of each solver."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pulp
import pytest
from ortools.sat.python import cp_model

from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.round.problem import Problem
from tessera.simulator.provenance import ROOT
from tessera.solvers import registry
from tessera.solvers.base import Budget, SolverFailed
from tessera.solvers.exact import cbc, convex
from tessera.solvers.exact.answers import make_solution, trivial_bound
from tessera.solvers.exact.cbc import Cbc
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.exact.cpsat import model as cpsat_model
from tessera.solvers.exact.cpsat.solver import STATUS
from tessera.solvers.exact.greedy import Greedy
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.exact.relaxation import Relaxation
from tests.support.builders import a_random_problem
from tests.support.problems import a_problem, are_equal

ALWAYS = Budget(remaining_s=lambda: math.inf, gap=0.0)

EXPIRED = Budget(remaining_s=lambda: 0.0)

EXACT = ("cp-sat", "cbc", "cvxpy", "portfolio")

GROUPS = ((0, 80, 4), (1, 20, 16), (2, 160, 2), (3, 160, 2))
"""Nodes with 1,280 GPUs of four types."""


@pytest.mark.parametrize("name", registry.solver_names())
def test_an_empty_problem_has_an_empty_solution(name: str) -> None:
    solution = registry.make_solver(name).solve(a_problem([], [4]), ALWAYS)
    assert solution.status is SolveStatus.OPTIMAL
    assert (len(solution.choice), solution.objective, solution.bound) == (0, 0, 0)


@pytest.mark.parametrize(
    ("problem", "choice"),
    [
        (a_problem([[(3, {}), (5, {})], [(2, {})]], []), [1, 2]),  # without rows
        (a_problem([[(5, {0: 1})], [(7, {0: 2})]], [0]), [-1, -1]),  # without capacity
        (a_problem([[(3, {0: 1}), (9, {0: 8}), (6, {0: 4})]], [4]), [2]),
        (a_problem([[(-5, {0: 1})], [(2, {0: 1})]]), [-1, 1]),  # no job runs at a loss
    ],
)
@pytest.mark.parametrize("name", registry.solver_names())
def test_each_job_takes_the_best_column_that_fits(
    name: str, problem: Problem, choice: list[int]
) -> None:
    solution = registry.make_solver(name).solve(problem, ALWAYS)
    assert solution.choice.tolist() == choice
    assert solution.has_answer
    assert solution.bound >= solution.objective


@pytest.mark.parametrize("name", registry.solver_names())
def test_a_must_run_job_that_fits_nowhere_is_proven_infeasible(name: str) -> None:
    solution = registry.make_solver(name).solve(
        a_problem([[(5, {0: 9})]], [8], must_run=[0]), ALWAYS
    )
    assert solution.status is SolveStatus.INFEASIBLE
    assert solution.choice.tolist() == [-1]


@pytest.mark.parametrize("name", EXACT)
def test_an_expired_budget_still_runs_jobs(name: str) -> None:
    problem = a_problem([[(60, {0: 5})], [(50, {0: 5})], [(99, {0: 8})]], [10])
    solution = registry.make_solver(name).solve(problem, EXPIRED)
    if name == "portfolio":
        assert solution.objective == Greedy().solve(problem, ALWAYS).objective
        assert solution.work[0] == ("greedy", 1.0)
        assert {name for name, work in solution.work if work} == {"greedy"}
    else:
        assert solution.status is SolveStatus.UNKNOWN
        assert dict(solution.work) == {name: 0.0}


def test_a_cancelled_round_still_has_the_greedy_solution() -> None:
    budget = Budget(remaining_s=lambda: math.inf, cancelled=lambda: True)
    problem = a_random_problem(1, jobs=30)
    assert Portfolio().solve(problem, budget).objective == Greedy().solve(problem, ALWAYS).objective


def test_an_unknown_solver_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidInput, match="portfolio, greedy, pricing, lp, cp-sat, cbc, cvxpy"):
        registry.make_solver("simplex")


# greedy


def test_greedy_upgrades_at_the_greatest_marginal_gain() -> None:
    problem = a_problem([[(10, {0: 1}), (19, {0: 2})], [(10, {0: 1}), (11, {0: 2})]], [3])
    assert Greedy().solve(problem, ALWAYS).choice.tolist() == [1, 2]


def test_greedy_retypes_a_job_to_free_what_another_needs() -> None:
    first = [(10, {0: 4}), (12, {1: 4})]
    problem = a_problem([first, [(9, {0: 4})]], [4, 4], current={0: 0})
    assert Greedy().solve(problem, ALWAYS).choice.tolist() == [1, 2]


def test_greedy_is_at_least_as_good_as_its_hint() -> None:
    problem = a_problem([[(60, {0: 5})], [(50, {0: 5})], [(99, {0: 8})]], [10])
    pair = make_solution(problem, np.array([0, 1, -1]), bound=200, solver="me")
    assert Greedy().solve(problem, ALWAYS).objective == 99
    assert Greedy().solve(problem, ALWAYS, pair).objective == 110


@pytest.mark.parametrize("choice", [[0, 1, 2], [1, -1, -1], [0]])
def test_an_infeasible_hint_is_ignored(choice: list[int]) -> None:
    problem = a_problem([[(60, {0: 5})], [(50, {0: 5})], [(99, {0: 8})]], [10])
    liar = Solution(
        status=SolveStatus.OPTIMAL,
        choice=np.array(choice),
        objective=999,
        bound=999,
        solver="me",
        prices=np.zeros(1),
    )
    for name in registry.solver_names():
        assert registry.make_solver(name).solve(problem, ALWAYS, liar).objective in (99, 110)


# the relaxation


def test_shadow_prices_are_the_value_of_a_unit_of_the_row() -> None:
    problem = a_problem([[(60, {0: 1})], [(50, {0: 1})], [(40, {0: 1})]], [2])
    solution = Relaxation().solve(problem, ALWAYS)
    assert 40 <= solution.prices[0] <= 50
    assert solution.status is SolveStatus.OPTIMAL


def test_the_work_of_the_relaxation_is_its_rounds_and_can_be_limited() -> None:
    problem = a_random_problem(2, jobs=300, groups=GROUPS)
    whole = Relaxation().solve(problem, ALWAYS)
    rounds = dict(whole.work)["lp"]
    short = Relaxation().solve(
        problem, Budget(remaining_s=lambda: math.inf, gap=0.0, work={"lp": rounds - 1})
    )
    assert rounds > 1
    assert dict(short.work)["lp"] == rounds - 1
    assert trivial_bound(problem) >= short.bound >= whole.bound


def test_a_relaxation_round_cut_short_by_the_clock_is_not_counted() -> None:
    seconds = iter([1.0, 1e-9])
    problem = a_random_problem(2, jobs=300, groups=GROUPS)
    solution = Relaxation().solve(problem, Budget(remaining_s=lambda: next(seconds)))
    assert dict(solution.work) == {"lp": 0.0}
    assert solution.objective == Greedy().solve(problem, ALWAYS).objective
    assert solution.bound == trivial_bound(problem)


# CP-SAT and the portfolio


def test_cp_sat_cut_short_by_the_clock_is_marked_as_not_repeatable() -> None:
    problem = a_random_problem(2, jobs=1000, groups=GROUPS)
    start = Relaxation().solve(problem, ALWAYS)
    seconds: Iterator[float] = iter([1.0, 1.0])  # plans with one second, then has none
    budget = Budget(remaining_s=lambda: next(seconds, 1e-6), gap=0.0)
    solution = CpSat().solve(problem, budget, start)
    assert dict(solution.work) == {"cp-sat": 0.0}
    assert solution.objective >= start.objective


def test_cp_sat_does_not_begin_a_model_that_it_could_not_build_in_time() -> None:
    problem = a_random_problem(2, jobs=1000, groups=GROUPS)
    solution = CpSat().solve(problem, Budget(remaining_s=lambda: 0.1))
    assert solution.status is SolveStatus.UNKNOWN
    assert dict(solution.work) == {"cp-sat": 0.0}


def test_three_hundred_jobs_on_1280_gpus_come_within_a_thousandth_of_the_bound() -> None:
    problem = a_random_problem(3, jobs=300, groups=GROUPS)
    budget = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 0.3})
    solution = Portfolio().solve(problem, budget)
    greedy = Greedy().solve(problem, budget)
    assert solution.gap <= 1e-3
    assert solution.objective > greedy.objective
    assert len(solution.prices) == len(problem.rows)
    assert are_equal(solution, Portfolio().solve(problem, budget))


class FirstColumnSolver:
    """A solver that claims that every job runs on its first column."""

    name = "wrong"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        del budget, hint
        return make_solution(
            problem, problem.job_start[:-1], bound=0, solver=self.name, work=((self.name, 1.0),)
        )


class FailingSolver:
    """A solver that fails as a library would."""

    name = "broken"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        raise SolverFailed(self.name, "status 77")


def test_an_answer_that_breaks_a_rule_is_dropped_with_its_bound_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = a_problem([[(60, {0: 5})], [(50, {0: 5})], [(99, {0: 8})]], [10])
    with caplog.at_level(logging.WARNING):
        solution = Portfolio((Greedy(), FirstColumnSolver(), FailingSolver(), CpSat())).solve(
            problem, ALWAYS
        )
    assert (solution.objective, solution.bound) == (110, 110)
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events == ["answer_dropped", "solver_failed"]


@pytest.mark.parametrize("name", ["cp-sat", "cbc", "cvxpy"])
def test_an_unexpected_status_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"cp-sat": cpsat_model, "cbc": cbc, "cvxpy": convex}
    monkeypatch.setattr(modules[name], "STATUS", {})
    with pytest.raises(SolverFailed, match=name):
        registry.make_solver(name).solve(a_problem([[(5, {0: 1})]]), ALWAYS)


def test_an_answer_out_of_time_is_not_below_greedys_on_the_stated_numbers() -> None:
    # Both rows have room for one use of 4. Only as stated does row 1 look larger than row 0.
    problem = a_problem([[(8, {0: 4}), (8, {1: 4})], [(5, {0: 4})]], [5, 7])
    late = Budget(remaining_s=lambda: 0.0)
    assert Greedy().solve(problem, ALWAYS).objective == 13
    assert Portfolio().solve(problem, late).objective == 13


def test_a_bound_of_cp_sat_below_its_own_answer_is_its_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = a_random_problem(5, jobs=24)
    others = Portfolio((Greedy(), Relaxation())).solve(problem, ALWAYS)
    monkeypatch.setattr(cp_model.CpSolver, "best_objective_bound", 1.0)
    with pytest.raises(SolverFailed, match="its bound 1 is below an answer of"):
        CpSat().solve(problem, ALWAYS)
    solution = Portfolio((Greedy(), Relaxation(), CpSat())).solve(problem, ALWAYS)
    assert (solution.objective, solution.bound) == (others.objective, others.bound)
    assert "solver_failed" in [getattr(record, "event", None) for record in caplog.records]


def test_cp_sat_that_calls_a_problem_with_an_answer_infeasible_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = a_random_problem(5, jobs=24)
    known = Greedy().solve(problem, ALWAYS)
    monkeypatch.setattr(cpsat_model, "STATUS", dict.fromkeys(STATUS, SolveStatus.INFEASIBLE))
    with pytest.raises(SolverFailed, match="infeasible that has a known answer"):
        CpSat().solve(problem, ALWAYS, known)


def test_a_baseline_out_of_time_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: pulp.LpProblem, *_: object) -> int:
        self.status, self.sol_status = pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
        for variable in self.variables():
            variable.varValue = 0
        return 0

    monkeypatch.setattr(pulp.LpProblem, "solve", stopped)
    solution = Cbc().solve(a_problem([[(5, {0: 1})]]), Budget(remaining_s=lambda: 9.0))
    assert (solution.status, solution.bound) == (SolveStatus.FEASIBLE, 5)
    assert dict(solution.work) == {"cbc": 0.0}


@pytest.mark.parametrize("name", ["with blanks in it", "without"])
def test_cbc_runs_with_any_folder_for_files_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (folder := tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert Cbc().solve(a_problem([[(5, {0: 1})]]), ALWAYS).objective == 5

    def broken(*_: object) -> None:
        raise pulp.PulpSolverError("the answer cannot be read")

    monkeypatch.setattr(pulp.COIN_CMD, "readsol_MPS", broken)
    with pytest.raises(SolverFailed, match="the answer cannot be read"):
        Cbc().solve(a_problem([[(5, {0: 1})]]), ALWAYS)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("rows", "stage"), [(32, "pricing"), (33, "lp")])
def test_the_portfolio_uses_the_lp_if_there_are_many_rows(rows: int, stage: str) -> None:
    jobs = [[(3, {r: 2}), (5, {r: 3})] for r in range(rows)] + [[(4, {0: 3})]]
    problem = a_problem(jobs, [3] * rows)
    solution = Portfolio().solve(problem, ALWAYS)
    later = ["branching", "cp-sat", "knapsacks"]
    assert list(dict(solution.work)) == ["greedy", stage, *later]
    assert (solution.status, solution.objective) == (SolveStatus.OPTIMAL, 5 * rows)


SOLVE_AND_INTERRUPT = """
import math, signal, sys
from tessera.solvers import registry
from tessera.solvers.base import Budget
from tests.support.builders import a_random_problem

problem = a_random_problem(seed=1, jobs=12)
for name in sys.argv[1:]:
    registry.make_solver(name).solve(problem, Budget(remaining_s=lambda: math.inf, gap=0.0))
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print(name, flush=True)
"""


@pytest.mark.full
def test_an_interrupt_still_works_after_any_solver() -> None:
    names = [*registry.solver_names(), *registry.baseline_names()]
    done = subprocess.run(
        [sys.executable, "-c", SOLVE_AND_INTERRUPT, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == names, done.stderr
