"""The figures of the benchmark of jobs that really run, from given times."""

from __future__ import annotations

import math

from tessera.benchmarks.service.runtime.programs import torch_plan, torch_program
from tessera.benchmarks.service.runtime.restarts import Reconfiguration, restart_figures
from tessera.benchmarks.service.runtime.summary import percentile_50, percentile_95
from tessera.formulation.execution_plan import check_fits
from tessera.formulation.runtimes import RUNTIMES, TORCHRUN
from tessera.v1 import launch_pb2


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [float(k) for k in range(101)]
    assert (percentile_50(values), percentile_95(values)) == (50.0, 95.0)
    assert percentile_95([3.0]) == 3.0
    assert math.isnan(percentile_50([]))
    assert math.isnan(percentile_95([]))


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


def test_torchrun_can_run_the_plan_of_the_gpt() -> None:
    program = torch_program()
    plan = torch_plan(program)
    check_fits(plan, "plan", program.workload, 2, 4)
    assert not RUNTIMES[TORCHRUN].refuse_plan(plan)
