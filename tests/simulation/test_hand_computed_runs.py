"""Times, charges and losses that were computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.decisions import DecisionKind
from tessera.simulator.hazards import Failure, Straggler
from tessera.simulator.world import World
from tests.support.worlds import (
    COSTLY,
    FCFS,
    FREE,
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    end_s,
    give,
    iterations_done,
    simulate_scenario,
    some_specs,
    take,
)

ONE, TWO, FOUR, ALL = (
    ("a100-0", [0]),
    ("a100-0", [0, 1]),
    ("a100-0", range(4)),
    ("a100-1", range(4)),
)


def segments(world: World) -> list[tuple[float, float, float, str]]:
    return [(s.start_s, s.ready_s, s.end_s, s.ended_by) for s in world.segments]


# the longest run time


def test_a_job_ends_when_it_has_held_gpus_for_its_longest_run_time_over_all_its_starts() -> None:
    world = a_world(a_scenario(an_arrival("a", longest_run_s=300.0)), FREE)
    give(world, "a", ONE)
    world.advance(100)
    take(world, "a")
    world.advance(1000)
    assert world.snapshot().jobs.run_left_s.tolist() == [200.0]
    give(world, "a", TWO)
    world.advance(1050)
    assert world.snapshot().jobs.run_left_s.tolist() == [150.0]
    assert end_s(world, "a") == 1200
    assert iterations_done(world, "a") == 100 + 2 * 200
    assert segments(world)[-1][-1] == "timed out"
    assert world.over()


def test_a_job_that_is_trained_before_its_longest_run_time_has_succeeded() -> None:
    world = a_world(a_scenario(an_arrival("a", longest_run_s=1001.0)), FREE)
    give(world, "a", ONE)
    assert end_s(world, "a") == 1000
    assert segments(world)[-1][-1] == "finish"


# the cost of a start; COSTLY: save 7, load 11, search 20 / 30 / 40 s on 1 / 2 / 4 GPUs


def test_a_first_start_loads_and_searches_and_saves_nothing() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    assert end_s(world, "a") == 11 + 20 + 1000
    assert segments(world) == [(0, 31, 1031, "finish")]


def test_a_move_within_the_cell_saves_and_loads_and_does_not_search() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    world.advance(131)  # 100 iterations are trained
    give(world, "a", ("a100-1", [3]), kind=DecisionKind.MOVE)
    assert iterations_done(world, "a") == 100
    assert end_s(world, "a") == 131 + 7 + 11 + 900


@pytest.mark.parametrize(
    ("members", "degree", "kind", "search_s", "rate"),
    [
        (FOUR, 1, DecisionKind.RESIZE, 40, 4.0),
        (ONE, 2, DecisionKind.REPLAN, 20, 2.0),
        (("v100-0", [0]), 1, DecisionKind.RETYPE, 20, 0.5),
    ],
)
def test_another_count_degree_or_type_needs_a_new_search(
    members: tuple[str, list[int]], degree: int, kind: DecisionKind, search_s: float, rate: float
) -> None:
    profiles = [
        a_profile(1, 1.0),
        a_profile(4, 0.25),
        a_profile(1, 0.5, pipeline_degree=2),
        a_profile(1, 2.0, gpu_type="v100"),
    ]
    nodes = some_specs(("a100", 1, 4), ("v100", 1, 4))
    world = a_world(a_scenario(an_arrival("a"), nodes=nodes, profiles=profiles), COSTLY)
    give(world, "a", ("a100-0", [0]))
    world.advance(131)
    give(world, "a", members, kind=kind, degree=degree)
    assert end_s(world, "a") == 131 + 7 + 11 + search_s + 900 / rate
    assert world.segments[0].ended_by == kind.value


def test_a_suspended_job_that_resumes_in_its_cell_pays_for_saving_then_and_for_no_search() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    world.advance(131)
    take(world, "a")
    world.advance(500)
    assert iterations_done(world, "a") == 100
    give(world, "a", ("a100-1", [0]))
    assert end_s(world, "a") == 500 + 7 + 11 + 900
    assert world.restarts.tolist() == [1]


def test_a_job_that_was_saved_before_it_trained_has_nothing_to_save_again() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    world.advance(31)  # ready, but nothing is trained yet
    give(world, "a", ("a100-1", [0]), kind=DecisionKind.MOVE)
    assert end_s(world, "a") == 31 + 11 + 1000


def test_an_interrupted_start_is_charged_again_completely() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    world.advance(30)  # of 31 s
    take(world, "a")
    give(world, "a", ONE)
    assert end_s(world, "a") == 30 + 31 + 1000


def test_the_save_time_of_an_interrupted_start_is_still_charged() -> None:
    world = a_world(a_scenario(an_arrival("a")), COSTLY)
    give(world, "a", ONE)
    world.advance(131)
    give(world, "a", FOUR, kind=DecisionKind.RESIZE)  # 7 + 11 + 40
    world.advance(140)
    give(world, "a", ONE, kind=DecisionKind.RESIZE)  # the Cell on which it last ran
    assert end_s(world, "a") == 140 + 7 + 11 + 900


# failures


def test_a_failure_loses_the_training_since_the_last_checkpoint() -> None:
    """Ready at 31 s; checkpoints at 131 and 231 s. The failure at 300 s keeps 200 of 269 iterations."""
    world = a_world(
        a_scenario(an_arrival("a")),
        COSTLY,
        failures=[Failure(node="a100-0", down_s=300.0, up_s=900.0)],
    )
    give(world, "a", ONE)
    world.advance(300)
    assert iterations_done(world, "a") == 200
    assert (world.segments[0].iterations, world.segments[0].lost) == (269, 69)
    assert not world.snapshot().nodes.schedulable[0]
    give(world, "a", ("a100-1", [0]))  # the same Cell, from the last checkpoint: only the load time
    assert end_s(world, "a") == 300 + 11 + 800


def test_a_failure_while_a_job_starts_loses_nothing_and_the_start_is_charged_again() -> None:
    world = a_world(
        a_scenario(an_arrival("a")),
        COSTLY,
        failures=[Failure(node="a100-0", down_s=20.0, up_s=90.0)],
    )
    give(world, "a", ONE)
    world.advance(20)
    assert (iterations_done(world, "a"), world.segments[0].lost) == (0, 0)
    give(world, "a", ("a100-1", [0]))
    assert end_s(world, "a") == 20 + 31 + 1000


def test_a_checkpoint_of_an_earlier_run_outlives_a_failure_of_the_next() -> None:
    world = a_world(
        a_scenario(an_arrival("a")),
        COSTLY,
        failures=[Failure(node="a100-1", down_s=200.0, up_s=900.0)],
    )
    give(world, "a", ONE)
    world.advance(81)
    give(world, "a", ("a100-1", [0]), kind=DecisionKind.MOVE)  # 50 trained; ready at 99 s
    world.advance(200)  # checkpoint at 199 s
    assert iterations_done(world, "a") == 150


def test_without_checkpoints_a_failure_loses_all_of_the_run() -> None:
    world = a_world(
        a_scenario(an_arrival("a")),
        replace(FREE, checkpoint_every_s=math.inf),
        failures=[Failure(node="a100-0", down_s=999.0, up_s=1000.0)],
    )
    give(world, "a", ONE)
    world.advance(999)
    assert iterations_done(world, "a") == 0
    assert world.segments[0].lost == 999


def test_a_gang_that_spans_nodes_ends_when_one_node_fails_and_frees_the_other_nodes_gpus() -> None:
    world = a_world(
        a_scenario(an_arrival("a"), an_arrival("b")),
        FREE,
        failures=[Failure(node="a100-1", down_s=50.0, up_s=60.0)],
    )
    give(world, "a", FOUR, ALL)
    world.advance(50)
    world.check()
    assert world.segments[0].ended_by == "failure"
    give(world, "b", FOUR)
    assert world.snapshot().jobs.current_gpus.tolist() == [0, 4]


def test_a_node_with_two_overlapping_failures_returns_after_the_later_one() -> None:
    world = a_world(
        a_scenario(an_arrival("a")),
        failures=[
            Failure(node="a100-0", down_s=10.0, up_s=50.0),
            Failure(node="a100-0", down_s=20.0, up_s=30.0),
            Failure(node="a100-0", down_s=50.0, up_s=60.0),
        ],
    )
    there = []
    for at_s in (5, 15, 35, 55, 60):
        world.advance(at_s)
        there.append(bool(world.store.schedulable[0]))
    assert there == [True, False, False, False, True]


# stragglers


def test_a_straggler_slows_the_whole_gang_while_it_lasts() -> None:
    """8 iterations/s. 100 s at a quarter of that do 200 instead of 800: 600 / 8 = 75 s later."""
    slow = [Straggler(node="a100-1", start_s=50.0, end_s=150.0, factor=4.0)]
    world = a_world(a_scenario(an_arrival("a", iterations=2000)), stragglers=slow)
    give(world, "a", FOUR, ALL)
    assert end_s(world, "a") == 2000 / 8 + 75
    assert [s.slowdown for s in world.segments] == [1, 4, 1]
    assert [s.iterations for s in world.segments] == [400, 200, 1400]


def test_the_slower_of_two_stragglers_on_a_node_counts() -> None:
    """From 100 s: 100 s each at 1/2, 1/4 and 1/2, that is 125 instead of 300 iterations."""
    slow = [
        Straggler(node="a100-0", start_s=100.0, end_s=400.0, factor=2.0),
        Straggler(node="a100-0", start_s=200.0, end_s=300.0, factor=4.0),
    ]
    world = a_world(a_scenario(an_arrival("a")), stragglers=slow)
    give(world, "a", ONE)
    assert end_s(world, "a") == 1000 + 175


def test_a_job_that_starts_on_a_lagging_node_is_slow_at_once() -> None:
    slow = [Straggler(node="a100-0", start_s=0.0, end_s=131.0, factor=2.0)]
    world = a_world(a_scenario(an_arrival("a")), COSTLY, stragglers=slow, at_s=1.0)
    give(world, "a", ONE)  # ready at 32 s
    assert end_s(world, "a") == 131 + 1000 - 49.5


def test_a_failure_of_a_straggling_node_keeps_the_progress_of_the_last_checkpoint() -> None:
    """Checkpoints at 131 s (100) and 231 s (100 + 20 + 80 / 2); the failure is at 300 s."""
    world = a_world(
        a_scenario(an_arrival("a")),
        COSTLY,
        stragglers=[Straggler(node="a100-0", start_s=151.0, end_s=400.0, factor=2.0)],
        failures=[Failure(node="a100-0", down_s=300.0, up_s=400.0)],
    )
    give(world, "a", ONE)
    world.advance(300)
    assert iterations_done(world, "a") == 160
    assert world.segments[-1].lost == (300 - 231) / 2


# shapes, and Cells that cannot run


def test_a_worse_shape_runs_at_nine_tenths_of_the_speed_per_halving() -> None:
    world = a_world(a_scenario(an_arrival("a")))
    give(world, "a", ("a100-0", [0]), ("a100-1", [0]))
    assert end_s(world, "a") == pytest.approx(500 / 0.9, rel=1e-12)


def test_a_cell_that_cannot_run_returns_its_gpus_and_rounds_see_it_as_infeasible() -> None:
    visible = [a_profile(1, 1.0), a_profile(2, 0.1)]
    true = a_scenario(an_arrival("a"), profiles=[a_profile(1, 1.0), a_profile(2, math.inf)])
    world = a_world(true, COSTLY, visible=visible)
    give(world, "a", TWO)
    world.advance(100)
    world.check()
    assert segments(world) == [(0, 41, 41, "crash")]
    e = world.snapshot().estimates
    assert dict(zip(e.gpus.tolist(), e.iter_time_s.tolist(), strict=True)) == {1: 1.0, 2: math.inf}


def test_a_straggler_does_not_stop_an_infeasible_cell_from_crashing() -> None:
    true = a_scenario(an_arrival("a"), profiles=[a_profile(1, math.inf), a_profile(2, 1.0)])
    slow = [Straggler(node="a100-0", start_s=5.0, end_s=25.0, factor=9.0)]
    world = a_world(true, COSTLY, visible=[a_profile(1, 1.0)], stragglers=slow)
    give(world, "a", ONE)
    world.advance(31)
    assert world.segments[-1].ended_by == "crash"


def test_only_the_shape_that_cannot_run_becomes_infeasible() -> None:
    true = [a_profile(2, 1.0), a_profile(2, math.inf, nodes=2)]
    world = a_world(a_scenario(an_arrival("a"), profiles=true), visible=[a_profile(2, 1.0)])
    give(world, "a", ("a100-0", [0]), ("a100-1", [0]))
    world.advance(1)
    e = world.snapshot().estimates
    assert list(zip(e.nodes.tolist(), e.iter_time_s.tolist(), strict=True)) == [
        (1, 1.0),
        (2, math.inf),
    ]
    give(world, "a", TWO)
    assert end_s(world, "a") == 1001


# simultaneous events


def test_an_end_at_the_moment_of_a_round_is_handled_before_the_round() -> None:
    times_s = (0.1, 0.3, 0.7, 1.1, 1.3)
    for time_s in times_s:  # not exact in binary, so the end may be a bit off
        world = a_world(
            a_scenario(an_arrival("a", iterations=3000), profiles=[a_profile(1, time_s)])
        )
        give(world, "a", ONE)
        world.advance(3000 * time_s)
        assert not world.store.jobs.live


def test_a_failure_at_the_moment_of_an_end_counts_if_it_was_planned_first() -> None:
    world = a_world(
        a_scenario(an_arrival("a")), failures=[Failure(node="a100-0", down_s=1000.0, up_s=1001.0)]
    )
    give(world, "a", ONE)
    world.advance(1000)
    assert world.segments[-1].ended_by == "failure"
    assert world.store.jobs.live == [0]


def test_a_round_sees_a_failure_at_its_own_moment() -> None:
    result = simulate_scenario(
        a_scenario(an_arrival("a", iterations=5000), nodes=some_specs(("a100", 1, 1))),
        failures=[Failure(node="a100-0", down_s=300.0, up_s=600.0)],
    )
    assert [(s.start_s, s.end_s) for s in result.segments] == [(0, 300), (600, 5600)]


# two jobs, one GPU, from arrival to end


def test_two_jobs_alternate_on_one_gpu_to_the_second() -> None:
    """FCFS, rounds at 0, 300, ...: b is seen at 300 s and starts in the first round after a has ended.

    a arrives at 0, is ready at 31 and ends at 31 + 500 = 531. b starts at 600, is ready at 631
    and ends at 831.
    """
    scenario = a_scenario(
        an_arrival("a", 0.0, iterations=500),
        an_arrival("b", 40.0, iterations=200),
        nodes=some_specs(("a100", 1, 1)),
        profiles=[a_profile(1, 1.0)],
    )
    result = simulate_scenario(scenario, FCFS, overheads=COSTLY)
    assert result.end_s.tolist() == [531, 831]
    assert (result.end_s - result.arrival_s).tolist() == [531, 791]
    assert result.first_start_s.tolist() == [0, 600]
    assert [(r.at_s, r.running, r.waiting) for r in result.rounds] == [
        (0, 1, 0),
        (300, 1, 1),
        (600, 1, 0),
    ]
    assert result.state == ("succeeded", "succeeded")
    assert np.array_equal(result.restarts, [0, 0])
    assert sum(s.held_gpu_s for s in result.segments) == 531 + 231
    idle_s = [min(max(s.ready_s, s.start_s), s.end_s) - s.start_s for s in result.segments]
    assert sum(s.cell.gpus * t for s, t in zip(result.segments, idle_s, strict=True)) == 31 + 31
