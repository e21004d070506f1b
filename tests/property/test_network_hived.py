"""Laws of HiveD's cells for any arrivals and departures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.placement import Gang
from tessera.formulation.tables import Ints
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy
from tessera.solvers.network.jobs.hived import HiveD
from tests.support.hierarchies import a_machine
from tests.support.laws import examples
from tests.support.occupancy import Occupancy, Placer

MACHINE = a_machine(pods=2, racks=2, hosts=2, switches=2, gpus=2)
CELL = cell_hierarchy(MACHINE)
HOST_GPUS, GPUS = 4, 32

# a positive step: a gang of that many GPUs arrives; a negative one: a running job leaves
steps = st.lists(st.one_of(st.integers(1, 9), st.integers(-9, -1)), min_size=1, max_size=40)


@dataclass
class Story:
    """A history of jobs that arrive and leave, with the state before and the result of each arrival."""

    placer: Placer

    def play(self, moves: list[int]) -> list[tuple[int, Ints, Gang | None]]:
        """Return (requested GPUs, free GPUs before, gang) of each arrival."""
        self.book = Occupancy(MACHINE, self.placer)
        self.running: dict[str, Gang] = {}
        arrivals = []
        for at, move in enumerate(moves):
            if move > 0:
                before = flat_indices(self.book.free)
                if gang := self.book.allocate(f"job-{at}", move):
                    self.running[f"job-{at}"] = gang
                arrivals.append((move, before, gang))
            elif self.running:
                job = sorted(self.running)[-move % len(self.running)]
                self.book.release(job)
                del self.running[job]
        return arrivals


def flat_indices(free: list[list[int]]) -> Ints:
    return np.array([h * HOST_GPUS + g for h, own in enumerate(free) for g in own], dtype=np.int64)


def gpus_of(gang: Gang) -> Ints:
    return np.array([h * HOST_GPUS + g for h, own in gang.members for g in own], dtype=np.int64)


@examples(60)
@given(steps, st.booleans())
def test_no_gpu_is_given_twice_and_gangs_get_their_requested_count(
    moves: list[int], waits: bool
) -> None:
    story = Story(HiveD(MACHINE, waits=waits))
    for gpus, before, gang in story.play(moves):
        if gang is not None:
            assert gang.gpus == gpus
            assert set(gpus_of(gang).tolist()) <= set(before.tolist())
            assert list(gang.members) == sorted(gang.members)
        elif not waits:
            assert len(before) < gpus
    held = [gpu for gang in story.running.values() for gpu in gpus_of(gang).tolist()]
    assert sorted(held + flat_indices(story.book.free).tolist()) == list(range(GPUS))


@examples(60)
@given(steps)
def test_split_cells_are_whole_again_after_all_jobs_have_left(moves: list[int]) -> None:
    story = Story(HiveD(MACHINE))
    story.play(moves)
    for job in list(story.running):
        story.book.release(job)
    assert story.book.free == [list(range(HOST_GPUS))] * (GPUS // HOST_GPUS)
    assert story.book.allocate("all", GPUS) is not None


@examples(100)
@given(steps)
def test_a_gang_that_fits_one_cell_never_straddles_two_of_that_level(moves: list[int]) -> None:
    for gpus, before, gang in Story(HiveD(MACHINE)).play(moves):
        if gang is None:
            continue
        for level in (CellLevel.GPU, CellLevel.PCIE, CellLevel.HOST):
            if np.bincount(CELL[level][before]).max(initial=0) >= gpus:
                assert len(set(CELL[level][gpus_of(gang)].tolist())) == 1


@examples(100)
@given(steps)
def test_a_gang_of_whole_hosts_stays_in_a_rack_or_pod_that_has_them(moves: list[int]) -> None:
    for gpus, before, gang in Story(HiveD(MACHINE)).play(moves):
        if gang is None or gpus % HOST_GPUS:
            continue
        free = np.bincount(CELL[CellLevel.HOST][before], minlength=GPUS // HOST_GPUS)
        idle = np.flatnonzero(free == HOST_GPUS) * HOST_GPUS
        for level in (CellLevel.RACK, CellLevel.POD):
            if np.bincount(CELL[level][idle]).max(initial=0) * HOST_GPUS >= gpus:
                assert len(set(CELL[level][gpus_of(gang)].tolist())) == 1
                assert gang.nodes == gpus // HOST_GPUS


@examples(100)
@given(steps)
def test_a_whole_cell_is_split_only_if_no_split_cell_can_hold_the_gang(moves: list[int]) -> None:
    for gpus, before, gang in Story(HiveD(MACHINE)).play(moves):
        if gang is None or gpus > HOST_GPUS:
            continue
        left = np.bincount(CELL[CellLevel.PCIE][before], minlength=16)
        split = (left > 0) & (left < 2)
        if gpus == 1 and split.any():
            assert split[CELL[CellLevel.PCIE][gpus_of(gang)[0]]]
        hosts = np.bincount(CELL[CellLevel.HOST][before], minlength=8)
        used = (hosts >= gpus) & (hosts < HOST_GPUS)
        if gpus > 2 and used.any():
            assert used[CELL[CellLevel.HOST][gpus_of(gang)[0]]]
