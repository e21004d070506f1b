"""Every objective by small cases worked out by hand, and the laws that it keeps on random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from formulation.check import migration_price, placed_value
from formulation.columns import first_draft
from formulation.draft import Draft
from formulation.errors import ProblemTooLarge
from formulation.goals import Goal, Levels, Linear
from formulation.grammar import LINEAR, OBJECTIVES
from formulation.lifecycle import JobState
from formulation.objectives import LEVELS_OF, LINEAR_VALUES, goals_of, with_needs
from formulation.objectives.fairness import fair_rate, fair_share
from formulation.placement import Gang
from formulation.policy import Policy
from formulation.reasons import Reason, ReasonCode
from formulation.snapshot import NO_TENANTS, Nodes, Snapshot, Tenants
from formulation.statement import state
from service.rounds import plan_round
from solvers.base import Budget
from solvers.cpsat import CpSat
from solvers.greedy import Greedy
from solvers.waiting import SpelledOut
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes

BATCH = 256
CELLS = [
    an_estimate(gpus=1, iter_time_s=4.0),  # 64 samples/s
    an_estimate(gpus=2, iter_time_s=2.5),  # 102.4
    an_estimate(gpus=4, iter_time_s=1.6),  # 160
    an_estimate(gpu_type=1, gpus=2, iter_time_s=5.0),  # 51.2
]
RATES = [64.0, 102.4, 160.0, 51.2]
GANG = {0: Gang(members=((0, (0, 1)),))}
"""The first job's two GPUs, where it runs."""


def a_round(
    *jobs: dict[str, Any], dollars: Sequence[float] = (3.0, 1.0), watts: Sequence[float] = (700, 300),
    tenants: dict[str, float] | None = None, **rest: Any,
) -> Snapshot:  # fmt: skip
    """Return a round of 8 a100 and 8 v100 at 1000 s."""
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4), (1, 2, 4)), jobs=jobs, estimates=CELLS, **rest
    )
    types = tuple(
        replace(t, dollars_per_hour=d, watts=w)
        for t, d, w in zip(snapshot.gpu_types, dollars, watts, strict=True)
    )
    weights = tenants or {}
    settings_ = NO_TENANTS if not weights else Tenants(
        name=tuple(weights), weight=np.array(list(weights.values())),
        borrow_gpus=np.full(len(weights), -1), lends=np.ones(len(weights), np.bool_),
    )  # fmt: skip
    return replace(snapshot, gpu_types=types, tenants=settings_)


def drafted(*jobs: dict[str, Any], policy: Policy | None = None, **rest: Any) -> Draft:
    return with_needs(first_draft(a_round(*jobs, **rest), policy or Policy()))


def running(name: str = "j", **more: Any) -> dict[str, Any]:
    """Return a job that runs on two a100."""
    fields: dict[str, Any] = {
        "requested_gpus": 2, "state": JobState.RUNNING, "cell": (0, 2, 1)
    }  # fmt: skip
    return a_job(name, **(fields | more))


def values(draft: Draft, objective: str) -> list[float]:
    valued = LINEAR_VALUES[objective](draft)
    return [round(v, 6) for v in (valued.gross - valued.price).tolist()]


# --- mean completion time


def test_jct_is_what_a_horizon_would_finish() -> None:
    """1000 iterations at the reference rate of 102.4 take 2500 s, of which an hour is 1.44."""
    draft = drafted(a_job("j", requested_gpus=2, iterations_left=1000.0))
    assert values(draft, "jct") == [round(3600 * r / 256_000, 6) for r in RATES]
    assert values(draft, "jct")[1] == 1.44


def test_jct_weighs_jobs() -> None:
    draft = drafted(a_job("j", requested_gpus=2, iterations_left=1000.0, weight=2.0))
    assert values(draft, "jct")[1] == 2.88


