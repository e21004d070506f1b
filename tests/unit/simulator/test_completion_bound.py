"""The bound on mean completion time, by hand-computed cases."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.simulator.completion_bound import completion_bound
from tests.support.worlds import (
    COSTLY,
    FREE,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    some_specs,
)


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


def test_jobs_that_did_not_finish_only_lower_the_bound() -> None:
    scenario = a_random_scenario(3)
    bound = completion_bound(scenario, FREE)
    runs = np.isfinite(bound.alone_s)
    half = runs & (np.arange(len(runs)) % 2 == 0)
    assert 0 < bound.total_s(half) < bound.total_s(runs)
    assert bound.total_s(half) >= bound.alone_s[half].sum()
    assert bound.total_s(np.zeros(len(runs), dtype=np.bool_)) == 0.0


def test_jobs_that_can_never_run_are_left_out_of_the_mean() -> None:
    large = an_arrival("large", requested_gpus=16, min_gpus=16)
    scenario = a_scenario(an_arrival("a", iterations=100), large)
    bound = completion_bound(scenario, FREE)
    assert np.isfinite(bound.alone_s).tolist() == [True, False]
    assert bound.mean_s == pytest.approx(12.5)
    nothing = completion_bound(a_scenario(large), FREE)
    assert math.isnan(nothing.mean_s)
