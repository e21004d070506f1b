"""The invariants of a world: each test corrupts one thing and expects a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tessera.simulator.hazards import Failure
from tessera.simulator.overheads import Overheads
from tessera.simulator.store.gpus import InvariantBroken
from tessera.simulator.world import World
from tests.support.worlds import (
    FREE,
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    carry_out,
    give,
    run_decision,
    some_specs,
)

Members = Sequence[tuple[str, Sequence[int]]]


def a_busy_world(overheads: Overheads = FREE) -> World:
    """Return a world in which ``a`` has trained on two GPUs for 100 s, and ``b`` waits."""
    world = a_world(a_scenario(an_arrival("a"), an_arrival("b")), overheads)
    give(world, "a", ("a100-0", [0, 1]))
    world.advance(100.0)
    world.check()
    return world


def train_waiting_job(world: World) -> None:
    world.store.jobs.done[1] += 1.0


def add_unpaid_work(world: World) -> None:
    world.store.jobs.done[0] += 1.0


def steal_gpu(world: World) -> None:
    world.store.gpus.owner[0] = 1


def leak_gpu(world: World) -> None:
    world.store.gpus.owner[5] = 0


def forget_gpus(world: World) -> None:
    world.store.gpus.gangs.clear()


def shift_allocation_start(world: World) -> None:
    world.store.jobs.began_s[0] += 1.0


def add_unearned_service(world: World) -> None:
    world.store.jobs.service_gpu_s[1] += 1.0


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (train_waiting_job, "the progress of b"),
        (add_unpaid_work, "the progress of a"),
        (steal_gpu, "counts a GPU that it does not hold"),
        (leak_gpu, "counts a GPU that it does not hold"),
        (forget_gpus, "holds GPUs but does not run"),
        (shift_allocation_start, "were served"),
        (add_unearned_service, "were served"),
    ],
)
def test_a_corrupted_world_is_refused(corrupt: Callable[[World], None], message: str) -> None:
    world = a_busy_world()
    corrupt(world)
    with pytest.raises(InvariantBroken, match=message):
        world.check()


def test_progress_of_a_waiting_job_is_refused_even_if_the_log_agrees() -> None:
    world = a_busy_world()
    world.store.jobs.done[1] += 1.0
    world._ledger.log(1, 1.0)
    with pytest.raises(InvariantBroken, match="while it held no GPUs"):
        world.check()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a100-0", [1])], "already held"),
        ([("a100-1", [2, 2])], "already held"),
        ([("a100-1", [4])], "that do not exist"),
        ([("a100-0", [-1])], "that do not exist"),
        ([("a100-2", [0])], "away"),
    ],
)
def test_a_round_cannot_give_gpus_that_are_not_free(members: Members, message: str) -> None:
    scenario = a_scenario(an_arrival("a"), an_arrival("b"), nodes=some_specs(("a100", 3, 4)))
    gone = [Failure(node="a100-2", down_s=1.0, up_s=1e6)]
    world = a_world(scenario, failures=gone)
    give(world, "a", ("a100-0", [0, 1]))
    world.advance(100.0)
    with pytest.raises(InvariantBroken, match=message):
        give(world, "b", *members)


def test_a_round_cannot_give_other_gpus_than_it_chose() -> None:
    nodes = some_specs(("a100", 1, 4), ("v100", 1, 4))
    world = a_world(a_scenario(an_arrival("a"), nodes=nodes))
    mixed = [("a100-0", [0]), ("v100-0", [0])]
    with pytest.raises(InvariantBroken, match="other than those of its Cell"):
        carry_out(world, lambda snapshot: run_decision(snapshot, "a", mixed))


def test_gpu_seconds_add_up_for_many_gpus_at_irregular_times() -> None:
    """Counted from 1970, times round to 0.1 us; for 1,280 GPUs that exceeds the tolerance."""
    at_s = 0.123456789
    scenario = a_scenario(
        an_arrival("a", at_s, iterations=10**6),
        nodes=some_specs(("a100", 20, 64)),
        profiles=[a_profile(1280, 1.0)],
    )
    world = a_world(scenario, at_s=at_s)
    give(world, "a", *((f"a100-{i}", range(64)) for i in range(20)))
    for later_s in (0.0, 1e-3, 0.1, 7.7):
        world.advance(at_s + later_s)
        world.check()
    assert np.isfinite(world.store.jobs.began_s[0])
