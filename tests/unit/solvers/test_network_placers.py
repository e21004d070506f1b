"""Placement of gangs by plain rules and by HiveD."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.placement import Gang
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy
from tessera.solvers.network.jobs.hived import HiveD
from tessera.solvers.network.jobs.placers import Occupancy, RandomSpread, first_fit
from tests.support.hierarchies import a_machine


def a_gang(*members: tuple[int, tuple[int, ...]]) -> Gang:
    return Gang(members=members)


def free_hosts(*sizes: int) -> list[list[int]]:
    return [list(range(size)) for size in sizes]


def test_cells_correspond_to_pcie_switches_hosts_racks_and_pods() -> None:
    cell = cell_hierarchy(a_machine(pods=2, racks=2, hosts=2, switches=2, gpus=2))
    assert (cell.max(axis=1) + 1).tolist() == [32, 16, 8, 4, 2, 1]
    for low, high in pairwise(cell):  # each cell lies in one cell of the next level
        assert all(len(set(high[low == c].tolist())) == 1 for c in set(low.tolist()))


def test_hosts_on_the_same_two_tors_are_a_rack() -> None:
    cell = cell_hierarchy(a_machine(pods=1, racks=2, hosts=3, switches=1, gpus=2, tors=2))
    assert cell[CellLevel.RACK].tolist() == [0] * 6 + [1] * 6
    assert cell[CellLevel.POD].max() == 0


def test_without_switches_each_host_is_alone_below_the_cluster() -> None:
    cell = cell_hierarchy(a_machine(pods=1, racks=1, hosts=3, switches=0, gpus=2, tors=0))
    assert cell[CellLevel.PCIE].tolist() == cell[CellLevel.RACK].tolist() == [0, 0, 1, 1, 2, 2]
    assert cell[CellLevel.POD].tolist() == [0, 0, 1, 1, 2, 2]
    assert cell[CellLevel.CLUSTER].tolist() == [0] * 6


def test_first_fit_takes_the_first_host_that_holds_the_gang() -> None:
    assert first_fit([[5], [0, 3, 4], [0, 1]], 2) == a_gang((1, (0, 3)))


def test_first_fit_spreads_gangs_too_large_for_a_host_in_the_order_of_hosts() -> None:
    assert first_fit(free_hosts(2, 2, 2), 3) == a_gang((0, (0, 1)), (1, (0,)))
    assert first_fit(free_hosts(2, 2), 5) is None


def test_random_spread_is_reproducible_by_seed_and_reaches_every_host() -> None:
    free = free_hosts(*[4] * 10)
    first, second = RandomSpread(3), RandomSpread(3)
    hosts = [gang.members[0][0] for gang in (first(free, 2) for _ in range(100)) if gang]
    assert hosts == [gang.members[0][0] for gang in (second(free, 2) for _ in range(100)) if gang]
    assert set(hosts) == set(range(10))


def test_random_spread_takes_idle_hosts_first_for_large_gangs() -> None:
    gang = RandomSpread(0)([[0], [0, 1], [1], [0, 1]], 4)
    assert gang == a_gang((1, (0, 1)), (3, (0, 1)))


@pytest.mark.parametrize("gpus", [0, -1])
def test_a_gang_without_gpus_is_refused(gpus: int) -> None:
    machine = a_machine(pods=1, racks=1, hosts=1, switches=1, gpus=2)
    for placer in (first_fit, RandomSpread(), HiveD(machine)):
        with pytest.raises(InvalidInput, match="must be at least 1"):
            placer(free_hosts(2), gpus)


def test_an_occupancy_allocates_and_releases_gpus() -> None:
    machine = a_machine(pods=1, racks=1, hosts=2, switches=2, gpus=2)
    book = Occupancy(machine, first_fit)
    assert book.allocate("a", 6) == a_gang((0, (0, 1, 2, 3)), (1, (0, 1)))
    assert book.allocate("b", 3) is None
    assert book.free == [[], [2, 3]]
    book.release("a")
    assert book.free == free_hosts(4, 4)


def test_an_occupancy_refuses_to_allocate_or_release_a_job_twice() -> None:
    book = Occupancy(a_machine(pods=1, racks=1, hosts=1, switches=1, gpus=2), first_fit)
    book.allocate("a", 1)
    with pytest.raises(InvalidInput, match="release them first"):
        book.allocate("a", 1)
    book.release("a")
    with pytest.raises(InvalidInput, match="has no GPUs"):
        book.release("a")


def test_hived_fills_the_most_used_host_first() -> None:
    machine = a_machine(pods=1, racks=2, hosts=2, switches=2, gpus=4)
    book = Occupancy(machine, HiveD(machine))
    homes = [book.allocate(f"j{i}", 4) for i in range(3)]
    assert homes[:2] == [a_gang((0, (0, 1, 2, 3))), a_gang((0, (4, 5, 6, 7)))]
    assert homes[2] == a_gang((1, (0, 1, 2, 3)))  # in the used rack
    book.release("j0")
    assert book.allocate("j3", 4) == a_gang((0, (0, 1, 2, 3)))


def test_hived_puts_the_rest_of_a_gang_on_a_used_host_nearby() -> None:
    machine = a_machine(pods=1, racks=2, hosts=3, switches=1, gpus=4)
    book = Occupancy(machine, HiveD(machine))
    book.allocate("a", 2)
    assert book.allocate("b", 6) == a_gang((0, (2, 3)), (1, (0, 1, 2, 3)))


def test_hived_prefers_a_remainder_in_a_used_rack_to_a_tighter_one_far_away() -> None:
    machine = a_machine(pods=1, racks=3, hosts=3, switches=1, gpus=4)
    whole = [0, 1, 2, 3]
    free = [whole, whole, whole, whole, [0, 1, 2], [], [0, 1], [], []]
    gang = HiveD(machine)(free, 18)
    assert gang == a_gang(*((h, (0, 1, 2, 3)) for h in range(4)), (4, (0, 1)))


def test_hived_scatters_a_gang_as_little_as_it_can_or_lets_it_wait() -> None:
    machine = a_machine(pods=1, racks=2, hosts=2, switches=1, gpus=4)
    free = [[0, 1], [2], [0, 1], [0, 3]]
    assert HiveD(machine)(free, 4) == a_gang((2, (0, 1)), (3, (0, 3)))
    assert HiveD(machine)(free, 6) == a_gang((0, (0, 1)), (2, (0, 1)), (3, (0, 3)))
    assert HiveD(machine, waits=True)(free, 4) is None
    assert HiveD(machine)(free, 8) is None
