"""Jobs on a network: groups of jobs by Muri, and placement by plain rules and HiveD."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np
import pytest

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy
from tessera.solvers.network.jobs.hived import HiveD
from tessera.solvers.network.jobs.matching import match_pairs
from tessera.solvers.network.jobs.muri import (
    SharingGroups,
    group_efficiency,
    group_jobs,
    interleaved_s,
    stages_s,
)
from tests.support.hierarchies import a_machine
from tests.support.networks import FluidJob, a_demand
from tests.support.occupancy import Occupancy


def a_group(*stages: Sequence[float]) -> Floats:
    """Return one group of these jobs, padded with jobs that do nothing."""
    size = len(stages[0])
    found = np.zeros((1, size, size))
    found[0, : len(stages)] = stages
    return found


def share_jobs(
    stage_s: Sequence[Sequence[float]],
    gpus: Sequence[int],
    capacity_gpus: int,
    urgency: Sequence[float] | None = None,
) -> SharingGroups:
    order = np.arange(len(gpus)) if urgency is None else np.array(urgency)
    return group_jobs(
        np.array(stage_s, dtype=np.float64), np.array(gpus), order.astype(np.float64), capacity_gpus
    )


def group_members(sharing: SharingGroups) -> list[tuple[int, ...]]:
    return [group.jobs for group in sharing.groups]


def best_matching(weight: Floats) -> float:
    """Return the greatest weight of a matching, by trying all orders of the vertices."""
    best, count = 0.0, len(weight)
    for order in permutations(range(count)):
        pairs = zip(order[::2], order[1::2], strict=False)
        best = max(best, sum(weight[a, b] for a, b in pairs))
    return best


def test_two_complementary_jobs_interleave_perfectly() -> None:
    pair = a_group((3.0, 1.0), (1.0, 3.0))  # 3 s of both, then 1 s of both
    assert (interleaved_s(pair)[0], group_efficiency(pair)[0]) == pytest.approx((4.0, 1.0))


def test_two_equal_jobs_wait_for_the_longer_stage_of_the_other_in_every_slot() -> None:
    pair = a_group((3.0, 1.0), (3.0, 1.0))
    assert (interleaved_s(pair)[0], group_efficiency(pair)[0]) == pytest.approx((6.0, 8 / 12))


def test_two_jobs_that_need_the_same_resource_gain_nothing() -> None:
    pair = a_group((4.0, 0.0), (4.0, 0.0))
    assert interleaved_s(pair) == pytest.approx([8.0])
    assert group_efficiency(pair) == pytest.approx([0.5])


def test_a_single_job_takes_the_sum_of_its_stages() -> None:
    assert interleaved_s(a_group((1.0, 2.0, 3.0, 4.0))) == pytest.approx([10.0])
    assert group_efficiency(a_group((1.0, 2.0, 3.0, 4.0))) == pytest.approx([0.25])


def test_the_best_of_all_orders_is_used() -> None:
    a, b, c = (5.0, 1.0, 1.0, 1.0), (1.0, 5.0, 1.0, 1.0), (5.0, 1.0, 5.0, 1.0)
    # shifted by three slots; otherwise 12
    assert interleaved_s(a_group(a, b)) == pytest.approx([8.0])
    assert interleaved_s(a_group(a, a)) == pytest.approx([12.0])
    assert interleaved_s(a_group(c, c)) == pytest.approx([12.0])  # shifted by two; otherwise 20
    assert interleaved_s(a_group(a, a, a, a)) == pytest.approx([20.0])


def test_the_matching_has_the_greatest_weight() -> None:
    rng = np.random.default_rng(3)
    for count in (2, 3, 5, 6, 7):
        for _ in range(4):
            weight = np.triu(rng.integers(0, 10, (count, count)) * 1.0, 1)
            weight += weight.T
            made = match_pairs(np.ones(count, np.int64), weight)
            assert (weight * made).sum() == pytest.approx(best_matching(weight))
            assert (made.sum(axis=0) + made.sum(axis=1) <= 1).all()


def test_matching_by_kinds_equals_matching_of_single_vertices() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        weight = rng.integers(1, 10, (3, 3)) * 1.0
        weight = np.maximum(weight, weight.T)
        kind = rng.integers(0, 3, 6)
        count: Ints = np.bincount(kind, minlength=3)
        single = weight[kind][:, kind]
        made = match_pairs(count, weight)
        assert (weight * made).sum() == pytest.approx(best_matching(single))
        assert (made.sum(axis=0) + made.sum(axis=1) <= count).all()


def test_no_jobs_share_while_all_fit() -> None:
    groups = share_jobs([(1, 1)] * 3, [4, 4, 8], 16)
    assert group_members(groups) == [(0,), (1,), (2,)]
    assert groups.multiplier.tolist() == [1, 1, 1]


def test_jobs_share_with_complementary_ones() -> None:
    stages = [(3.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 3.0)]
    groups = share_jobs(stages, [8] * 4, 16)
    assert sorted(group_members(groups)) in ([(0, 2), (1, 3)], [(0, 3), (1, 2)])
    assert [group.iteration_s for group in groups.groups] == pytest.approx([4.0, 4.0])
    assert groups.multiplier.tolist() == [1, 1, 1, 1]


def test_jobs_that_would_only_alternate_do_not_share() -> None:
    assert group_members(share_jobs([(4, 0), (4, 0)], [4, 4], 4)) == [(0,), (1,)]


def test_only_the_most_urgent_jobs_enter_as_far_as_sharing_can_hold_them() -> None:
    groups = share_jobs([(1, 1)] * 5, [4] * 5, 4, urgency=[5, 1, 4, 2, 3])
    assert group_members(groups) == [(1, 3)]


def test_with_four_resources_groups_grow_to_four_in_two_rounds() -> None:
    stage_s = np.eye(4) * 3 + 1
    groups = share_jobs(stage_s.tolist(), [2] * 4, 2)
    assert [len(group) for group in group_members(groups)] == [4]
    assert groups.groups[0].iteration_s == pytest.approx(interleaved_s(stage_s[None])[0])
    assert [len(g) for g in group_members(share_jobs([(1, 1, 1, 1)] * 4, [2] * 4, 4))] == [2, 2]


def test_stages_are_compute_and_communication() -> None:
    demand = a_demand(FluidJob(compute_s=2.0, start_s=1.0, busy_s={0: 1.5}, delay_s=0.5))
    assert stages_s(demand).tolist() == [[2.0, 2.0]]


def test_multipliers_are_relative_to_the_given_iteration_time_alone() -> None:
    groups = group_jobs(
        np.array([[4.0, 2.0], [4.0, 2.0]]),
        np.array([1, 1]),
        np.zeros(2),
        1,
        alone_s=np.array([5.0, 5.0]),
    )
    assert groups.multiplier == pytest.approx([8 / 5, 8 / 5])


@pytest.mark.parametrize("stages", [[[0.0, 0.0]], [[-1.0, 2.0]], [[np.nan, 1.0]]])
def test_meaningless_stages_are_refused(stages: list[list[float]]) -> None:
    with pytest.raises(InvalidInput, match="stage_s"):
        share_jobs(stages, [1], 1)


def test_a_long_queue_of_few_kinds_is_grouped() -> None:
    rng = np.random.default_rng(0)
    kinds = rng.exponential(1.0, (11, 2)) + 0.1
    which = rng.integers(0, 11, 3000)
    gpus = rng.choice([1, 2, 4, 8, 16], 3000)
    groups = group_jobs(kinds[which], gpus, rng.random(3000), 2000)
    everyone = [job for group in groups.groups for job in group.jobs]
    assert len(everyone) == len(set(everyone))
    assert sum(group.gpus for group in groups.groups) <= 4000
    assert all(len(set(gpus[list(group.jobs)].tolist())) == 1 for group in groups.groups)
    assert sum(len(group.jobs) > 1 for group in groups.groups) > 10


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
