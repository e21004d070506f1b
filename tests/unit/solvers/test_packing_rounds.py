"""Rounds whose counts do not fit on nodes: packing rows, their prices, and what is placed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.permissions import Avoids
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.solvers.base import Budget
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.passes import PASSES_KEY
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.odd_gangs import gangs
from tests.support.oracles.joint_optimum import divisions, find_joint_optimum

POLICY = Policy(objective="throughput")


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
    assert "1 of the room on nodes (a100: shares of 5-8 count 1)" in reason.message
    assert outcome.goals[-1].bound == pytest.approx(20.0)
    assert outcome.placed_score == pytest.approx(20.0)


def test_rounds_whose_shares_leave_no_gaps_are_solved_once() -> None:
    outcome = decide(gangs(1, 2, 4, 8, 8, 4, 2, 1))
    assert PASSES_KEY not in dict(outcome.solution.work)
    assert not any(row.name.startswith("packing") for row in outcome.problem.rows)


def test_counts_that_fit_are_solved_once() -> None:
    assert PASSES_KEY not in dict(decide(gangs(5, 3, 6, 2, 7, 1)).solution.work)


def test_a_round_without_time_is_placed_as_it_is() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    budget = Budget(remaining_s=lambda: 0.0)
    outcome = plan_round(snapshot, POLICY, Portfolio(), budget)
    assert not outcome.violations
    assert PASSES_KEY not in dict(outcome.solution.work)


def test_a_round_that_was_recorded_without_passes_is_repeated_without_them() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4)
    first = counted_only(snapshot)
    again = decide(snapshot, work={"greedy": 1.0, "pricing": 100.0, "cp-sat": 1e6})
    assert np.array_equal(first.solution.choice, again.solution.choice)


def test_a_round_with_packing_rows_is_repeated_from_its_record() -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4, 3, 7, 12, 6, nodes=6)
    first = decide(snapshot)
    assert dict(first.solution.work)[PASSES_KEY] >= 1
    again = decide(snapshot, work=dict(first.solution.work))
    assert np.array_equal(first.solution.choice, again.solution.choice)
    assert first.placed.placement == again.placed.placement
    assert (first.solution.bound, first.prices) == (again.solution.bound, again.prices)


@pytest.mark.parametrize("seed", range(6))
def test_fresh_rounds_reach_the_optimum_of_columns_and_nodes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = gangs(*rng.choice([2, 3, 5, 6, 7, 12], 9).tolist(), nodes=4)
    best = find_joint_optimum(snapshot, POLICY, 30.0)
    assert best.proven
    assert decide(snapshot).placed_score == pytest.approx(best.value, rel=1e-3)


def test_gangs_are_divided_over_equal_nodes_as_the_checker_accepts_them() -> None:
    assert divisions(5, 2, 8) == [(1, 4), (2, 3)]
    assert divisions(6, 2, 8) == [(3, 3)]
    assert divisions(12, 2, 8) == [(4, 8), (6, 6)]


def test_jobs_stay_where_they_are_unless_a_move_pays() -> None:
    here = {0: Gang(members=((0, (0, 1, 2, 3, 4)),)), 1: Gang(members=((1, (0, 1, 2, 3, 4)),))}
    snapshot = gangs(5, 5, 5, 3, 3, 6, running=here, restart_s=600.0)
    outcome = decide(snapshot)
    assert {job: outcome.placed.placement.gangs.get(job) for job in here} == here
    assert not outcome.placed.placement.migrated


def test_pinned_jobs_are_never_moved() -> None:
    here = {0: Gang(members=((0, (0, 1, 2)),)), 1: Gang(members=((1, (0, 1, 2)),))}
    snapshot = gangs(3, 3, 6, 6, 7, 7, running=here, movable=False)
    outcome = decide(snapshot)
    for job, gang in here.items():
        assert outcome.placed.placement.gangs.get(job, gang) == gang


def test_avoided_nodes_get_no_share_of_a_packing() -> None:
    snapshot = gangs(5, 5, 5, 3, 3, 6)
    object.__setattr__(snapshot, "avoids", Avoids(job=np.array([0, 1]), node=np.array([0, 0])))
    outcome = decide(snapshot)
    for job in (0, 1):
        gang = outcome.placed.placement.gangs.get(job)
        assert gang is None or all(node != 0 for node, _ in gang.members)


@pytest.mark.parametrize("objective", ["throughput within 1% then jct", "max-min then throughput"])
def test_goals_in_order_see_packing_rows_and_repeat_exactly(objective: str) -> None:
    snapshot = gangs(5, 5, 5, 5, 4, 4, 3, 7, 12, 6, nodes=5)
    policy = Policy(objective=objective)
    first = decide(snapshot, policy)
    again = decide(snapshot, policy, dict(first.solution.work))
    assert np.array_equal(first.solution.choice, again.solution.choice)
    assert first.placed.placement == again.placed.placement


def test_nodes_of_many_sizes_in_one_pool_are_packed() -> None:
    nodes = [(0, 1, size) for size in (1, 2, 3, 5, 6, 8, 11, 13, 16)]
    counts = (5, 5, 5, 6, 6, 7, 7, 7, 9, 11, 12, 3, 3, 2)
    snapshot = a_snapshot(
        nodes=[row | {"name": f"n{k}"} for k, row in enumerate(some_nodes(*nodes))],
        jobs=[a_job(f"j{k}", k) for k in range(len(counts))],
        estimates=[an_estimate(k, 0, n, 1, iter_time_s=8 / n) for k, n in enumerate(counts)],
    )
    outcome, before = decide(snapshot), counted_only(snapshot)
    assert outcome.placed_score >= before.placed_score
    assert outcome.placed_score <= outcome.goals[-1].bound * (1 + 1e-6)


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