def test_jct_prefers_weight_over_remaining_time() -> None:
    """Smith's rule: 3/300 comes before 5/600, and that before 1/150."""
    work = ((3.0, 120.0), (5.0, 240.0), (1.0, 60.0))
    jobs = [a_job(f"j{i}", weight=w, iterations_left=n * 2) for i, (w, n) in enumerate(work)]
    draft = drafted(*[j | {"requested_gpus": 2} for j in jobs], policy=Policy(round_s=1.0))
    at_request = values(draft, "jct")[1::4]
    assert sorted(range(3), key=lambda j: -at_request[j]) == [0, 1, 2]


def test_balanced_is_the_geometric_mean_of_throughput_and_jct() -> None:
    job = running(iterations_left=1000.0, restart_s=250.0, weight=2.0)
    throughput, jct, both = (
        values(drafted(job, gangs=GANG), name) for name in ("throughput", "jct", "balanced")
    )
    means = [(a * b) ** 0.5 for a, b in zip(throughput, jct, strict=True)]
    assert both == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("left", [0.0, 10.0, 120.0])
def test_jct_grows_no_more_once_a_job_would_finish_inside_the_round(left: float) -> None:
    draft = drafted(a_job("j", requested_gpus=2, iterations_left=left))
    assert values(draft, "jct")[1] == 12.0  # an hour has 12 rounds of 300 s


def test_jct_charges_the_restart_share_to_all_but_the_current_cell() -> None:
    job = running(iterations_left=1000.0, restart_s=250.0)
    draft = drafted(job, gangs=GANG)
    assert draft.current.tolist() == [1]
    expected = [round(3600 * r / 256_000 * (1 if r == 102.4 else 0.9), 6) for r in RATES]
    assert values(draft, "jct") == expected


def test_a_job_of_months_keeps_four_digits_of_its_value() -> None:
    a_year = a_job("j", requested_gpus=2, iterations_left=365 * 86400 / 2.5)
    goal = state(a_round(a_year), Policy(objective="jct")).goals[-1]
    assert isinstance(goal, Linear)
    assert goal.unit == "jobs finished in a horizon"
    assert goal.value[1] / goal.scale == pytest.approx(1 / (365 * 24), rel=1e-4)


# --- cost


def test_cost_is_what_the_gpus_cost() -> None:
    draft = drafted(a_job("j", requested_gpus=2))
    assert values(draft, "cost") == [-3.0, -6.0, -12.0, -2.0]
    assert LINEAR_VALUES["cost"](draft).unit == "dollars/h"


def test_cost_may_be_watts() -> None:
    draft = drafted(a_job("j", requested_gpus=2), policy=Policy(cost_of="watts"))
    assert values(draft, "cost") == [-0.7, -1.4, -2.8, -0.6]
    assert LINEAR_VALUES["cost"](draft).unit == "kW"


def test_a_start_costs_its_restart_share_on_top() -> None:
    draft = drafted(running(restart_s=360.0), gangs=GANG)
    assert values(draft, "cost") == [-3.3, -6.0, -13.2, -2.2]


def test_cost_alone_is_least_among_answers_that_run_the_greatest_weight() -> None:
    draft = drafted(a_job("j", weight=2.0), policy=Policy(objective="max-min then cost within 5%"))
    levels, runs, cheap = goals_of(draft)
    assert (levels.name, runs.name, cheap.name) == ("max-min", "jobs running", "cost")
    assert isinstance(runs, Linear)
    assert set((runs.value / runs.scale).tolist()) == {2.0}
    assert not runs.restart_price.any()
    assert (runs.tolerance, cheap.tolerance) == (0.0, 0.05)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        ("cost", ["jobs running", "cost"]),
        ("2*cost", ["jobs running", "cost"]),
        ("cost then jct", ["jobs running", "cost", "jct"]),
        ("throughput within 5% then cost", ["throughput", "cost"]),
        ("jct + cost then cost", ["jct + cost", "cost"]),
        ("throughput + 0.1*cost", ["throughput + 0.1*cost"]),
        ("makespan then cost", ["makespan", "jobs running", "cost"]),
        ("makespan then throughput then cost", ["makespan", "throughput", "cost"]),
    ],
)
def test_where_a_sum_says_what_runs_cost_need_not(objective: str, names: list[str]) -> None:
    draft = drafted(a_job("j"), policy=Policy(objective=objective))
    assert [goal.name for goal in goals_of(draft)] == names


