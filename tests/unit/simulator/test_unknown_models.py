"""Simulated jobs whose models no round knows: they run as requested, at their true speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.formulation.values import BEST_FOUND, EstimateSource, Workload
from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tests.support.worlds import (
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    end_s,
    give,
    simulate_scenario,
)

SPHINX = Workload(model="sphinx", params="9B", global_batch=8)
TRUTH = [
    a_profile(1, 1.0),
    a_profile(2, 3.0, workload=SPHINX, pipeline_degree=1),
    a_profile(2, 2.0, workload=SPHINX, pipeline_degree=2),
]
VISIBLE = TRUTH[:1]
STATED: dict[str, Any] = {
    "workload": SPHINX,
    "requested_gpus": 2,
    "requested_type": "a100",
    "iterations": 100,
}


def test_a_job_of_a_model_that_no_round_knows_runs_at_its_best_true_speed() -> None:
    scenario = a_scenario(an_arrival("s", **STATED), an_arrival("k"), profiles=TRUTH)
    result = simulate_scenario(scenario, visible=VISIBLE)
    ends = replay_lines(lines_of(log_of(result)))
    assert ends == {"s": 200.0, "k": 1000.0}


def test_without_a_gpu_type_it_never_runs() -> None:
    arrival = an_arrival("s", **STATED | {"requested_type": ""})
    world = a_world(a_scenario(arrival, profiles=TRUTH), visible=VISIBLE, at_s=1.0)
    assert world.snapshot().jobs.unestimated.tolist() == [True]
    assert world.snapshot().jobs.requested_type.tolist() == [-1]


def test_it_is_measured_once_it_has_trained_and_is_then_known() -> None:
    scenario = a_scenario(an_arrival("s", **STATED), profiles=TRUTH)
    world = a_world(scenario, visible=VISIBLE, at_s=0.0)
    assert world.snapshot().jobs.unestimated.tolist() == [True]
    give(world, "s", ("a100-0", [0, 1]), degree=BEST_FOUND)
    world.advance(13.9)
    assert world.snapshot().jobs.unestimated.tolist() == [True]
    world.advance(14.0)
    seen = world.snapshot()
    assert seen.jobs.unestimated.tolist() == [False]
    row = seen.estimates.row(int(np.argmax(seen.estimates.workload)))
    assert (row["gpus"], row["pipeline_degree"], row["iter_time_s"]) == (2, BEST_FOUND, 2.0)
    assert row["source"] == EstimateSource.MEASURED
    assert end_s(world, "s") == 200.0


def test_a_request_on_which_it_does_not_run_in_truth_is_known_to_fail() -> None:
    arrival = an_arrival("s", **STATED | {"requested_gpus": 4})
    world = a_world(a_scenario(arrival, profiles=TRUTH), visible=VISIBLE, at_s=0.0)
    give(world, "s", ("a100-0", [0, 1, 2, 3]), degree=BEST_FOUND)
    world.advance(1.0)
    seen = world.snapshot()
    assert seen.jobs.unestimated.tolist() == [False]
    assert np.isinf(seen.estimates.iter_time_s).tolist() == [False, True]
