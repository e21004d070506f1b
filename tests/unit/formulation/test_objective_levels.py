"""Makespan, finish-time fairness and attained service: levels of columns, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tessera.formulation.draft import Draft
from tessera.formulation.lifecycle import JobState
from tessera.formulation.objectives import LEVELS_OF
from tessera.formulation.objectives.fairness import fair_rate, fair_share
from tests.support.builders import a_job
from tests.support.objectives import GANG, RATES, a_draft, a_running_job

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


def test_jobs_that_may_not_run_have_no_share() -> None:
    held, alone = a_job("held", state=JobState.HELD), a_job("no cell", workload=1)
    assert fair_share(a_draft(held, alone, a_job("a"), a_job("b"))).tolist() == [0, 0, 0.5, 0.5]


def test_rho_is_the_shared_finish_time_divided_by_the_finish_time_alone() -> None:
    """Alone at 160, 5000 iterations take 8000 s. The job came 600 s ago; 4000 (6400 s) are left."""
    job = a_job("j", requested_gpus=4, iterations=5000.0, iterations_left=4000.0, submit_s=400.0)
    level, waiting = rounded_levels(a_draft(job | {"restart_s": 60.0}), "finish-time-fairness")
    assert waiting == pytest.approx([(600 + 300 + 60 + 6400) / 8000])
    assert level[2] == pytest.approx((600 + 60 + 6400) / 8000)
    slow = 300 + 60 + (1_024_000 - 64 * 240) / 160  # restarted at the fair rate after the round
    assert level[0] == pytest.approx((600 + slow) / 8000)


def test_a_job_that_is_not_restarted_is_less_late() -> None:
    fields: dict[str, Any] = {
        "iterations": 5000.0,
        "iterations_left": 4000.0,
        "submit_s": 400.0,
        "restart_s": 60.0,
    }
    stays = rounded_levels(a_draft(a_running_job(**fields), gangs=GANG), "finish-time-fairness")[0]
    moves = rounded_levels(a_draft(a_job("j", **fields)), "finish-time-fairness")[0]
    assert [s < m for s, m in zip(stays, moves, strict=True)] == [False, True, False, False]


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


def test_levels_have_the_right_name_unit_and_sign() -> None:
    goals = {name: make(a_draft(a_job("j"))) for name, make in LEVELS_OF.items()}
    assert {name: (g.name, g.unit, g.sign) for name, g in goals.items()} == {
        "finish-time-fairness": ("finish-time-fairness", "rho", 1),
        "max-min": ("max-min", "GPU-seconds", -1),
        "makespan": ("makespan", "s", 1),
    }
