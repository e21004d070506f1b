"""Fair shares over many rounds: tenants then use what is their share, which they otherwise do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.round.fair_share import fair_shares
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.run import Conditions, Decider, simulate
from tessera.simulator.scenario import EPOCH_S, Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.world import World
from tessera.solvers.rounds.options import RoundOptions
from tests.support.worlds import FREE, StoppedClock, a_profile, a_scenario, an_arrival, some_specs

ROUND_S = 300.0
ROUNDS = 100
GREEDY = RoundOptions(
    objective="throughput",
    solver="greedy",
    fair_half_life_s=7200.0,
    keep_requests=False,
    promise_starts=False,
    change_spacing=0.0,
)
"""Rounds without the laws over time, so that tenants can take turns."""
FAIR = replace(GREEDY, fair_share="gpus")


def unequal_demands(*tenants: TenantSpec) -> Scenario:
    """Return 30 long jobs of ``first``, and four short ones of ``second`` that come in each round.

    Each tenant alone would fill the eight GPUs.
    """
    long = [
        an_arrival(f"first-{i}", tenant="first", iterations=100_000, max_gpus=1) for i in range(30)
    ]
    short = [
        an_arrival(f"second-{i}", ROUND_S * (i // 4), tenant="second", iterations=900, max_gpus=1)
        for i in range(4 * ROUNDS)
    ]
    arrivals: list[Arrival] = sorted([*long, *short], key=lambda one: one.arrival_s)
    return a_scenario(*arrivals, tenants=tenants)


def watch(
    scenario: Scenario, options: RoundOptions, rounds: int = ROUNDS
) -> tuple[Snapshot, list[Snapshot]]:
    """Return what the last round saw, and what all rounds saw after their decisions."""
    seen: list[Snapshot] = []

    def observe(world: World) -> None:
        seen.append(world.snapshot())

    conditions = Conditions(overheads=FREE, round_s=ROUND_S, horizon_s=rounds * ROUND_S)
    simulate(scenario, Decider(options), conditions, StoppedClock(), observe=observe)
    return seen[-1], seen


def decayed_gpus(seen: Sequence[Snapshot], half_life_s: float) -> dict[str, float]:
    """Return the GPUs that tenants held on average, from what they held after each round."""
    sums = dict.fromkeys(("first", "second"), 0.0)
    for snapshot in seen[:-1]:
        age_s = seen[-1].now_s - snapshot.now_s
        part = 0.5 ** ((age_s - ROUND_S) / half_life_s) - 0.5 ** (age_s / half_life_s)
        for job in snapshot.allocations.job.tolist():
            sums[snapshot.jobs.tenant[job]] += part
    return sums


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_tenants_of_unequal_demand_use_what_is_their_share(weights: tuple[float, float]) -> None:
    names = ("first", "second")
    tenants = [TenantSpec(name=n, weight=w) for n, w in zip(names, weights, strict=True)]
    last, _ = watch(unequal_demands(*tenants), FAIR)
    shares = fair_shares(last, FAIR)
    for name, weight in zip(names, weights, strict=True):
        assert shares[name].target == weight / sum(weights)
    used = shares["first"].used / shares["second"].used
    assert used == pytest.approx(weights[0] / weights[1], rel=0.15)


def test_a_tenant_that_had_to_wait_is_served_first() -> None:
    long = [
        an_arrival(f"first-{i}", tenant="first", iterations=10**6, max_gpus=1) for i in range(16)
    ]
    late = [
        an_arrival(f"second-{i}", 50 * ROUND_S, tenant="second", iterations=10**6, max_gpus=1)
        for i in range(16)
    ]
    _, seen = watch(a_scenario(*long, *late), FAIR, 140)

    def held(snapshot: Snapshot) -> int:
        tenants = np.array(snapshot.jobs.tenant)[snapshot.allocations.job]
        return int((tenants == "second").sum())

    assert [held(s) for s in seen[:50]] == 50 * [0]
    assert held(seen[50]) == 8  # the whole cluster, until it has caught up
    assert 0 < np.mean([held(s) for s in seen[100:]]) == pytest.approx(4.0, abs=0.5)


@pytest.mark.parametrize(
    ("measure", "first", "second"), [("drf", 2 / 3, 2 / 3), ("gpus", 5 / 8, 3 / 8)]
)
def test_only_drf_makes_shares_of_different_resources_equal(
    measure: str, first: float, second: float
) -> None:
    # A job of the second needs a GPU and 16 of 64 cores. By DRF, the tenants have 16/3 and 8/3 of the
    # eight GPUs. Counted by GPUs, the second would need more cores than there are.
    (node,) = some_specs(("a100", 1, 8))
    light = a_profile(1, cpus=1)
    heavy = a_profile(1, cpus=16, workload=replace(light.workload, model="loader"))
    jobs = [
        an_arrival(f"{tenant}-{i}", tenant=tenant, iterations=10**6, workload=profile.workload)
        for i in range(16)
        for tenant, profile in (("first", light), ("second", heavy))
    ]
    scenario = a_scenario(*jobs, nodes=[replace(node, cpus=64)], profiles=[light, heavy])
    options = replace(FAIR, fair_share=measure, solver="portfolio")
    last, _ = watch(scenario, options)
    shares = fair_shares(last, options)
    full = 1 - 0.5 ** ((last.now_s - EPOCH_S) / options.fair_half_life_s)
    assert shares["first"].used == pytest.approx(first * full, rel=0.05)
    assert shares["second"].used == pytest.approx(second * full, rel=0.05)


def test_the_world_counts_use_as_held_after_its_rounds() -> None:
    last, seen = watch(unequal_demands(), FAIR)
    used = dict(zip(last.decayed_use.tenant, last.decayed_use.amount.tolist(), strict=True))
    assert used == pytest.approx(decayed_gpus(seen, FAIR.fair_half_life_s), rel=0.02)
