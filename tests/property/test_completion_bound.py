"""The bound on completion times: no schedule beats it, simulated or enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.simulator.completion_bound import completion_bound
from tessera.simulator.metrics import alone_seconds
from tessera.simulator.scenario import Scenario
from tests.support.laws import examples
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


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(sorted(POLICIES)),
    jobs=st.integers(1, 12),
    costly=st.booleans(),
)
@examples(100)
def test_no_simulated_policy_beats_the_bound(
    seed: int, policy: str, jobs: int, costly: bool
) -> None:
    scenario, costs = a_random_scenario(seed, jobs), COSTLY if costly else FREE
    result = simulate_scenario(
        scenario, POLICIES[policy], overheads=costs, on_events=True, round_s=50.0, horizon_s=3e5
    )
    bound = completion_bound(scenario, costs)
    over = np.array(result.state) == "succeeded"
    jct_s = (result.end_s - result.arrival_s)[over]
    # A job that would end a microsecond after a round ends with it.
    assert bound.total_s(over) <= jct_s.sum() * (1 + 1e-9) + 1e-6 * len(jct_s)
    alone_s = alone_seconds(scenario, costs)
    assert bound.total_s(over) >= alone_s[over].sum() * (1 - 1e-12)


def best_list_schedule_s(scenario: Scenario, times_s: Sequence[dict[int, float]]) -> float:
    """Return the least sum of completion times of all list schedules.

    In each, jobs start in some order, each on one of its GPU counts, without gaps or pauses. Any of
    them is a schedule, so none may be below the bound. ``times_s`` has each job's seconds by count.
    """
    gpus, arrival_s = scenario.gpus, [one.arrival_s for one in scenario.arrivals]
    best = math.inf
    for order in itertools.permutations(range(len(times_s))):
        for counts in itertools.product(*(times_s[j] for j in order)):
            free_s, total_s = [0.0] * gpus, 0.0
            for job, count in zip(order, counts, strict=True):
                free_s.sort()
                end_s = max(free_s[count - 1], arrival_s[job]) + times_s[job][count]
                free_s[:count] = [end_s] * count
                total_s += end_s - arrival_s[job]
            best = min(best, total_s)
    return best


@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 4))
@examples(60)
def test_no_enumerated_schedule_beats_the_bound(seed: int, jobs: int) -> None:
    rng = np.random.default_rng(seed)
    time_s = {count: 1.0 / count ** rng.uniform(0.4, 1.0) for count in (1, 2, 4)}
    at_s = np.sort(rng.choice([0.0, 0.0, 100.0, 350.0], jobs)).tolist()
    iterations = rng.integers(20, 1500, jobs).tolist()
    scenario = a_scenario(
        *(an_arrival(f"j{i}", at_s[i], iterations=n) for i, n in enumerate(iterations)),
        nodes=some_specs(("a100", 1, 4)),
        profiles=[a_profile(count, seconds) for count, seconds in time_s.items()],
    )
    times_s = [{count: n * each for count, each in time_s.items()} for n in iterations]
    bound = completion_bound(scenario, FREE)
    every = np.ones(jobs, dtype=np.bool_)
    assert bound.total_s(every) <= best_list_schedule_s(scenario, times_s) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_nearly_meets_the_optimum_of_one_gpu(seed: int) -> None:
    # shortest first is optimal for jobs on one GPU that are there from the start
    rng = np.random.default_rng(seed)
    iterations = np.sort(rng.integers(50, 2000, 12))
    scenario = a_scenario(
        *(an_arrival(f"j{i}", iterations=n) for i, n in enumerate(iterations.tolist())),
        nodes=some_specs(("a100", 1, 1)),
        profiles=[a_profile(1, 1.0)],
    )
    optimum_s = float(np.cumsum(iterations).mean())
    assert 0.97 * optimum_s <= completion_bound(scenario, FREE).mean_s <= optimum_s * (1 + 1e-9)
