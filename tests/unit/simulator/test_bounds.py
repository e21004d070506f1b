"""The throughput that no policy can beat."""

from __future__ import annotations

import pytest

from tessera.simulator.bounds import throughput_bound
from tessera.simulator.metrics import reference_of, run_figures
from tests.support.worlds import (
    POLICIES,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    simulate_scenario,
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
