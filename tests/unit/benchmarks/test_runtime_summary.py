"""The figures of the benchmark of jobs that really run, from given times."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.benchmarks.service.runtime.feedback import Choice, Feedback
from tessera.benchmarks.service.runtime.programs import plain_program, stated_plans, torch_program
from tessera.benchmarks.service.runtime.restarts import Reconfiguration, restart_figures
from tessera.benchmarks.service.runtime.summary import (
    choice_quality,
    factor_error,
    percentile_50,
    percentile_95,
    relative_error,
)
from tessera.formulation.runtimes import COMMAND, RUNTIMES, TORCHRUN
from tessera.v1 import launch_pb2


def test_errors_are_means_over_what_was_measured() -> None:
    measured = {"a": 2.0, "b": 4.0}
    assert relative_error({"a": 1.0, "b": 5.0, "c": 9.0}, measured) == pytest.approx(0.375)
    assert relative_error(measured, measured) == 0
    with pytest.raises(KeyError):
        relative_error({"a": 1.0}, measured)


def test_a_factor_counts_the_same_in_both_directions() -> None:
    assert factor_error({"a": 1.0, "b": 8.0}, {"a": 4.0, "b": 2.0}) == pytest.approx(4.0)
    assert factor_error({"a": 3.0}, {"a": 3.0}) == 1.0


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [float(k) for k in range(101)]
    assert (percentile_50(values), percentile_95(values)) == (50.0, 95.0)
    assert percentile_95([3.0]) == 3.0
    assert math.isnan(percentile_50([]))
    assert math.isnan(percentile_95([]))


def test_the_quality_of_a_choice_is_1_for_the_best_plan() -> None:
    measured = {"a": 2.0, "b": 3.0}
    assert choice_quality(measured, 2.0) == 1.0
    assert choice_quality(measured, 4.0) == 0.5
    assert choice_quality(measured, 1.0) == 2.0


FEEDBACK = Feedback(
    plans={"a": "dp2", "b": "dp2 x 2"},
    before={"a": 1.0, "b": 1.0},
    taught={"a": 2.0, "b": 3.0},
    after={"a": 2.0, "b": 3.0},
    held_out={"a": 2.2, "b": 3.2},
    choice=Choice(digest="b", plan="dp2 x 2", iter_time_s=100.0, best_again_s=100.0),
)


def test_a_chosen_stated_plan_is_judged_by_its_own_runs() -> None:
    assert FEEDBACK.choice_after == pytest.approx(2.1 / 3.1)
    best = replace(FEEDBACK, choice=replace(FEEDBACK.choice, digest="a"))
    assert best.choice_after == 1.0


def test_a_chosen_plan_that_nobody_stated_is_compared_with_a_run_right_after_it() -> None:
    other = Choice(digest="c", plan="tp2", iter_time_s=4.0, best_again_s=3.0)
    assert replace(FEEDBACK, choice=other).choice_after == 0.75


def test_the_parts_of_a_move_do_not_count_the_checkpoint_twice() -> None:
    parts = launch_pb2.RestartTimes(
        checkpoint_s=1.0, stop_s=2.0, launch_s=3.0, first_iteration_s=4.0
    )
    moves = [Reconfiguration(parts=parts, outside_s=10.0)]
    figures = restart_figures("x", moves)
    assert figures["x_reported_p50_s"] == 9.0
    assert figures["x_reported_share"] == 0.9
    assert figures["x_unreported_p50_s"] == 1.0
    assert figures["x_checkpoint_p95_s"] == 1.0


@pytest.mark.parametrize("runtime", [COMMAND, TORCHRUN])
def test_the_stated_plans_differ_and_their_programs_can_run_them(runtime: str) -> None:
    program = torch_program() if runtime == TORCHRUN else plain_program(Path("x.py"))
    plans = stated_plans(program, 2, 6)
    assert len({plan.digest for plan in plans}) == 6
    for plan in plans:
        plan.check_fits("plan", program.workload, 2, 4)
        assert not RUNTIMES[runtime].refuse_plan(plan)
        assert plan.micro_batch % 2 == 0
