"""The reproduction of Arena's artifact: each oddity alone, and a faithful world without any."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.papers.arena.arena import ArenaWorld, CompatResult, run_artifact
from tessera.benchmarks.papers.arena.oddities import (
    ALL_ODDITIES,
    LaunchCost,
    Oddities,
    of_policy,
    switch_off,
)
from tessera.formulation.decisions import DecisionKind
from tessera.formulation.errors import InvalidInput
from tessera.formulation.lifecycle import JobState
from tessera.formulation.snapshot import STATE_CODE, Snapshot
from tessera.formulation.values import Workload
from tessera.simulator.overheads import Overheads
from tessera.simulator.run import Decider
from tessera.simulator.scenario import Scenario
from tessera.solvers.rounds.plan import RoundOutcome
from tests.support.worlds import (
    FCFS,
    POLICIES,
    a_profile,
    a_random_scenario,
    a_scenario,
    an_arrival,
    run_decision,
    simulate_scenario,
    some_specs,
    wait_decision,
)

FREE = LaunchCost(per_gpu_s=0.0, cap_s=0.0)
OTHERS = LaunchCost(per_gpu_s=150.0, cap_s=600.0)
ONE = (("a100-0", (0,)),)
TWO = (("a100-0", (0, 1)),)


def a_world(scenario: Scenario, launch: LaunchCost = FREE, **on: bool) -> ArenaWorld:
    """Return a world at time 0 with the jobs of its first round."""
    world = ArenaWorld(scenario, launch, Oddities(**on))
    world.arrive()
    return world


def give(
    world: ArenaWorld, job: str, members: Any, kind: DecisionKind = DecisionKind.START
) -> None:
    world.carry_out([run_decision(world.snapshot(), job, members, kind)])


def take(world: ArenaWorld, job: str) -> None:
    world.carry_out([wait_decision(world.snapshot(), job)])


def rounds_until_end(world: ArenaWorld, job: int = 0) -> int:
    """Play rounds until the job has ended; return their number."""
    for number in range(1, 1000):
        world.train()
        if np.isfinite(world.store.jobs.ended_s[job]):
            return number
    raise AssertionError("the job does not end")


def run_policy(
    scenario: Scenario, policy: str = "fcfs", rounds: int = 300, **on: bool
) -> CompatResult:
    return run_artifact(
        scenario, Decider(POLICIES[policy]), rounds=rounds, launch=FREE, oddities=Oddities(**on)
    )


@pytest.mark.full
@pytest.mark.parametrize("policy", ["greedy", "fcfs", "ilp", "arena", "deadlines"])
@pytest.mark.parametrize("seed", range(3))
def test_without_oddities_the_world_matches_the_simulator(policy: str, seed: int) -> None:
    """Arena's world has rounds at fixed times only, and none at planned starts."""
    scenario, cost_s = a_random_scenario(seed), 50.0
    options = replace(POLICIES[policy], promise_starts=False)
    overheads = Overheads(save_s=0.0, load_s=cost_s, search_s={1: 0.0})
    launch = LaunchCost(per_gpu_s=cost_s, cap_s=cost_s)
    honest = simulate_scenario(scenario, options, overheads=overheads, horizon_s=200 * 300.0)
    reproduced = run_artifact(
        scenario, Decider(options), rounds=200, launch=launch, oddities=Oddities()
    )
    assert reproduced.ended_s == pytest.approx(honest.end_s, rel=1e-9)
    assert np.isfinite(reproduced.ended_s).any()
    trained = sum(
        s.iterations * scenario.arrivals[s.job].spec.workload.global_batch for s in honest.segments
    )
    assert float(reproduced.samples_s.sum()) * 300 == pytest.approx(trained, rel=1e-9)


def test_an_early_arrival_takes_part_in_the_round_before_it() -> None:
    scenario = a_scenario(an_arrival("a", 301.0, iterations=100), an_arrival("b", 600.0))
    early = run_policy(scenario, early_arrival=True)
    assert early.entered_s.tolist() == [300.0, 300.0]
    assert early.ended_s[0] == 400.0
    late = run_policy(scenario)
    assert late.entered_s.tolist() == [301.0, 600.0]
    assert late.ended_s[0] == 700.0


def test_idle_rounds_make_no_decisions() -> None:
    scenario = a_scenario(an_arrival("a", iterations=1000), an_arrival("b", 700.0, iterations=10))
    assert run_policy(scenario, rounds=10, idle_rounds=True).decided == 2  # at 0 and 900 s
    assert run_policy(scenario, rounds=10).decided == 4  # until no job is left


def test_with_whole_rounds_gpus_are_held_until_the_round_ends() -> None:
    scenario = a_scenario(an_arrival("a", iterations=301))
    assert run_policy(scenario).ended_s[0] == 301.0
    assert run_policy(scenario, whole_rounds=True).ended_s[0] == 600.0