def rates_left(draft: Draft, job: int = 0) -> list[float]:
    found: list[float] = draft.rate[draft.job == job].round(6).tolist()
    return found


COST = Policy(objective="cost")


def test_cost_runs_nothing_below_the_rate_floor() -> None:
    """The reference rate is 160; half of it is 80."""
    assert rates_left(drafted(a_job("j", requested_gpus=4), policy=COST)) == [102.4, 160.0]
    exact = replace(COST, rate_floor=102.4 / 160 + 1e-12)  # rounding is forgiven
    assert rates_left(drafted(a_job("j", requested_gpus=4), policy=exact)) == [102.4, 160.0]
    anything = replace(COST, rate_floor=0.0)
    assert rates_left(drafted(a_job("j", requested_gpus=4), policy=anything)) == RATES


def test_the_rate_floor_takes_the_current_cell_too() -> None:
    draft = drafted(running(requested_gpus=4), policy=replace(COST, rate_floor=0.7), gangs=GANG)
    assert rates_left(draft) == [160.0]
    assert draft.current.tolist() == [-1]


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"guaranteed": True}, {}),
        ({}, {"run_to_completion": True}),
        ({"admitted": True, "deadline_s": 1e9}, {"deadlines": "myopic"}),
    ],
)
def test_a_job_that_is_owed_its_run_keeps_its_current_cell(
    more: dict[str, Any], options: dict[str, Any]
) -> None:
    policy = replace(COST, rate_floor=0.7, **options)
    draft = drafted(running(requested_gpus=4, **more), policy=policy, gangs=GANG)
    assert rates_left(draft) == [102.4, 160.0]
    unpriced = drafted(
        running(requested_gpus=4, **more), policy=policy, gangs=GANG, dollars=(0.0, 1.0)
    )
    assert rates_left(unpriced) == [102.4]
    assert values(unpriced, "cost") == [0.0]


def test_a_promise_that_is_waived_keeps_no_cell() -> None:
    job = running(requested_gpus=4, guaranteed=True)
    policy = replace(COST, rate_floor=0.7)
    snapshot = a_round(job, gangs=GANG)
    draft = with_needs(first_draft(snapshot, policy, waived=frozenset({0})))
    assert rates_left(draft) == [160.0]


def test_types_without_a_price_are_left_out() -> None:
    draft = drafted(a_job("j"), policy=replace(COST, rate_floor=0.0), dollars=(0.0, 1.0))
    assert rates_left(draft) == [51.2]
    assert not draft.absent


def test_a_job_whose_types_have_no_price_waits_for_that_reason() -> None:
    statement = state(a_round(a_job("j"), dollars=(0.0, 0.0)), COST)
    reason = statement.absent[0]
    assert reason.code is ReasonCode.MISSING_DATA
    assert reason.message == "the objective cost needs dollars_per_hour of a100, v100"
    assert reason.next_step.startswith("set dollars_per_hour")


def test_the_reason_names_the_floor_where_that_took_the_other_types() -> None:
    statement = state(
        a_round(a_job("j", requested_gpus=4), watts=(0.0, 300.0)), replace(COST, cost_of="watts")
    )
    reason = statement.absent[0]
    assert reason.code is ReasonCode.MISSING_DATA
    assert "watts of a100" in reason.message
    assert "rate floor, 0.5 of its" in reason.message


