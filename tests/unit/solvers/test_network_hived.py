"""Placement of gangs by HiveD."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.placement import Gang
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy
from tessera.solvers.network.jobs.hived import HiveD
from tests.support.hierarchies import a_machine
from tests.support.occupancy import Occupancy


def a_gang(*members: tuple[int, tuple[int, ...]]) -> Gang:
    return Gang(members=members)


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


@pytest.mark.parametrize("gpus", [0, -1])
def test_a_gang_without_gpus_is_refused(gpus: int) -> None:
    machine = a_machine(pods=1, racks=1, hosts=1, switches=1, gpus=2)
    with pytest.raises(InvalidInput, match="must be at least 1"):
        HiveD(machine)([[0, 1]], gpus)


def test_hived_fills_the_most_used_host_first() -> None:
    machine = a_machine(pods=1, racks=2, hosts=2, switches=2, gpus=4)
    book = Occupancy(machine, HiveD(machine))
    homes = [book.allocate(f"j{i}", 4) for i in range(3)]
    assert homes[:2] == [a_gang((0, (0, 1, 2, 3))), a_gang((0, (4, 5, 6, 7)))]
    assert homes[2] == a_gang((1, (0, 1, 2, 3)))  # in the used rack
    book.release("j0")
    assert book.allocate("j3", 4) == a_gang((0, (0, 1, 2, 3)))


def test_hived_splits_a_split_cell_in_preference_to_a_whole_one() -> None:
    machine = a_machine(pods=1, racks=1, hosts=2, switches=2, gpus=4)
    book = Occupancy(machine, HiveD(machine))
    book.allocate("a", 3)
    assert book.allocate("b", 1) == a_gang((0, (3,)))
    assert book.allocate("c", 5) == a_gang((1, (0, 1, 2, 3, 4)))
    # the rest of a PCIe switch, the smallest cell
    assert book.allocate("d", 3) == a_gang((1, (5, 6, 7)))


def test_hived_gives_several_hosts_of_one_rack() -> None:
    machine = a_machine(pods=2, racks=2, hosts=3, switches=1, gpus=4)
    book = Occupancy(machine, HiveD(machine))
    book.allocate("a", 8)
    assert book.allocate("b", 8) == a_gang((3, (0, 1, 2, 3)), (4, (0, 1, 2, 3)))  # same pod
    assert book.allocate("c", 4) == a_gang((2, (0, 1, 2, 3)))
    assert book.allocate("d", 20) == a_gang(*((h, (0, 1, 2, 3)) for h in (6, 7, 8, 9, 10)))


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


def test_hived_copes_with_hosts_without_gpus_and_of_other_sizes() -> None:
    machine = a_machine(pods=1, racks=1, hosts=3, switches=1, gpus=2, empty=1)
    place = HiveD(machine)
    assert place([[0, 1], [], [0, 1]], 4) == a_gang((0, (0, 1)), (2, (0, 1)))
    assert np.array(cell_hierarchy(machine)).shape == (6, 4)
