"""Laws of a whole round: any snapshot, however inconsistent, leads to decisions that pass the checker."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.check import score_solution
from tessera.formulation.codec import decode, encode
from tessera.formulation.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.lifecycle import ACTIVE
from tessera.formulation.policy import Policy
from tessera.formulation.rates import expected_rate, unit_rate
from tessera.formulation.snapshot import STATES, Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.laws import examples
from tests.support.snapshots import snapshots


def budget(seed: int = 0, **work: float) -> Budget:
    return Budget(remaining_s=lambda: math.inf, seed=seed, work={"cp-sat": 0.1, "lp": 9.0, **work})


def outcome(snapshot: Snapshot, name: str = "portfolio", **options: float) -> RoundOutcome:
    return plan_round(snapshot, THROUGHPUT, make_solver(name), budget(**options))  # type: ignore[arg-type]


THROUGHPUT = Policy(objective="throughput")
LAW = examples(120)


@LAW
@given(snapshots())
def test_decisions_on_any_snapshot_break_no_rule(snapshot: Snapshot) -> None:
    result = outcome(snapshot)
    assert result.violations == ()
    assert [d.job for d in result.decisions] == list(range(len(snapshot.jobs)))
    assert all((d.gang is None) == (d.reason is not None) for d in result.decisions)


@LAW
@given(snapshots())
def test_the_objective_and_the_placed_score_are_never_below_greedy(snapshot: Snapshot) -> None:
    best, greedy = outcome(snapshot), outcome(snapshot, "greedy")
    assert best.solution.bound >= best.solution.objective
    assert best.placed_score >= greedy.placed_score - 1e-9


@LAW
@given(snapshots())
def test_the_same_snapshot_gives_the_same_decisions_also_after_a_trip_through_json(
    snapshot: Snapshot,
) -> None:
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert outcome(snapshot).decisions == outcome(again).decisions


@LAW
@given(snapshots())
def test_a_launched_guaranteed_job_keeps_running_unless_its_promise_is_waived(
    snapshot: Snapshot,
) -> None:
    result = outcome(snapshot)
    for decision in result.decisions:
        promised = snapshot.jobs.guaranteed[decision.job] and (
            STATES[int(snapshot.jobs.state[decision.job])] in ACTIVE
        )
        if promised and decision.kind is DecisionKind.SUSPEND:
            assert decision.job in result.given_up or not result.problem.columns_of(decision.job)


@LAW
@given(snapshots())
def test_changed_jobs_pay_their_restart_and_unchanged_ones_pay_nothing(snapshot: Snapshot) -> None:
    result = outcome(snapshot)
    problem, choice = result.problem, result.solution.choice
    for decision in result.decisions:
        expected = 0.0
        if decision.kind in CHANGES_GPUS:
            unit = unit_rate(snapshot, problem.cells)[decision.job]
            likely_rate = expected_rate(snapshot, problem.cells, snapshot.jobs.weight)[decision.job]
            rate = problem.cells.rate[problem.cell[choice[decision.job]]]
            left_s = snapshot.jobs.iterations_left[decision.job] * 256 / likely_rate
            share = min(0.9, snapshot.jobs.restart_s[decision.job] / min(3600.0, left_s))
            expected = snapshot.jobs.weight[decision.job] * rate / unit * share
        assert decision.restart_price == pytest.approx(expected, abs=2e-6)


@LAW
@given(snapshots(), st.floats(1.0, 8.0))
def test_weights_only_scale_the_objective(snapshot: Snapshot, factor: float) -> None:
    power = 2.0 ** round(math.log2(factor))  # a power of two is exact
    heavier = replace(snapshot, jobs=replace(snapshot.jobs, weight=snapshot.jobs.weight * power))
    one, other = outcome(snapshot), outcome(heavier)
    assert np.isclose(
        other.solution.objective, one.solution.objective * power, rtol=1e-3, atol=10 * power
    )
    assert (
        score_solution(other.problem, other.solution)
        >= score_solution(one.problem, one.solution) - 1e-9
    )