def test_an_end_in_the_last_whole_round_is_not_observed() -> None:
    scenario = a_scenario(an_arrival("a", iterations=301))
    assert math.isinf(run_policy(scenario, rounds=2, whole_rounds=True).ended_s[0])
    assert run_policy(scenario, rounds=3, whole_rounds=True).ended_s[0] == 600.0
    assert run_policy(scenario, rounds=2).ended_s[0] == 301.0


def test_with_repriced_past_an_upgrade_speeds_up_past_progress() -> None:
    scenario = a_scenario(an_arrival("a", iterations=1200))
    for on, rounds in ((True, 1), (False, 2)):  # 300 s at 1/s, then 2/s: 1200 or 900 done by 600 s
        world = a_world(scenario, repriced_past=on)
        give(world, "a", ONE)
        world.train()
        give(world, "a", TWO, DecisionKind.RESIZE)
        assert rounds_until_end(world) == rounds


def test_repriced_progress_counts_whole_iterations() -> None:
    scenario = a_scenario(an_arrival("a", iterations=100), profiles=[a_profile(1, 7.0)])
    world = a_world(scenario, repriced_past=True)
    give(world, "a", ONE)
    world.train()
    assert world.store.jobs.done[0] == 300 // 7


def test_a_suspended_job_pays_twice_if_that_oddity_is_on() -> None:
    scenario = a_scenario(an_arrival("a", iterations=1000))
    for on, rounds in ((True, 2), (False, 3)):
        world = a_world(scenario, suspended_twice=on)
        give(world, "a", ONE)
        world.train()  # 300 are done; 400 or 700 are left
        take(world, "a")
        world.train()
        give(world, "a", ONE)
        assert rounds_until_end(world) == rounds


@pytest.mark.parametrize(
    ("gpus", "lost_s", "recorded"),
    [(1, 0.0, [0.5, 1.0, 1.0]), (2, 0.0, [0.0, 1.0, 1.0]), (4, 300.0, [0.0, 0.0, 1.0])],
)
def test_a_restart_charged_to_the_curve_lowers_it_and_delays_only_large_jobs(
    gpus: int, lost_s: float, recorded: list[float]
) -> None:
    scenario = a_scenario(an_arrival("a", iterations=1200 * gpus, requested_gpus=gpus))
    world = a_world(scenario, OTHERS, overhead_on_curve=True)
    give(world, "a", (("a100-0", tuple(range(gpus))),))
    speed = 10.0 * gpus
    for share in recorded:
        assert world.samples_s() == pytest.approx(share * speed)
        world.train()
    assert rounds_until_end(world) + len(recorded) == (1200 + lost_s) / 300


def test_a_restart_that_is_charged_to_the_job_delays_it() -> None:
    world = a_world(a_scenario(an_arrival("a", iterations=500)), OTHERS)
    give(world, "a", ONE)
    rounds_until_end(world)
    assert world.store.jobs.ended_s[0] == 650.0


def test_a_restart_during_a_long_restart_starts_the_count_again() -> None:
    scenario = a_scenario(an_arrival("a", iterations=4 * 1200, requested_gpus=4))
    world = a_world(scenario, OTHERS, overhead_on_curve=True)
    give(world, "a", (("a100-0", (0, 1, 2, 3)),))
    world.train()
    give(world, "a", (("a100-1", (0, 1, 2, 3)),), DecisionKind.MOVE)
    assert [world.samples_s() for _ in range(3) if world.train()] == [0.0, 40.0, 40.0]
    assert world.gains[0] == 2


def test_releasing_gpus_is_free_if_that_oddity_is_on() -> None:
    scenario = a_scenario(an_arrival("a", iterations=2100))
    for on, end_s in ((True, 1800.0), (False, 1950.0)):
        world = a_world(scenario, OTHERS, free_release=on)
        give(world, "a", TWO)  # it trains from 300 s on, for 600 s at 2/s
        for _ in range(3):
            world.train()
        give(world, "a", ONE, DecisionKind.RESIZE)
        rounds_until_end(world)
        assert world.store.jobs.ended_s[0] == end_s
        assert world.gains[0] == 1


def test_rates_have_three_decimals_if_that_oddity_is_on() -> None:
    scenario = a_scenario(an_arrival("a"), profiles=[a_profile(1, 0.3)])
    for on, expected in ((True, 33.333), (False, 10 / 0.3)):
        world = a_world(scenario, rounded_rates=on)
        give(world, "a", ONE)
        assert world.samples_s() == expected


def test_a_job_that_ends_is_counted_for_its_whole_last_round_if_that_oddity_is_on() -> None:
    scenario = a_scenario(an_arrival("a", iterations=330))
    whole = run_policy(scenario, rounds=3, ending_counts_whole=True)
    assert whole.samples_s.tolist() == [10.0, 10.0, 0.0]
    part = run_policy(scenario, rounds=3)
    assert part.samples_s == pytest.approx([10.0, 1.0, 0.0])


