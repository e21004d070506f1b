"""Completion time, cost, makespan and fairness: values and levels of columns, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import Linear
from tessera.formulation.round.objectives import LEVELS_OF, column_values, goals_of, with_needs
from tessera.formulation.round.objectives.fairness import fair_rate
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import migration_price, placed_value
from tessera.formulation.round.statement import state_round
from tests.support.builders import a_job
from tests.support.objectives import GANG, RATES, a_draft, a_round, a_running_job, values_of

# --- mean completion time


def test_the_jct_value_is_how_often_the_horizon_would_finish_the_job() -> None:
    """1000 iterations at 102.4 samples/s take 2500 s. An hour is 1.44 times that."""
    draft = a_draft(a_job("j", requested_gpus=2, iterations_left=1000.0))
    assert values_of(draft, "jct") == [round(3600 * r / 256_000, 6) for r in RATES]
    assert values_of(draft, "jct")[1] == 1.44


@pytest.mark.parametrize("iterations_left", [0.0, 10.0, 75.0])
def test_the_jct_value_stops_growing_once_one_gpu_would_finish_the_job_in_the_round(
    iterations_left: float,
) -> None:
    """At 64 samples/s on one GPU, 75 iterations of 256 samples take a round of 300 s."""
    draft = a_draft(a_job("j", requested_gpus=2, iterations_left=iterations_left))
    assert values_of(draft, "jct")[1] == pytest.approx(12.0 * 1.6)  # an hour has 12 rounds of 300 s


# --- cost


def test_cost_is_the_price_of_the_gpus() -> None:
    draft = a_draft(a_job("j", requested_gpus=2))
    assert values_of(draft, "cost") == [-3.0, -6.0, -12.0, -2.0]
    assert column_values(draft, "cost").unit == "dollars/h"


def test_cost_may_be_in_watts() -> None:
    draft = a_draft(a_job("j", requested_gpus=2), policy=Policy(cost_of="watts"))
    assert values_of(draft, "cost") == [-0.7, -1.4, -2.8, -0.6]
    assert column_values(draft, "cost").unit == "kW"


def test_cost_alone_is_least_among_solutions_that_run_the_greatest_weight() -> None:
    draft = a_draft(a_job("j", weight=2.0), policy=Policy(objective="max-min then cost within 5%"))
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
def test_cost_gets_its_own_goals_only_if_no_sum_determines_which_jobs_run(
    objective: str, names: list[str]
) -> None:
    draft = a_draft(a_job("j"), policy=Policy(objective=objective))
    assert [goal.name for goal in goals_of(draft)] == names


def remaining_rates(draft: Draft, job: int = 0) -> list[float]:
    rates: list[float] = draft.rate[draft.job == job].round(6).tolist()
    return rates


COST = Policy(objective="cost")


def test_cost_runs_nothing_below_the_rate_floor() -> None:
    """The reference rate is 160; half of it is 80."""
    assert remaining_rates(a_draft(a_job("j", requested_gpus=4), policy=COST)) == [102.4, 160.0]
    exact = replace(COST, rate_floor=102.4 / 160 + 1e-12)  # rounding errors are tolerated
    assert remaining_rates(a_draft(a_job("j", requested_gpus=4), policy=exact)) == [102.4, 160.0]
    anything = replace(COST, rate_floor=0.0)
    assert remaining_rates(a_draft(a_job("j", requested_gpus=4), policy=anything)) == RATES


def test_the_rate_floor_takes_the_current_cell_too() -> None:
    draft = a_draft(
        a_running_job(requested_gpus=4), policy=replace(COST, rate_floor=0.7), gangs=GANG
    )
    assert remaining_rates(draft) == [160.0]
    assert draft.current.tolist() == [-1]


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"guaranteed": True}, {}),
        ({"admitted": True, "deadline_s": 1e9}, {"deadlines": "myopic"}),
    ],
)
def test_a_job_with_a_kept_promise_keeps_its_current_cell(
    more: dict[str, Any], options: dict[str, Any]
) -> None:
    policy = replace(COST, rate_floor=0.7, **options)
    draft = a_draft(a_running_job(requested_gpus=4, **more), policy=policy, gangs=GANG)
    assert remaining_rates(draft) == [102.4, 160.0]
    unpriced = a_draft(
        a_running_job(requested_gpus=4, **more), policy=policy, gangs=GANG, dollars=(0.0, 1.0)
    )
    assert remaining_rates(unpriced) == [102.4]
    assert values_of(unpriced, "cost") == [0.0]


def test_a_job_whose_types_have_no_price_waits_for_that_reason() -> None:
    statement = state_round(a_round(a_job("j"), dollars=(0.0, 0.0)), COST)
    reason = statement.absent[0]
    assert reason.code is ReasonCode.MISSING_DATA
    assert (
        reason.message
        == "the objective cost needs dollars_per_hour of a100, v100, which is not set"
    )
    assert str(reason.next_step).startswith("set dollars_per_hour")


def test_the_reason_names_the_rate_floor_if_it_excluded_the_other_types() -> None:
    statement = state_round(
        a_round(a_job("j", requested_gpus=4), watts=(0.0, 300.0)), replace(COST, cost_of="watts")
    )
    reason = statement.absent[0]
    assert reason.code is ReasonCode.MISSING_DATA
    assert "watts of a100" in str(reason.message)
    assert "rate floor, 0.5 of the job's" in str(reason.message)


def test_the_rate_floor_of_a_job_kept_from_its_best_type_is_relative_to_what_it_can_reach() -> None:
    """Without a100 columns, a job with the reference rate 160 still runs at 51.2."""
    draft = first_draft(a_round(a_job("j", requested_gpus=4)), COST)
    assert remaining_rates(with_needs(draft.only(draft.gpu_type == 1))) == [51.2]


def test_a_slower_shape_and_a_move_do_not_make_a_job_cheaper() -> None:
    problem = state_round(a_round(a_running_job(restart_s=360.0), gangs=GANG), COST).problem
    current = int(problem.current[0])
    assert problem.value[current] == -6 * problem.scale
    assert placed_value(problem, current, 2) == -6 * problem.scale
    assert migration_price(problem, 0, current) == pytest.approx(0.6 * problem.scale)


# --- time to finish: makespan, finish-time fairness


def rounded_levels(draft: Draft, objective: str) -> tuple[list[float], list[float]]:
    goal = LEVELS_OF[objective](draft)
    return goal.level.round(6).tolist(), goal.waiting.round(6).tolist()


def test_makespan_is_the_time_to_the_end() -> None:
    """1600 iterations at 160 take 2560 s. Waiting loses the round, and a slower Cell part of it."""
    draft = a_draft(a_job("j", requested_gpus=4, iterations_left=1600.0))
    samples_left = [409_600 - r * 300 for r in RATES]
    expected = [300 + w / 160 for w in samples_left]
    expected[2] = 2560.0
    level, waiting = rounded_levels(draft, "makespan")
    assert level == pytest.approx(expected)
    assert waiting == [300 + 2560.0]


def test_makespan_keeps_a_column_until_the_end_if_that_is_sooner() -> None:
    """Another start costs 200 s: 10,000 samples at 64 a second end in 156 s, inside the round."""
    job = a_running_job(iterations_left=40.0, restart_s=200.0, requested_gpus=4)
    level, waiting = rounded_levels(a_draft(job, gangs=GANG), "makespan")
    assert level == pytest.approx([200 + 160, 100, 200 + 64, 200 + 200])
    assert waiting == pytest.approx([300 + 200 + 64])


def test_a_restart_longer_than_the_round_trains_nothing_in_the_round() -> None:
    job = a_job("j", requested_gpus=4, iterations_left=1e5, restart_s=400.0)
    level, waiting = rounded_levels(a_draft(job), "makespan")
    assert level[0] == waiting[0] == 300 + 400 + 160_000
    assert level[2] == 400 + 160_000


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0,), [160.0]),
        ((1.0, 1.0), [160.0, 160.0]),
        # 3 of each type: 4 a100 for 3/4 of the time, 2 v100 for the rest
        ((3.0, 5.0), [0.75 * 160 + 0.25 * 51.2, 160.0]),
        # 1 of each type: 2 a100 for half of the time, 2 v100 for the other half
        ((1.0, 7.0), [0.5 * 102.4 + 0.5 * 51.2, 160.0]),
        ((0.0, 1.0), [0.0, 160.0]),
    ],
)
def test_the_fair_share_is_proportional_to_weight(
    weights: tuple[float, ...], expected: list[float]
) -> None:
    draft = a_draft(*[a_job(f"j{i}", weight=w) for i, w in enumerate(weights)])
    assert fair_rate(draft) == pytest.approx(expected)


def test_rho_is_the_shared_finish_time_divided_by_the_finish_time_alone() -> None:
    """Alone at 160, 5000 iterations take 8000 s. The job came 600 s ago; 4000 (6400 s) are left."""
    job = a_job("j", requested_gpus=4, iterations=5000.0, iterations_left=4000.0, submit_s=400.0)
    level, waiting = rounded_levels(a_draft(job | {"restart_s": 60.0}), "finish-time-fairness")
    assert waiting == pytest.approx([(600 + 300 + 60 + 6400) / 8000])
    assert level[2] == pytest.approx((600 + 60 + 6400) / 8000)
    slow = 300 + 60 + (1_024_000 - 64 * 240) / 160  # restarted at the fair rate after the round
    assert level[0] == pytest.approx((600 + slow) / 8000)


@pytest.mark.parametrize("iterations", [0.0, 1.0, 100.0])
def test_the_finish_time_alone_is_at_least_a_round(iterations: float) -> None:
    job = a_job("j", iterations=iterations, iterations_left=0.0, submit_s=400.0)
    assert rounded_levels(a_draft(job), "finish-time-fairness") == ([2.0] * 4, [3.0])


# --- least attained service


def test_max_min_counts_past_service_and_that_of_the_round() -> None:
    """The job trains for 200 of the 300 s, each worth the Cell's effective GPUs in GPU-seconds."""
    job = a_job("j", requested_gpus=4, service_gpu_s=500.0, weight=2.0, restart_s=100.0)
    level, waiting = rounded_levels(a_draft(job), "max-min")
    assert waiting == [-250.0]
    assert level == pytest.approx([-(500 + r / 64 * 200) / 2 for r in RATES])


def test_max_min_subtracts_restarts_only_from_other_cells_and_at_most_the_round() -> None:
    job = a_running_job(service_gpu_s=500.0, restart_s=1000.0)
    assert rounded_levels(a_draft(job, gangs=GANG), "max-min")[0] == [-500, -980, -500, -500]
