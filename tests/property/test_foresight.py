"""Laws of foresight: every answer that it takes keeps the round's rules, and repeats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.foresight import OWN_ANSWER
from tessera.formulation.lifecycle import ACTIVE
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import STATES, Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import RoundOutcome, plan_round
from tests.support.laws import examples
from tests.support.snapshots import snapshots

LAW = examples(60)
OBJECTIVES = ("balanced:0.25", "throughput", "max-min then jct", "cost")


def outcome(snapshot: Snapshot, foresight: int, objective: str = "throughput") -> RoundOutcome:
    budget = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 0.1})
    policy = Policy(objective=objective, foresight=foresight)
    return plan_round(snapshot, policy, make_solver("portfolio"), budget)


@LAW
@given(snapshots(), st.sampled_from(OBJECTIVES))
def test_a_round_with_foresight_breaks_no_rule(snapshot: Snapshot, objective: str) -> None:
    seen = outcome(snapshot, 24, objective)
    assert seen.violations == ()
    assert [d.job for d in seen.decisions] == list(range(len(snapshot.jobs)))
    assert seen.solution.bound >= seen.solution.objective


@LAW
@given(snapshots())
def test_the_answer_taken_ends_jobs_no_later_than_any_that_was_compared(snapshot: Snapshot) -> None:
    compared = outcome(snapshot, 24).foresight
    if compared is None:
        return
    by_name = {answer.name: answer for answer in compared.answers}
    chosen, own = by_name[compared.chosen], compared.answers[0]
    assert own.name == OWN_ANSWER
    assert all(chosen.completion_s <= one.completion_s * (1 + 2e-9) for one in compared.answers)
    assert compared.sacrifice == pytest.approx(own.objective - chosen.objective)
    assert len(compared.answers) <= compared.rollouts <= 24
    assert (compared.gain == 0) == (compared.chosen == OWN_ANSWER)


@LAW
@given(snapshots())
def test_goals_before_the_last_one_are_not_given_up_for_the_future(snapshot: Snapshot) -> None:
    plain, seen = (outcome(snapshot, n, "max-min then throughput") for n in (0, 24))
    if plain.placed.unplaced or seen.placed.unplaced:
        return  # placement may have changed either answer
    assert seen.goals[0].objective == pytest.approx(plain.goals[0].objective)
    assert seen.goals[0].bound == pytest.approx(plain.goals[0].bound)


@LAW
@given(snapshots())
def test_promises_hold_with_foresight(snapshot: Snapshot) -> None:
    seen = outcome(snapshot, 24)
    for decision in seen.decisions:
        launched = STATES[int(snapshot.jobs.state[decision.job])] in ACTIVE
        if snapshot.jobs.guaranteed[decision.job] and launched:
            kept = decision.kind is not DecisionKind.SUSPEND
            assert (
                kept or decision.job in seen.given_up or not seen.problem.columns_of(decision.job)
            )


@LAW
@given(snapshots(), st.sampled_from(OBJECTIVES))
def test_recorded_work_repeats_a_round_with_foresight(snapshot: Snapshot, objective: str) -> None:
    first = outcome(snapshot, 24, objective)
    budget = Budget(remaining_s=lambda: math.inf, work=dict(first.solution.work))
    policy = Policy(objective=objective, foresight=24)
    again = plan_round(snapshot, policy, make_solver("portfolio"), budget)
    assert again.decisions == first.decisions
    assert again.foresight == first.foresight
