"""All objectives: sums, zero weights, reasons, extreme numbers, and laws on random rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tessera.formulation.answer.offers import explain_unchosen
from tessera.formulation.base.errors import ProblemTooLarge
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.goals import Goal, Levels, Linear
from tessera.formulation.round.grammar import LINEAR, OBJECTIVES
from tessera.formulation.round.objectives import LEVELS_OF, column_values
from tessera.formulation.round.objectives.fairness import fair_rate
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import MAX_TOTAL
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import Nodes, Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.cpsat import CpSat
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, state_freely
from tests.support.laws import examples
from tests.support.objectives import GANG, a_draft, a_round, a_running_job, values_of

# --- combining


def test_sums_combine_values_and_restart_costs_by_weight() -> None:
    job = a_running_job(iterations_left=1000.0, restart_s=250.0)
    snapshot = a_round(job, gangs=GANG)
    mixed = state_freely(snapshot, Policy(objective="0.5*throughput + 2*jct + 0.1*cost")).goals[-1]
    draft = first_draft(snapshot, Policy())
    parts = [(0.5, "throughput"), (2.0, "jct"), (0.1, "cost")]
    expected = sum(a * np.array(values_of(draft, name)) for a, name in parts)
    prices = sum(a * column_values(draft, name).price for a, name in parts)
    assert isinstance(mixed, Linear)
    assert mixed.unit == "weighted sum"
    assert mixed.value / mixed.scale == pytest.approx(expected, abs=5e-6)
    assert mixed.restart_price / mixed.scale == pytest.approx(prices, abs=5e-6)


# --- zero weights


NO_WEIGHT = [
    ({"weight": 0.0}, {}, "the job's weight is 0"),
    ({"tenant": "z"}, {}, "the weight of tenant z is 0"),
    (
        {"priority": 2},
        {"priority_weights": "2:0"},
        "priority_weights gives priority 2 the factor 0",
    ),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("fields", "options", "why"), NO_WEIGHT)
def test_a_job_without_weight_waits_under_every_objective(
    objective: str, fields: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    snapshot = a_round(a_job("a", **fields), a_job("b"), tenants={"z": 0.0})
    statement = state_round(snapshot, Policy(objective=objective, **options))
    assert np.diff(statement.problem.job_start).astype(bool).tolist() == [False, True]
    assert statement.absent[0].code is ReasonCode.NO_WEIGHT
    assert why in str(statement.absent[0].message)
    assert 1 not in statement.absent


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_guaranteed_job_of_weight_zero_continues_and_has_no_influence(objective: str) -> None:
    snapshot = a_round(a_running_job(guaranteed=True, weight=0.0), a_job("k"), gangs=GANG)
    statement = state_round(snapshot, Policy(objective=objective))
    assert statement.problem.must_run[0]
    own_columns = slice(*statement.problem.job_start[:2].tolist())
    for goal in statement.goals:
        if isinstance(goal, Levels):
            assert set(goal.level[own_columns].tolist()) | {goal.waiting[0]} == {-math.inf}
            assert np.isfinite(goal.level[own_columns.stop :]).all()
        elif goal.name != "cost":
            assert not goal.value[own_columns].any()


# --- reasons of a job that only costs


def reason_of(snapshot: Snapshot, objective: str, job: int) -> Reason:
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, Policy(objective=objective), CpSat(), budget)
    assert not outcome.violations
    (reason,) = [d.reason for d in outcome.decisions if d.job == job]
    assert reason is not None
    return reason


def test_under_cost_a_job_waits_for_lack_of_gpus_and_not_because_it_costs() -> None:
    snapshot = a_round(*[a_job(f"j{i}", weight=2.0) for i in range(2)], a_job("light"))
    two_gpus = [{**snapshot.nodes.row(0), "gpus": 2}]
    small = replace(snapshot, nodes=Nodes.from_rows(two_gpus))
    reason = reason_of(small, "cost", 2)
    assert reason.code is ReasonCode.NO_CAPACITY
    assert "1 x a100, does not fit" in str(reason.message)
    assert "all a100 GPUs are taken" in str(reason.message)


def test_in_a_weighted_sum_a_job_waits_because_it_costs_too_much() -> None:
    problem = state_freely(a_round(a_job("j")), Policy(objective="throughput + cost")).problem
    solution = CpSat().solve(problem, Budget(remaining_s=lambda: math.inf))
    reason = explain_unchosen(problem, solution, np.array([0]))[0]
    assert reason.code is ReasonCode.OUTPRICED
    assert "costs more than its value in the objective" in str(reason.message)
    assert dict(reason.evidence)["unit"] == "weighted sum"


# --- extreme numbers


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_round_without_jobs_has_goals_too(objective: str) -> None:
    for snapshot in (a_snapshot(nodes=[], jobs=[], estimates=[]), a_round(a_job("j", workload=1))):
        statement = state_round(snapshot, Policy(objective=objective))
        assert len(statement.problem.cell) == 0
        for goal in statement.goals:
            assert isinstance(goal, Linear) or len(goal.waiting) == len(snapshot.jobs)


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "cost"])
def test_a_huge_weight_stays_within_the_limits_of_integers(objective: str) -> None:
    problem = state_round(a_round(a_job("j", weight=1e13)), Policy(objective=objective)).problem
    assert 0 < problem.value.max() < MAX_TOTAL / 4


def test_weights_that_multiply_to_infinity_are_refused() -> None:
    snapshot = a_round(a_job("j", weight=1e300, tenant="z"), tenants={"z": 1e300})
    with pytest.raises(ProblemTooLarge, match="is not finite"):
        state_round(snapshot, Policy())


@pytest.mark.parametrize("objective", list(LEVELS_OF))
def test_weights_of_any_size_give_comparable_levels(objective: str) -> None:
    weights = (5e-324, 1e-200, 1e-9, 1.0, 1e200, 1.7e308)
    jobs = [a_job(f"j{i}", weight=w, service_gpu_s=1e9) for i, w in enumerate(weights)]
    goal = LEVELS_OF[objective](a_draft(*jobs, a_job("k", weight=1.7e308)))
    assert not np.isnan(goal.level).any()
    assert not np.isnan(goal.waiting).any()
    assert (goal.level < np.inf).all()


# --- laws


@st.composite
def priced_rounds(draw: st.DrawFn) -> Snapshot:
    """Draw a round with GPU costs, unequal weights, and jobs that have run or are about to end."""
    seed = draw(st.integers(0, 10_000))
    restart = draw(st.sampled_from([0.0, 60.0, 900.0]))
    snapshot = a_random_snapshot(
        seed,
        jobs=draw(st.integers(1, 10)),
        workloads=3,
        max_gpus=8,
        restart_s=restart,
        groups=((0, 2, 4), (1, 1, 8)),
    )
    rng, count = np.random.default_rng(seed), len(snapshot.jobs)
    jobs = replace(
        snapshot.jobs,
        weight=rng.uniform(0.1, 4.0, count),
        submit_s=rng.uniform(0, 1000, count),
        iterations_left=rng.choice([0.0, 5.0, 1e3, 1e6], count),
        service_gpu_s=rng.choice([0.0, 1e5], count),
        pinned_gpu_type=rng.random(count) < 0.2,
        requested_gpu_type=rng.integers(0, 2, count),
    )
    types = tuple(replace(t, dollars_per_hour=2.0, watts=400.0) for t in snapshot.gpu_types)
    return replace(snapshot, jobs=jobs, gpu_types=types)


def is_finite(goal: Goal) -> bool:
    if isinstance(goal, Linear):
        return bool((goal.restart_price >= 0).all())
    return bool(np.isfinite(goal.level).all() and np.isfinite(goal.waiting).all())


@examples(20)
@given(
    priced_rounds(),
    st.sampled_from(
        [
            *OBJECTIVES,
            "0.5*throughput + 0.3*jct + 0.01*cost",
            "max-min then makespan within 5% then cost",
        ]
    ),
)
def test_every_objective_can_state_every_round(snapshot: Snapshot, objective: str) -> None:
    statement = state_round(snapshot, Policy(objective=objective, rate_floor=0.3))
    assert isinstance(statement.goals[-1], Linear)
    assert all(is_finite(goal) for goal in statement.goals)
    for goal in statement.goals:
        size = len(goal.value) if isinstance(goal, Linear) else len(goal.level)
        assert size == len(statement.problem.cell)


@examples(25)
@given(priced_rounds(), st.sampled_from(list(LEVELS_OF)))
def test_running_is_never_worse_than_waiting_and_faster_is_never_worse_than_slower(
    snapshot: Snapshot, objective: str
) -> None:
    draft = first_draft(snapshot, Policy())
    goal = LEVELS_OF[objective](draft)
    assert (goal.level <= goal.waiting[draft.job] + 1e-9).all()
    for j in range(len(draft.current)):
        own_columns = slice(int(draft.job_start[j]), int(draft.job_start[j + 1]))
        by_rate = goal.level[own_columns][np.argsort(draft.rate[own_columns], kind="stable")]
        assert (np.diff(by_rate) <= 1e-9).all()


@examples(25)
@given(priced_rounds(), st.sampled_from([o for o in LINEAR if o != "cost"]))
def test_the_value_of_a_column_rises_with_its_rate(snapshot: Snapshot, objective: str) -> None:
    draft = first_draft(snapshot, Policy())
    valued = column_values(draft, objective)
    worth = valued.gross - valued.price
    assert (worth > 0).all()
    for j in range(len(draft.current)):
        own_columns = slice(int(draft.job_start[j]), int(draft.job_start[j + 1]))
        by_rate = worth[own_columns][np.argsort(draft.rate[own_columns], kind="stable")]
        assert (np.diff(by_rate) >= 0).all()


@examples(15)
@given(priced_rounds())
def test_the_fair_rate_is_the_optimum_of_its_linear_program(snapshot: Snapshot) -> None:
    draft = first_draft(snapshot, Policy())
    cells, capacity = draft.cells, snapshot.schedulable_gpus()
    share, rate = snapshot.jobs.weight / snapshot.jobs.weight.sum(), fair_rate(draft)
    for j in range(len(snapshot.jobs)):
        own_cells = cells.workload == snapshot.jobs.workload[j]
        if snapshot.jobs.pinned_gpu_type[j]:
            own_cells &= cells.gpu_type == snapshot.jobs.requested_gpu_type[j]
        limits = [np.ones(own_cells.sum())]
        limits += [
            np.where(cells.gpu_type[own_cells] == t, cells.gpus[own_cells], 0.0)
            for t in range(len(capacity))
        ]
        answer = linprog(-cells.rate[own_cells], np.array(limits), [1.0, *(share[j] * capacity)])
        assert -rate[j] == pytest.approx(answer.fun, rel=1e-7)
