"""Laws of network plans, of levels, of agents' tags, and of placers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.answer.network.tags import CONTROL_TAG, RESERVED_TAGS, assign_tags
from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.tables import Ints
from tessera.solvers.network.compression import compress_levels, compression_of
from tessera.solvers.network.compression.cuts import cut_of
from tessera.solvers.network.compression.dag import Dag, dag_of
from tessera.solvers.network.compression.mincut import best_levels
from tessera.solvers.network.compression.orders import topological_orders
from tessera.solvers.network.factors import Clip
from tessera.solvers.network.jobs.cells import CellLevel, cell_hierarchy
from tessera.solvers.network.jobs.hived import HiveD
from tessera.solvers.network.replan import PlanningOptions, Variant, replan
from tessera.solvers.network.swaps import Moves
from tests.support.contentions import a_contention
from tests.support.demands import a_demand
from tests.support.hierarchies import a_machine
from tests.support.laws import examples
from tests.support.occupancy import Occupancy, Placer


@st.composite
def some_options(draw: st.DrawFn) -> PlanningOptions:
    """Draw any options of planning."""
    return PlanningOptions(
        variant=draw(st.sampled_from(Variant)),
        references=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from(Clip)),
        swap_jobs=draw(st.sampled_from([0, 3, 6])),
        moves=draw(st.sampled_from([Moves.ADJACENT, Moves.INSERTION])),
        trials=draw(st.sampled_from([0, 10])),
        margin=draw(st.sampled_from([0.0, 0.1, 2.0])),
        floor=draw(st.sampled_from([0.0, 0.4, 0.9])),
        seed=draw(st.integers(0, 5)),
    )


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    jobs=st.integers(1, 9),
    idle=st.integers(0, 2),
    load=st.sampled_from([0.1, 1.0, 5.0]),
    levels=st.integers(1, 8),
    options=some_options(),
    data=st.data(),
)
def test_every_plan_passes_the_checker_and_is_reproducible(
    seed: int,
    jobs: int,
    idle: int,
    load: float,
    levels: int,
    options: PlanningOptions,
    data: st.DataObject,
) -> None:
    case = a_contention(seed, jobs=jobs, idle=min(idle, jobs), load=load)
    names = st.lists(st.sampled_from(case.jobs), unique=True)
    earlier, unmeasured = data.draw(names), data.draw(names)
    plan, again = (
        replan(case, levels=levels, options=options, earlier=earlier, unmeasured=unmeasured).plan
        for _ in range(2)
    )
    assert find_network_violations(case, plan) == []
    assert plan.level.tolist() == again.level.tolist()
    assert plan.chosen.tolist() == again.chosen.tolist()
    assert plan.order.tolist() == again.order.tolist()


LEVELS = 4

JOBS = st.dictionaries(
    st.integers(0, 90).map(lambda n: f"j{n}"), st.integers(0, LEVELS - 1), max_size=80
)


@given(st.lists(JOBS, min_size=1, max_size=4))
def test_tags_stay_through_any_history_and_no_job_is_served_below_its_level(
    history: list[dict[str, int]],
) -> None:
    tags: dict[str, int] = {}
    for jobs in history:
        assignment = assign_tags(jobs, LEVELS, tags)
        assert assignment.tags.keys() == jobs.keys()
        assert all(assignment.tags[job] == tag for job, tag in tags.items() if job in jobs)
        assert not set(assignment.tags.values()) & {*RESERVED_TAGS, CONTROL_TAG}
        for job, tag in assignment.tags.items():
            assert assignment.priorities[tag] >= jobs[job]
            alone = list(assignment.tags.values()).count(tag) == 1
            assert not alone or assignment.priorities[tag] == jobs[job]
        assert set(assignment.priorities) == {*assignment.tags.values(), CONTROL_TAG}
        tags = dict(assignment.tags)


@given(JOBS)
def test_assigning_the_same_jobs_again_changes_nothing(jobs: dict[str, int]) -> None:
    once = assign_tags(jobs, LEVELS)
    assert assign_tags(jobs, LEVELS, once.tags) == once


@st.composite
def demands(draw: st.DrawFn, jobs: int) -> LinkDemand:
    """Draw jobs on a few links, many of equal intensity."""
    count = draw(st.integers(2, jobs))
    links = draw(st.integers(1, 2 * jobs))
    own = draw(
        st.lists(
            st.lists(st.integers(0, links - 1), max_size=3, unique=True),
            min_size=count,
            max_size=count,
        )
    )
    work = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return a_demand(own, np.array(work, dtype=np.float64))


def weight_between(dag: Dag, order: Ints, low: int, middle: int, high: int) -> int:
    """Return C, the weight of edges from positions [low, middle) to [middle, high) of the order."""
    first, second = set(order[low:middle].tolist()), set(order[middle:high].tolist())
    return sum(
        int(dag.weight[v])
        for v in first
        for u in dag.target[dag.start[v] : dag.start[v + 1]].tolist()
        if u in second
    )


def edge_sources(dag: Dag) -> Ints:
    """Return the source vertex of each edge."""
    return np.repeat(np.arange(len(dag.job)), np.diff(dag.start))


@examples(40)
@given(demands(jobs=9), st.integers(0, 99))
def test_weights_of_an_order_keep_the_quadrangle_inequality(demand: LinkDemand, seed: int) -> None:
    dag = dag_of(demand, np.arange(demand.jobs))
    for order in topological_orders(dag, 2, seed):
        for a, b, c, d in combinations(range(len(order) + 1), 4):
            left = weight_between(dag, order, 0, a, c) + weight_between(dag, order, 0, b, d)
            right = weight_between(dag, order, 0, a, d) + weight_between(dag, order, 0, b, c)
            assert left >= right


@examples(40)
@given(demands(jobs=8), st.integers(1, 4), st.integers(0, 99))
def test_the_program_finds_the_best_of_all_cuts_of_an_order(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    dag = dag_of(demand, np.arange(demand.jobs))
    for order in topological_orders(dag, 2, seed):
        losses = []
        for cuts in combinations_with_replacement(range(len(order) + 1), levels - 1):
            level = np.empty(len(order), np.int64)
            for at, (low, high) in enumerate(pairwise([0, *cuts, len(order)])):
                level[order[low:high]] = at
            losses.append(int(dag.inside(level) @ dag.weight))
        cut = cut_of(dag, order, levels)
        assert cut.lost == min(losses) == int(dag.inside(cut.level) @ dag.weight)
        assert cut.level.tolist() == cut_of(dag, order, levels, plainly=True).level.tolist()


@examples(60)
@given(demands(jobs=40), st.integers(1, 6), st.integers(0, 99))
def test_levels_are_in_range_and_never_invert_two_contending_jobs(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(demand.jobs)
    level = compress_levels(demand, demand.intensity, order, levels, seed=seed)
    dag = dag_of(demand, order)
    assert ((level >= 0) & (level < levels)).all()
    assert (level[dag.job[edge_sources(dag)]] >= level[dag.job[dag.target]]).all()


@examples(60)
@given(demands(jobs=40), st.integers(1, 6), st.integers(0, 99))
def test_minimum_cuts_end_at_the_same_loss_from_wherever_they_start(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(demand.jobs)
    dag = dag_of(demand, order)
    lowest = np.zeros(len(dag.job), np.int64)
    found = {
        best_levels(dag, start, levels).lost
        for start in (lowest, lowest + levels - 1, np.minimum(dag.height(), levels - 1))
    }
    best = compression_of(demand, order, levels)
    assert best.proven
    assert found == {int(dag.inside(best.level[dag.job]) @ dag.weight)}
    assert all(
        min(found) <= cut_of(dag, one, levels).lost for one in topological_orders(dag, 5, seed)
    )


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
