"""Rounds whose counts do not fit on nodes: packing rows, their prices, and what is placed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.rounds.passes import PASSES_KEY
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.odd_gangs import gangs
from tests.support.oracles.joint_optimum import find_joint_optimum

POLICY = Policy(objective="throughput", promise_starts=False)


def decide(
    snapshot: Snapshot, policy: Policy = POLICY, work: dict[str, float] | None = None
) -> RoundOutcome:
    budget = Budget(remaining_s=lambda: math.inf, work=work or {})
    outcome = plan_round(snapshot, policy, Portfolio(), budget)
    assert not outcome.violations
    return outcome


def counted_only(snapshot: Snapshot, policy: Policy = POLICY) -> RoundOutcome:
    return decide(snapshot, policy, {PASSES_KEY: 0.0})


def test_the_bound_of_a_round_sees_what_nodes_can_hold() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    outcome, before = decide(snapshot), counted_only(snapshot)
    assert before.goals[-1].bound == pytest.approx(24.0)
    assert outcome.goals[-1].bound < 23.5
    assert outcome.placed_score == pytest.approx(outcome.goals[-1].bound, rel=1e-4)
    assert outcome.placed_score >= before.placed_score


def test_a_packing_row_has_a_price_under_a_name_that_says_what_it_counts() -> None:
    outcome = decide(gangs(5, 5, 5, 5, 5, 5, nodes=4))
    prices = {name: price for name, price in outcome.prices.items() if name.startswith("packing/")}
    assert any("a100: shares of " in name and price > 0 for name, price in prices.items())


def test_gangs_over_half_a_node_are_proven_to_need_a_node_each() -> None:
    snapshot = gangs(5, 5, 5, 5, 5, nodes=4)
    complete = np.ones(len(snapshot.estimates), np.bool_)  # they run on one node only
    snapshot = replace(snapshot, estimates=replace(snapshot.estimates, complete=complete))
    outcome = decide(snapshot)
    (reason,) = [d.reason for d in outcome.decisions if d.reason is not None]
    assert "1 of the room on nodes (a100: shares of 5-8 count 1)" in str(reason.message)
    assert outcome.goals[-1].bound == pytest.approx(20.0)
    assert outcome.placed_score == pytest.approx(20.0)


def test_rounds_whose_shares_leave_no_gaps_are_solved_once() -> None:
    outcome = decide(gangs(1, 2, 4, 8, 8, 4, 2, 1))
    assert PASSES_KEY not in dict(outcome.solution.work)
    assert not any(row.name.startswith("packing") for row in outcome.problem.rows)


def test_a_round_that_was_recorded_without_passes_is_repeated_without_them() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    first = counted_only(snapshot)
    again = decide(snapshot, work={"greedy": 1.0, "pricing": 100.0, "cp-sat": 1e6})
    assert np.array_equal(first.solution.choice, again.solution.choice)


@pytest.mark.parametrize("seed", range(6))
def test_fresh_rounds_reach_the_optimum_of_columns_and_nodes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = gangs(*rng.choice([2, 3, 5, 6, 7, 12], 9).tolist(), nodes=4)
    best = find_joint_optimum(snapshot, POLICY, 30.0)
    assert best.proven
    assert decide(snapshot).placed_score == pytest.approx(best.value, rel=1e-3)


class _Lying:
    """A solver whose answer in every pass after the first breaks the rows."""

    name = "portfolio"

    def __init__(self) -> None:
        self._first: Solution | None = None

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        if self._first is None:
            self._first = Portfolio().solve(problem, budget, hint)
            return self._first
        every = np.array(
            [columns.start for columns in map(problem.columns_of, range(len(problem.jobs)))]
        )
        return Solution(
            status=self._first.status,
            choice=every,
            objective=int(problem.value[every].sum()),
            bound=0.0,
            solver=self.name,
        )


def test_a_pass_whose_solver_lies_makes_no_false_bound() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    outcome = plan_round(snapshot, POLICY, _Lying(), Budget(remaining_s=lambda: math.inf))
    assert not outcome.violations
    assert outcome.goals[-1].bound >= find_joint_optimum(snapshot, POLICY, 30.0).value - 1e-6