def test_a_job_kept_from_its_best_type_is_held_to_what_it_can_reach() -> None:
    """Without a100 columns a job with the reference rate 160 still runs at 51.2."""
    draft = first_draft(a_round(a_job("j", requested_gpus=4)), COST)
    assert rates_left(with_needs(draft.only(draft.gpu_type == 1))) == [51.2]


def test_a_slower_shape_and_a_move_do_not_make_a_job_cheaper() -> None:
    problem = state(a_round(running(restart_s=360.0), gangs=GANG), COST).problem
    current = int(problem.current[0])
    assert problem.value[current] == -6 * problem.scale
    assert placed_value(problem, current, 2) == -6 * problem.scale
    assert migration_price(problem, 0, current) == pytest.approx(0.6 * problem.scale)


# --- time to finish: makespan, finish-time fairness


def levels(draft: Draft, objective: str) -> tuple[list[float], list[float]]:
    goal = LEVELS_OF[objective](draft)
    return goal.level.round(6).tolist(), goal.waiting.round(6).tolist()


def test_makespan_is_the_time_to_the_end() -> None:
    """1600 iterations at 160 take 2560 s. To wait is to lose the round, and so is to be slower in it."""
    draft = drafted(a_job("j", requested_gpus=4, iterations_left=1600.0))
    left = [409_600 - r * 300 for r in RATES]
    expected = [300 + w / 160 for w in left]
    expected[2] = 2560.0
    level, waiting = levels(draft, "makespan")
    assert level == pytest.approx(expected)
    assert waiting == [300 + 2560.0]


def test_makespan_keeps_a_column_to_the_end_where_that_is_sooner() -> None:
    """Another start costs 200 s: 10,000 samples at 64 a second end in 156 s, inside the round."""
    job = running(iterations_left=40.0, restart_s=200.0, requested_gpus=4)
    level, waiting = levels(drafted(job, gangs=GANG), "makespan")
    assert level == pytest.approx([200 + 160, 100, 200 + 64, 200 + 200])
    assert waiting == pytest.approx([300 + 200 + 64])


def test_a_restart_longer_than_the_round_trains_nothing_in_it() -> None:
    job = a_job("j", requested_gpus=4, iterations_left=1e5, restart_s=400.0)
    level, waiting = levels(drafted(job), "makespan")
    assert level[0] == waiting[0] == 300 + 400 + 160_000
    assert level[2] == 400 + 160_000


def test_the_fair_share_alone_is_a_share_of_every_type() -> None:
    """Sixteen equal jobs: half a GPU of either type, that is half of the time at 64 and a quarter at 51.2."""
    draft = drafted(*[a_job(f"j{i}") for i in range(16)])
    assert fair_rate(draft) == pytest.approx(np.full(16, 32 + 12.8))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0,), [160.0]),
        ((1.0, 1.0), [160.0, 160.0]),
        # 3 of either type: 4 a100 for 3/4 of the time, 2 v100 for the rest
        ((3.0, 5.0), [0.75 * 160 + 0.25 * 51.2, 160.0]),
        # 1 of either type: half of the time 2 a100, half 2 v100
        ((1.0, 7.0), [0.5 * 102.4 + 0.5 * 51.2, 160.0]),
        ((0.0, 1.0), [0.0, 160.0]),
    ],
)
def test_the_fair_share_is_by_weight(weights: tuple[float, ...], expected: list[float]) -> None:
    draft = drafted(*[a_job(f"j{i}", weight=w) for i, w in enumerate(weights)])
    assert fair_rate(draft) == pytest.approx(expected)


def test_jobs_that_may_not_run_have_no_share() -> None:
    held, alone = a_job("held", state=JobState.HELD), a_job("no cell", workload=1)
    assert fair_share(drafted(held, alone, a_job("a"), a_job("b"))).tolist() == [0, 0, 0.5, 0.5]


