"""Bounds that no policy can beat, and promises that a log shows as broken."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.base.values import Cell
from tessera.simulator.bounds import throughput_bound
from tessera.simulator.completion_bound import completion_bound
from tessera.simulator.guarantees import find_broken_guarantees
from tessera.simulator.log import Segment
from tessera.simulator.metrics import reference_of, run_figures
from tessera.simulator.run import Result
from tests.support.worlds import (
    COSTLY,
    FREE,
    POLICIES,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
    some_specs,
)


def test_the_bound_is_reached_if_nothing_else_limits_throughput() -> None:
    # 1,000 iterations of a second on 8 GPUs, without any loss, take half of the horizon
    scenario = a_scenario(an_arrival("a", requested_gpus=8), profiles=[a_profile(8, 1.0)])
    assert throughput_bound(scenario, 2000.0) == pytest.approx(4.0)


def test_the_bound_knows_gpus_arrivals_and_work() -> None:
    jobs = [an_arrival(f"j{i}", requested_gpus=8, iterations=4000) for i in range(3)]
    whole = [a_profile(8, 1.0)]
    assert throughput_bound(a_scenario(*jobs, profiles=whole), 2000.0) == pytest.approx(8.0)
    late = an_arrival("late", at_s=1000.0, requested_gpus=8, iterations=4000)
    assert throughput_bound(a_scenario(late, profiles=whole), 2000.0) == pytest.approx(4.0)
    assert throughput_bound(a_scenario(late, profiles=whole), 1000.0) == 0.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["greedy", "ilp", "arena"])
def test_no_policy_beats_the_bound(seed: int, policy: str) -> None:
    scenario = a_random_scenario(seed)
    reached = run_figures(
        simulate_scenario(scenario, POLICIES[policy]), reference_of(scenario), 3000.0
    )
    least = throughput_bound(scenario, 3000.0, intervals=4)
    assert reached["throughput"] <= least * (1 + 1e-9)


def test_a_job_alone_takes_its_time_on_the_fastest_shape_and_one_start() -> None:
    profiles = [a_profile(4, 1.0, nodes=1), a_profile(4, 0.5, nodes=2), a_profile(1, 2.0)]
    scenario = a_scenario(an_arrival("a", at_s=50.0, iterations=1000), profiles=profiles)
    bound = completion_bound(scenario, COSTLY)
    # 1,000 iterations of 0.5 s on two nodes; a start on one GPU is the shortest
    assert bound.mean_s == pytest.approx(500 + 11 + 20)


def test_jobs_that_compete_wait_for_each_other() -> None:
    jobs = [an_arrival(f"j{i}", iterations=1000) for i in range(4)]
    scenario = a_scenario(
        *jobs, nodes=some_specs(("a100", 1, 1)), profiles=[a_profile(1, 1.0), a_profile(2, 0.5)]
    )
    bound = completion_bound(scenario, FREE)
    assert bound.alone_s.tolist() == [1000.0] * 4
    assert 0.97 * 2500 < bound.mean_s <= 2500  # they end after 1,000 to 4,000 s
    later = completion_bound(
        a_scenario(
            *(an_arrival(f"j{i}", at_s=1000.0 * i, iterations=1000) for i in range(4)),
            nodes=some_specs(("a100", 1, 1)),
            profiles=[a_profile(1, 1.0)],
        ),
        FREE,
    )
    assert later.mean_s == pytest.approx(1000.0)  # each begins when the one before ends


def test_all_plans_of_a_shape_count_whatever_cpus_they_need() -> None:
    plain = a_profile(1, 2.0)
    offloaded = replace(
        plain, cell=replace(plain.cell, plan="offload"), iter_time_s=1.0, cpus=64, host_bytes=2**40
    )
    job = an_arrival("j", iterations=1000, submitted_plan="plain")

    for profiles in ([plain, offloaded], [offloaded, plain]):
        bound = completion_bound(a_scenario(job, profiles=profiles), FREE)
        assert bound.mean_s == pytest.approx(1000.0)


def test_jobs_that_can_never_run_are_left_out_of_the_mean() -> None:
    large = an_arrival("large", requested_gpus=16, min_gpus=16)
    scenario = a_scenario(an_arrival("a", iterations=100), large)
    bound = completion_bound(scenario, FREE)
    assert np.isfinite(bound.alone_s).tolist() == [True, False]
    assert bound.mean_s == pytest.approx(12.5)
    nothing = completion_bound(a_scenario(large), FREE)
    assert math.isnan(nothing.mean_s)


def a_run(*segments: tuple[int, float, float], guaranteed: bool = True) -> Result:
    profiles = [a_profile(1, 2.0), a_profile(2, 1.0), a_profile(4, 0.5)]
    job = an_arrival("j", requested_gpus=2, guaranteed=guaranteed)
    result = simulate_scenario(a_scenario(job, profiles=profiles))
    return replace(
        result,
        segments=tuple(
            Segment(
                job=0,
                start_s=start_s,
                ready_s=start_s,
                end_s=end_s,
                cell=Cell(gpu_type="a100", gpus=gpus, pipeline_degree=1),
                members=((0, tuple(range(gpus))),),
                slowdown=1.0,
                iterations=1.0,
                ended_by="resize",
            )
            for gpus, start_s, end_s in segments
        ),
    )


@pytest.mark.parametrize(
    ("segments", "broken"),
    [
        ([(2, 0.0, 10.0)], []),
        ([(2, 0.0, 10.0), (4, 10.0, 20.0)], []),
        ([(4, 10.0, 20.0), (2, 0.0, 10.0)], []),
        ([(2, 0.0, 10.0), (1, 10.0, 20.0)], [0]),  # slower than on its request
        ([(2, 0.0, 10.0), (2, 11.0, 20.0)], [0]),  # without GPUs for a second
        ([], []),  # it never started
    ],
)
def test_a_promise_is_broken_by_a_pause_or_a_slower_cell(
    segments: list[tuple[int, float, float]], broken: list[int]
) -> None:
    assert find_broken_guarantees(a_run(*segments)) == broken