def a_scenario_with_a_larger_size_measured() -> Scenario:
    """Return a job of 1B on two GPUs, a count on which only 2B was measured."""
    large = Workload(model="bert", params="2B", global_batch=10)
    return a_scenario(
        an_arrival("a", requested_gpus=2, iterations=1000),
        profiles=[a_profile(1, 1.0), a_profile(2, 0.9, workload=large)],
    )


def test_an_unmeasured_size_is_inferred_from_the_next_larger_one() -> None:
    scenario = a_scenario_with_a_larger_size_measured()
    assert run_policy(scenario, inferred_sizes=True).ended_s[0] == pytest.approx(500.0)
    assert math.isinf(run_policy(scenario).ended_s[0])


def test_slow_iterations_are_infeasible_if_that_oddity_is_on() -> None:
    scenario = a_scenario(an_arrival("a", iterations=2), profiles=[a_profile(1, 301.0)])
    assert math.isinf(run_policy(scenario, slow_is_infeasible=True).ended_s[0])
    assert run_policy(scenario).ended_s[0] == 602.0


def test_scattered_starts_take_the_freest_nodes_and_block_their_type() -> None:
    nodes = some_specs(("a100", 2, 2))
    jobs = [
        an_arrival(f"small-{i}", iterations=200, requested_gpus=1, requested_gpu_type="a100")
        for i in range(2)
    ]
    jobs += [
        an_arrival("large", iterations=600, requested_gpus=2, requested_gpu_type="a100"),
        an_arrival("last", iterations=200, requested_gpus=1, requested_gpu_type="a100"),
    ]
    scenario = a_scenario(*jobs, nodes=nodes)
    packed = run_policy(scenario)
    assert packed.queued_s.tolist() == [0.0, 0.0, 0.0, 300.0]
    scattered = run_policy(scenario, scattered_starts=True)
    assert scattered.queued_s.tolist() == [0.0, 0.0, 300.0, 300.0]


def test_scattered_starts_only_use_complete_shapes() -> None:
    jobs = [
        an_arrival(n, iterations=900, requested_gpus=g, requested_gpu_type="a100")
        for n, g in (("a", 3), ("b", 3), ("c", 2))
    ]
    profiles = [a_profile(g, 1.0 / g) for g in (1, 2, 3)]
    scenario = a_scenario(*jobs, profiles=profiles)
    assert run_policy(scenario).queued_s[2] == 0.0  # it runs on two nodes, one GPU each
    assert run_policy(scenario, scattered_starts=True).queued_s[2] == 300.0


def blocked_scenario() -> Scenario:
    """Return one GPU with a job, one that can never run, one behind it, and later a new job."""
    never = Workload(model="bert", params="9B", global_batch=10)
    return a_scenario(
        an_arrival("runs", iterations=600, requested_gpu_type="a100"),
        an_arrival("never", workload=never, requested_gpu_type="a100"),
        an_arrival("behind", iterations=300, requested_gpu_type="a100"),
        an_arrival("new", 1000.0, iterations=300, requested_gpu_type="a100"),
        nodes=some_specs(("a100", 1, 1)),
    )


def test_a_job_that_can_never_run_keeps_back_those_behind_it_but_not_new_ones() -> None:
    honest = run_policy(blocked_scenario(), rounds=20)
    assert np.isfinite(honest.ended_s).tolist() == [True, False, True, True]
    stuck = run_policy(blocked_scenario(), rounds=20, head_of_line=True)
    assert np.isfinite(stuck.ended_s).tolist() == [True, False, False, True]


def test_waiting_jobs_are_retried_only_when_a_job_has_ended() -> None:
    scenario = a_scenario(
        an_arrival("a", iterations=700), an_arrival("b"), nodes=some_specs(("a100", 1, 1))
    )
    decide, queued = Decider(FCFS), STATE_CODE[JobState.QUEUED]
    for on, expected in ((True, [2, 0, 0, 1]), (False, [2, 1, 1, 1])):
        tried: list[int] = []

        def watched(snapshot: Snapshot, tried: list[int] = tried) -> RoundOutcome:
            tried.append(int(np.count_nonzero(snapshot.jobs.state == queued)))
            return decide(snapshot)

        run_artifact(
            scenario, watched, rounds=4, launch=FREE, oddities=Oddities(retries_after_ends=on)
        )
        assert tried == expected


def test_arena_has_every_oddity_but_those_of_other_policies() -> None:
    assert of_policy("fcfs") == switch_off(
        ALL_ODDITIES, ["head_of_line", "retries_after_ends", "suspended_twice"]
    )
    assert of_policy("gavel") == switch_off(ALL_ODDITIES, ["scattered_starts", "suspended_twice"])
    assert of_policy("fcfs", Oddities()) == Oddities()


def test_all_oddities_are_off_by_default_and_unknown_names_are_refused() -> None:
    assert switch_off(ALL_ODDITIES, ["all"]) == Oddities()
    with pytest.raises(InvalidInput, match="repriced_past"):
        switch_off(ALL_ODDITIES, ["no_such"])