def test_a_pinned_job_has_its_share_of_its_type_alone() -> None:
    jobs = [a_job("a"), a_job("b", requested_type=1, pinned_type=True)]
    assert fair_rate(drafted(*jobs)).tolist() == [160.0, 51.2]


def test_rho_is_the_finish_time_shared_over_the_finish_time_alone() -> None:
    """Alone at 160: 5000 iterations take 8000 s. It came 600 s ago and has 4000, that is 6400 s, to go."""
    job = a_job("j", requested_gpus=4, iterations=5000.0, iterations_left=4000.0, submit_s=400.0)
    level, waiting = levels(drafted(job | {"restart_s": 60.0}), "finish-time-fairness")
    assert waiting == pytest.approx([(600 + 300 + 60 + 6400) / 8000])
    assert level[2] == pytest.approx((600 + 60 + 6400) / 8000)
    slow = 300 + 60 + (1_024_000 - 64 * 240) / 160  # restarted at the fair rate after the round
    assert level[0] == pytest.approx((600 + slow) / 8000)


def test_a_job_that_is_not_restarted_is_less_late() -> None:
    fields: dict[str, Any] = {
        "iterations": 5000.0, "iterations_left": 4000.0, "submit_s": 400.0, "restart_s": 60.0
    }  # fmt: skip
    stays = levels(drafted(running(**fields), gangs=GANG), "finish-time-fairness")[0]
    moves = levels(drafted(a_job("j", **fields)), "finish-time-fairness")[0]
    assert [s < m for s, m in zip(stays, moves, strict=True)] == [False, True, False, False]


@pytest.mark.parametrize("iterations", [0.0, 1.0, 100.0])
def test_no_job_is_alone_sooner_than_a_round(iterations: float) -> None:
    job = a_job("j", iterations=iterations, iterations_left=0.0, submit_s=400.0)
    assert levels(drafted(job), "finish-time-fairness") == ([2.0] * 4, [3.0])


def test_a_job_from_the_future_has_not_waited() -> None:
    late = levels(drafted(a_job("j", submit_s=5000.0)), "finish-time-fairness")
    assert late == levels(drafted(a_job("j", submit_s=1000.0)), "finish-time-fairness")


# --- least attained service


def test_max_min_counts_service_so_far_and_in_the_round() -> None:
    """A round at the reference rate is 300 s of the 4 requested GPUs."""
    job = a_job("j", requested_gpus=4, service_gpu_s=500.0, weight=2.0, restart_s=100.0)
    level, waiting = levels(drafted(job), "max-min")
    assert waiting == [-250.0]
    assert level == pytest.approx([-(500 + 4 * r / 160 * 200) / 2 for r in RATES])


def test_max_min_loses_no_time_on_the_current_cell_and_no_more_than_the_round_elsewhere() -> None:
    job = running(service_gpu_s=500.0, restart_s=1000.0)
    assert levels(drafted(job, gangs=GANG), "max-min")[0] == [-500, -1100, -500, -500]


def test_levels_are_shown_as_what_they_are() -> None:
    found = {name: make(drafted(a_job("j"))) for name, make in LEVELS_OF.items()}
    assert {name: (g.name, g.unit, g.sign) for name, g in found.items()} == {
        "finish-time-fairness": ("finish-time-fairness", "rho", 1),
        "max-min": ("max-min", "GPU-seconds", -1),
        "makespan": ("makespan", "s", 1),
    }


def test_levels_take_their_depth_and_tolerance_from_the_policy() -> None:
    policy = Policy(objective="makespan within 5% then jct", fairness_levels=7)
    goal = goals_of(drafted(a_job("j"), policy=policy))[0]
    assert isinstance(goal, Levels)
    assert (goal.depth, goal.tolerance) == (7, 0.05)


# --- combining


