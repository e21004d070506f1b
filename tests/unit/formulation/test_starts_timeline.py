"""The earliest slots on nodes and pools that running jobs and other slots leave free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tessera.formulation.round.starts.timeline import Slot, StartShape, Timeline, shape_of
from tests.support.builders import a_node, a_snapshot

NOW_S = 1000.0
ALL_NODES = None


def a_timeline(
    sizes: Sequence[int],
    *holds: tuple[int, int, float],
    pools: Sequence[int] = (),
) -> Timeline:
    """Return the timeline of nodes with these GPUs.

    A hold is a node or pool, a number of GPUs, and the time until which a job holds them.
    """
    nodes = [a_node(f"n{k}", gpus=gpus) for k, gpus in enumerate(sizes)]
    node, gpus, until_s = zip(*holds, strict=True) if holds else ((), (), ())
    return Timeline(
        a_snapshot(nodes=nodes, jobs=[], estimates=[]),
        np.array(pools, dtype=np.int64),
        node=np.array(node, dtype=np.int64),
        gpus=np.array(gpus, dtype=np.int64),
        until_s=np.array(until_s, dtype=np.float64),
    )


def earliest(timeline: Timeline, gpus: int, nodes: int = 1, lasts_s: float = 50.0) -> Slot:
    """Return the earliest slot of GPUs on any nodes, which must exist."""
    slot = timeline.earliest(shape_of(0, gpus, nodes), lasts_s, ALL_NODES)
    assert slot is not None
    return slot


def test_a_shape_has_equal_shares_and_at_most_one_smaller_rest() -> None:
    assert shape_of(0, 8, 2).shares == (4, 4)
    assert shape_of(0, 5, 2).shares == (3, 2)
    assert shape_of(0, 7, 4).shares == (2, 2, 2, 1)


@pytest.mark.parametrize(("gpus", "start_s"), [(1, NOW_S), (2, 1100.0), (3, 1100.0), (4, 1200.0)])
def test_gpus_become_free_when_the_jobs_on_them_end(gpus: int, start_s: float) -> None:
    timeline = a_timeline([4], (0, 2, 1100.0), (0, 1, 1200.0))
    assert earliest(timeline, gpus) == Slot(start_s, start_s + 50.0, ((0, gpus),))


def test_what_is_held_until_a_time_that_has_passed_is_free_now() -> None:
    assert earliest(a_timeline([4], (0, 4, 900.0)), 4).start_s == NOW_S


def test_more_nodes_than_there_are_with_enough_gpus_are_never_free() -> None:
    assert a_timeline([4, 4]).earliest(shape_of(0, 12, 3), 50.0, ALL_NODES) is None
    assert a_timeline([2, 4]).earliest(shape_of(0, 8, 2), 50.0, ALL_NODES) is None


def test_gpus_of_another_type_do_not_count() -> None:
    shape = StartShape(gpu_type=1, count=1, share=1, rest_share=0)
    assert a_timeline([4]).earliest(shape, 50.0, ALL_NODES) is None


def test_several_nodes_are_free_together_when_the_last_of_the_first_ones_is() -> None:
    timeline = a_timeline([4, 4, 4], (0, 4, 1100.0), (1, 4, 1300.0), (2, 4, 1200.0))
    assert earliest(timeline, 8, nodes=2).start_s == 1200.0
    assert earliest(timeline, 12, nodes=3).start_s == 1300.0


def test_a_rest_starts_with_the_other_shares_on_a_node_of_its_own() -> None:
    """Three GPUs are free on n0 now. Two more are free on another node from 1100 on."""
    timeline = a_timeline([4, 4], (0, 1, 1200.0), (1, 3, 1100.0))
    assert earliest(timeline, 5, nodes=2) == Slot(1100.0, 1150.0, ((0, 3), (1, 2)))


def test_a_pool_that_is_used_up_delays_a_start_on_free_gpus() -> None:
    """Node 0 is free. The pool has number 1, and its only unit is in use until 1500."""
    timeline = a_timeline([4], (1, 1, 1500.0), pools=[1])
    shape = StartShape(gpu_type=0, count=1, share=2, rest_share=0, pools=((1, 1),))
    slot = Slot(1500.0, 1550.0, ((0, 2), (1, 1)))
    assert timeline.earliest(shape, 50.0, ALL_NODES) == slot
    timeline.add(7, slot)
    after_slot = timeline.earliest(shape, 50.0, ALL_NODES)
    assert after_slot is not None
    assert after_slot.start_s == 1550.0
    assert earliest(timeline, 4).start_s == NOW_S  # without the pool


def test_slots_share_a_node_next_to_each_other_as_far_as_it_has_gpus() -> None:
    timeline = a_timeline([4])
    for owner in (1, 2):
        slot = earliest(timeline, 2, lasts_s=100.0)
        assert slot.start_s == NOW_S
        timeline.add(owner, slot)
    assert earliest(timeline, 2).start_s == 1100.0
    assert not timeline.has_room(Slot(1099.0, 1149.0, ((0, 1),)))
    assert timeline.has_room(Slot(1100.0, 1150.0, ((0, 4),)))


@pytest.mark.parametrize(("lasts_s", "start_s"), [(199.0, NOW_S), (200.0, NOW_S), (201.0, 1300.0)])
def test_a_gap_before_a_slot_holds_what_ends_in_time(lasts_s: float, start_s: float) -> None:
    timeline = a_timeline([4])
    timeline.add(1, Slot(1200.0, 1300.0, ((0, 4),)))
    assert earliest(timeline, 1, lasts_s=lasts_s).start_s == start_s


def test_nodes_have_to_have_their_gaps_at_the_same_time() -> None:
    """Node 0 is free until 1100 and from 1400 on, node 1 from 1200 on."""
    timeline = a_timeline([4, 4], (1, 4, 1200.0))
    timeline.add(1, Slot(1100.0, 1400.0, ((0, 4),)))
    assert earliest(timeline, 8, nodes=2).start_s == 1400.0


def test_a_slot_that_is_removed_leaves_its_gpus() -> None:
    timeline = a_timeline([4])
    slot = Slot(NOW_S, 1100.0, ((0, 4),))
    timeline.add(1, slot)
    assert timeline.slots() == [(1, slot)]
    assert earliest(timeline, 1).start_s == 1100.0
    assert timeline.remove(1) == slot
    assert timeline.slot(1) is None
    assert earliest(timeline, 4).start_s == NOW_S


def test_only_allowed_nodes_are_used() -> None:
    timeline = a_timeline([4, 4], (1, 4, 1100.0))
    shape = shape_of(0, 4, 1)
    allowed_slot = timeline.earliest(shape, 50.0, np.array([False, True]))
    assert allowed_slot == Slot(1100.0, 1150.0, ((1, 4),))
    assert timeline.earliest(shape, 50.0, np.array([False, False])) is None


def test_only_slots_before_a_time_count_where_one_is_given() -> None:
    timeline = a_timeline([4], (0, 4, 1100.0))
    shape = shape_of(0, 4, 1)
    assert timeline.earliest(shape, 50.0, ALL_NODES, 1100.0) is None
    slot = timeline.earliest(shape, 50.0, ALL_NODES, 1100.1)
    assert slot is not None


def test_nodes_with_other_slots_come_first_and_then_those_that_become_free_last() -> None:
    """So the nodes that are free as a whole stay free for jobs of any length."""
    timeline = a_timeline([4, 4, 4], (1, 2, 1300.0))
    assert earliest(timeline, 2).shares == ((1, 2),)
    timeline.add(1, Slot(1500.0, 1600.0, ((2, 2),)))
    assert earliest(timeline, 2).shares == ((2, 2),)


def test_a_scattered_slot_takes_gpus_that_are_free_for_all_of_its_time() -> None:
    """Node 0 has two GPUs until 1300, node 1 three from 1050 on, and node 2 none before 1250."""
    timeline = a_timeline([4, 4, 4], (0, 2, 2000.0), (1, 1, 2000.0), (1, 3, 1050.0), (2, 4, 1250.0))
    timeline.add(7, Slot(1300.0, 1400.0, ((0, 1),)))
    assert timeline.scattered_slot(0, 4, 1100.0, 1200.0).shares == ((1, 3), (0, 1))
    assert timeline.scattered_slot(0, 9, 1100.0, 1300.0).shares == ((1, 3), (0, 2))
    assert timeline.scattered_slot(0, 9, 1100.0, 1301.0).shares == ((1, 3), (0, 1))
    assert timeline.scattered_slot(0, 9, NOW_S, 1200.0).shares == ((0, 2),)
    assert timeline.scattered_slot(0, 9, 1260.0, 1290.0).shares == ((2, 4), (1, 3), (0, 2))