def test_sums_combine_by_weight_and_so_do_their_prices() -> None:
    job = running(iterations_left=1000.0, restart_s=250.0)
    snapshot = a_round(job, gangs=GANG)
    mixed = state(snapshot, Policy(objective="0.5*throughput + 2*jct + 0.1*cost")).goals[-1]
    draft = first_draft(snapshot, Policy())
    parts = [(0.5, "throughput"), (2.0, "jct"), (0.1, "cost")]
    expected = sum(a * np.array(values(draft, name)) for a, name in parts)
    prices = sum(a * LINEAR_VALUES[name](draft).price for a, name in parts)
    assert isinstance(mixed, Linear)
    assert mixed.unit == "weighted sum"
    assert mixed.value / mixed.scale == pytest.approx(expected, abs=5e-6)
    assert mixed.restart_price / mixed.scale == pytest.approx(prices, abs=5e-6)


def test_a_weight_on_a_lone_objective_changes_nothing() -> None:
    snapshot = a_round(a_job("j"))
    one, other = (state(snapshot, Policy(objective=o)).problem for o in ("jct", "0.1*jct"))
    assert one.unit == other.unit
    assert one.value.tolist() == other.value.tolist()


def test_the_problem_has_the_values_of_the_last_goal() -> None:
    statement = state(a_round(a_job("j")), Policy(objective="throughput then cost"))
    last = statement.goals[-1]
    assert isinstance(last, Linear)
    assert statement.problem.value.tolist() == last.value.tolist()
    assert (statement.problem.unit, statement.problem.scale) == (last.unit, last.scale)


# --- weight zero


NO_WEIGHT = [
    ({"weight": 0.0}, {}, "the job's weight is 0"),
    ({"tenant": "z"}, {}, "the weight of tenant z is 0"),
    ({"queue": 2}, {"queue_weights": "2:0"}, "queue_weights gives queue 2 the factor 0"),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("fields", "options", "why"), NO_WEIGHT)
def test_a_job_without_weight_waits_under_every_objective(
    objective: str, fields: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    snapshot = a_round(a_job("a", **fields), a_job("b"), tenants={"z": 0.0})
    statement = state(snapshot, Policy(objective=objective, **options))
    assert np.diff(statement.problem.job_start).astype(bool).tolist() == [False, True]
    assert statement.absent[0].code is ReasonCode.NO_WEIGHT
    assert why in statement.absent[0].message
    assert 1 not in statement.absent


def test_a_job_without_weight_takes_nobodys_fair_share() -> None:
    jobs = [a_job("a", weight=0.0), a_job("b"), a_job("c")]
    assert fair_share(drafted(*jobs)).tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_guaranteed_job_goes_on_at_weight_zero_and_counts_nowhere(objective: str) -> None:
    snapshot = a_round(running(guaranteed=True, weight=0.0), a_job("k"), gangs=GANG)
    statement = state(snapshot, Policy(objective=objective))
    assert statement.problem.must_run.tolist() == [True, False]
    mine = slice(*statement.problem.job_start[:2].tolist())
    for goal in statement.goals:
        if isinstance(goal, Levels):
            assert set(goal.level[mine].tolist()) | {goal.waiting[0]} == {-math.inf}
            assert np.isfinite(goal.level[mine.stop :]).all()
        elif goal.name != "cost":
            assert not goal.value[mine].any()


def test_with_all_weights_zero_the_round_goes_on_and_says_so() -> None:
    snapshot = a_round(running(weight=0.0), a_job("k", weight=0.0), gangs=GANG)
    outcome = plan_round(snapshot, Policy(), Greedy(), Budget(remaining_s=lambda: math.inf))
    assert not outcome.violations
    reasons = [d.reason for d in outcome.decisions]
    assert [r.code for r in reasons if r is not None] == [ReasonCode.NO_WEIGHT] * 2


# --- what is said of a job that only costs


def reason_of(snapshot: Snapshot, objective: str, job: int) -> Reason:
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, Policy(objective=objective), SpelledOut(CpSat()), budget)
    assert not outcome.violations
    (reason,) = [d.reason for d in outcome.decisions if d.job == job]
    assert reason is not None
    return reason


def test_under_cost_a_job_waits_because_nothing_is_free_not_because_it_costs() -> None:
    snapshot = a_round(*[a_job(f"j{i}", weight=2.0) for i in range(2)], a_job("light"))
    two_gpus = [{**snapshot.nodes.row(0), "gpus": 2}]
    small = replace(snapshot, nodes=Nodes.from_rows(two_gpus))
    reason = reason_of(small, "cost", 2)
    assert reason.code is ReasonCode.NO_CAPACITY
    assert "1 of gpus/a100, does not fit" in reason.message
    assert "gpus/a100 has 0 free" in reason.message


def test_in_a_weighted_sum_a_job_waits_because_it_costs_too_much() -> None:
    reason = reason_of(a_round(a_job("j")), "throughput + cost", 0)
    assert reason.code is ReasonCode.OUTPRICED
    assert "costs more than the objective counts it worth" in reason.message
    assert dict(reason.evidence)["unit"] == "weighted sum"


# --- numbers at their limits


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_round_without_jobs_has_goals_too(objective: str) -> None:
    for snapshot in (a_snapshot(nodes=[], jobs=[], estimates=[]), a_round(a_job("j", workload=1))):
        statement = state(snapshot, Policy(objective=objective))
        assert len(statement.problem.cell) == 0
        for goal in statement.goals:
            assert isinstance(goal, Linear) or len(goal.waiting) == len(snapshot.jobs)


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "cost"])
def test_a_weight_too_large_to_add_up_is_refused(objective: str) -> None:
    with pytest.raises(ProblemTooLarge, match="2\\^53"):
        state(a_round(a_job("j", weight=1e13)), Policy(objective=objective))


def test_weights_that_multiply_to_infinity_are_refused() -> None:
    snapshot = a_round(a_job("j", weight=1e300, tenant="z"), tenants={"z": 1e300})
    with pytest.raises(ProblemTooLarge, match="multiply to infinity"):
        state(snapshot, Policy())


@pytest.mark.parametrize("objective", list(LEVELS_OF))
def test_weights_of_any_size_give_levels_that_compare(objective: str) -> None:
    weights = (5e-324, 1e-200, 1e-9, 1.0, 1e200, 1.7e308)
    jobs = [a_job(f"j{i}", weight=w, service_gpu_s=1e9) for i, w in enumerate(weights)]
    goal = LEVELS_OF[objective](drafted(*jobs, a_job("k", weight=1.7e308)))
    assert not np.isnan(goal.level).any()
    assert not np.isnan(goal.waiting).any()
    assert (goal.level < np.inf).all()


# --- laws


@st.composite
def rounds(draw: st.DrawFn) -> Snapshot:
    """Draw a random round with prices, unequal weights, jobs that have run and jobs about to end."""
    seed = draw(st.integers(0, 10_000))
    restart = draw(st.sampled_from([0.0, 60.0, 900.0]))
    snapshot = a_random_snapshot(
        seed, jobs=draw(st.integers(1, 10)), workloads=3, max_gpus=8, restart_s=restart,
        groups=((0, 2, 4), (1, 1, 8)),
    )  # fmt: skip
    rng, count = np.random.default_rng(seed), len(snapshot.jobs)
    jobs = replace(
        snapshot.jobs, weight=rng.uniform(0.1, 4.0, count), submit_s=rng.uniform(0, 1000, count),
        iterations_left=rng.choice([0.0, 5.0, 1e3, 1e6], count),
        service_gpu_s=rng.choice([0.0, 1e5], count),
        pinned_type=rng.random(count) < 0.2, requested_type=rng.integers(0, 2, count),
    )  # fmt: skip
    types = tuple(replace(t, dollars_per_hour=2.0, watts=400.0) for t in snapshot.gpu_types)
    return replace(snapshot, jobs=jobs, gpu_types=types)


def finite(goal: Goal) -> bool:
    if isinstance(goal, Linear):
        return bool((goal.restart_price >= 0).all())
    return bool(np.isfinite(goal.level).all() and np.isfinite(goal.waiting).all())


@settings(max_examples=20)
@given(
    rounds(),
    st.sampled_from(
        [
            *OBJECTIVES,
            "0.5*throughput + 0.3*jct + 0.01*cost",
            "max-min then makespan within 5% then cost",
        ]
    ),
)
def test_every_objective_states_every_round(snapshot: Snapshot, objective: str) -> None:
    statement = state(snapshot, Policy(objective=objective, rate_floor=0.3))
    assert isinstance(statement.goals[-1], Linear)
    assert all(finite(goal) for goal in statement.goals)
    for goal in statement.goals:
        size = len(goal.value) if isinstance(goal, Linear) else len(goal.level)
        assert size == len(statement.problem.cell)


@settings(max_examples=25)
@given(rounds(), st.sampled_from(list(LEVELS_OF)))
def test_running_is_never_worse_than_waiting_nor_faster_than_slower(
    snapshot: Snapshot, objective: str
) -> None:
    draft = first_draft(snapshot, Policy())
    goal = LEVELS_OF[objective](draft)
    assert (goal.level <= goal.waiting[draft.job] + 1e-9).all()
    for j in range(len(draft.current)):
        mine = slice(int(draft.job_start[j]), int(draft.job_start[j + 1]))
        by_rate = goal.level[mine][np.argsort(draft.rate[mine], kind="stable")]
        assert (np.diff(by_rate) <= 1e-9).all()


@settings(max_examples=25)
@given(rounds(), st.sampled_from([o for o in LINEAR if o != "cost"]))
def test_the_value_of_a_column_rises_with_its_rate(snapshot: Snapshot, objective: str) -> None:
    draft = first_draft(snapshot, Policy())
    valued = LINEAR_VALUES[objective](draft)
    worth = valued.gross - valued.price
    assert (worth > 0).all()
    for j in range(len(draft.current)):
        mine = slice(int(draft.job_start[j]), int(draft.job_start[j + 1]))
        by_rate = worth[mine][np.argsort(draft.rate[mine], kind="stable")]
        assert (np.diff(by_rate) >= 0).all()


@settings(max_examples=15)
@given(rounds())
def test_the_fair_rate_is_the_optimum_of_its_linear_program(snapshot: Snapshot) -> None:
    draft = first_draft(snapshot, Policy())
    cells, capacity = draft.cells, snapshot.schedulable_gpus()
    share, found = snapshot.jobs.weight / snapshot.jobs.weight.sum(), fair_rate(draft)
    for j in range(len(snapshot.jobs)):
        mine = cells.workload == snapshot.jobs.workload[j]
        if snapshot.jobs.pinned_type[j]:
            mine &= cells.gpu_type == snapshot.jobs.requested_type[j]
        limits = [np.ones(mine.sum())]
        limits += [
            np.where(cells.gpu_type[mine] == t, cells.gpus[mine], 0.0) for t in range(len(capacity))
        ]
        answer = linprog(-cells.rate[mine], np.array(limits), [1.0, *(share[j] * capacity)])
        assert -found[j] == pytest.approx(answer.fun, rel=1e-7)


@settings(max_examples=15)
@given(rounds(), st.floats(1.1, 5.0))
def test_more_weight_is_never_a_smaller_fair_rate(snapshot: Snapshot, factor: float) -> None:
    weight = snapshot.jobs.weight.copy()
    weight[0] *= factor
    richer = replace(snapshot, jobs=replace(snapshot.jobs, weight=weight))
    before, after = (fair_rate(first_draft(s, Policy())) for s in (snapshot, richer))
    assert after[0] >= before[0] * (1 - 1e-12)
    assert (after[1:] <= before[1:] * (1 + 1e-12)).all()
