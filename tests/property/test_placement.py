"""Laws of placement, for random clusters, demands, running jobs and solutions that fit by counts."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.check import (
    find_placement_violations,
    find_violations,
    score_solution,
)
from tessera.formulation.answer.placement import Gang, Placement, current_gangs
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.resources import NOT_STATED, Demand
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, restrict_problem
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement import PlacementResult, defragment, place
from tessera.solvers.placement.blocks import carve_share, mask_of
from tessera.solvers.placement.free import FreeGpus, Layout, Spots
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.laws import examples
from tests.support.placed_rounds import a_cluster, a_solution, the_next_round

Round: TypeAlias = tuple[Snapshot, Problem, Solution]


def always() -> bool:
    return True


def a_round(seed: int, jobs: int, keep: float, promised: float) -> Round:
    """Return the second or third round of a random cluster, with a random solution of it."""
    rng = np.random.default_rng(seed)
    snapshot = a_cluster(rng, jobs, promised)
    for _ in range(int(rng.integers(1, 3))):
        problem = build_problem(snapshot, Policy())
        solution = a_solution(rng, problem, keep)
        placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
        snapshot = the_next_round(rng, snapshot, problem, placed)
    problem = build_problem(snapshot, Policy())
    return snapshot, problem, a_solution(rng, problem, keep)


def rounds_with(promised: float) -> st.SearchStrategy[Round]:
    """Return random rounds in which each job is guaranteed with probability ``promised``."""
    return st.builds(
        a_round,
        st.integers(0, 2**32),
        st.integers(1, 12),
        st.sampled_from([0.3, 0.7, 1.0]),
        st.just(promised),
    )


rounds = rounds_with(0.3)

rounds_without_promises = rounds_with(0.0)


def broken_rules(snapshot: Snapshot, problem: Problem, placed: PlacementResult) -> set[str]:
    """Return the rules that the outcome breaks, apart from promises (which have a law below)."""
    found = find_placement_violations(snapshot, problem, placed.solution, placed.placement)
    found += find_violations(problem, placed.solution)
    return {v.rule for v in found} - {"must run"}


def placed_score(problem: Problem, placed: PlacementResult) -> float:
    return score_solution(problem, placed.solution, placed.placement)


@examples(120)
@given(rounds)
def test_every_placement_passes_the_checker(case: Round) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    assert broken_rules(snapshot, problem, placed) == set()
    for job, column in enumerate(solution.choice.tolist()):
        denied = placed.solution.choice[job] != column
        assert (job in placed.unplaced) == (job in placed.wanted) == denied
    for job in placed.degraded:
        cell = int(problem.cell[placed.solution.choice[job]])
        assert placed.placement.gangs[job].nodes > problem.cells.nodes[cell]


@examples(80)
@given(rounds)
def test_jobs_that_keep_their_cell_move_only_as_migrated_and_pinned_ones_never(
    case: Round,
) -> None:
    snapshot, problem, solution = case
    now = current_gangs(snapshot)
    placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    for outcome in (placed, defragment(snapshot, problem, placed)):
        for job, gang in outcome.placement.gangs.items():
            if outcome.solution.choice[job] == problem.current[job] >= 0:
                assert (gang == now[job]) != (job in outcome.placement.migrated)
        assert all(not snapshot.jobs.pinned[job] for job in outcome.placement.migrated)


@examples(80)
@given(rounds_without_promises)
def test_shares_are_made_of_aligned_blocks(case: Round) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    for gang in placed.placement.gangs.values():
        for _, indices in gang.members:
            assert carve_share(mask_of(indices), len(indices)) == mask_of(indices)


@examples(80)
@given(rounds)
def test_promised_jobs_on_healthy_nodes_always_run(case: Round) -> None:
    snapshot, problem, solution = case
    if (problem.must_run & (problem.current < 0)).any():
        return  # a promised job lost its node, so it may not fit
    placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    assert (placed.solution.choice[problem.must_run] >= 0).all()


@examples(80)
@given(rounds_without_promises)
def test_repair_never_scores_below_leaving_unplaced_jobs_waiting(
    case: Round,
) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    hurried = place(snapshot, problem, solution, deadline_expired=always)
    drop = hurried.solution.choice.copy()
    drop[[*hurried.unplaced, *(hurried.degraded - set(current_gangs(snapshot)))]] = -1
    gangs = {j: g for j, g in hurried.placement.gangs.items() if drop[j] >= 0}
    left = dataclasses.replace(
        hurried,
        solution=dataclasses.replace(
            hurried.solution, choice=drop, objective=int(problem.value[drop[drop >= 0]].sum())
        ),
        placement=Placement(gangs=gangs, migrated=hurried.placement.migrated & set(gangs)),
    )
    assert broken_rules(snapshot, problem, left) == set()
    assert placed_score(problem, placed) >= placed_score(problem, left) - 1e-9


@examples(80)
@given(rounds)
def test_defragmentation_never_lowers_the_score(case: Round) -> None:
    snapshot, problem, solution = case
    for expired in (never_cancelled, always):
        placed = place(snapshot, problem, solution, deadline_expired=expired)
        after = defragment(snapshot, problem, placed)
        assert broken_rules(snapshot, problem, after) == set()
        assert placed_score(problem, after) >= placed_score(problem, placed) - 1e-9


def without_alternatives(problem: Problem) -> Problem:
    """Return the problem in which a job has one column for each GPU type and count, or runs on it."""
    cells, seen = problem.cells, set()
    keep = []
    for column, job in enumerate(problem.column_job.tolist()):
        cell = problem.cell[column]
        key = (job, int(cells.gpu_type[cell]), int(cells.gpus[cell]))
        if key not in seen or column == problem.current[job]:
            keep.append(column)
        seen.add(key)
    everyone = np.arange(len(problem.jobs), dtype=np.int64)
    return restrict_problem(problem, everyone, np.array(keep, dtype=np.int64))


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0.3, 0.7, 1.0]))
def test_a_placement_is_never_worth_less_than_without_alternatives(
    seed: int, jobs: int, keep: float
) -> None:
    snapshot, problem, _ = a_round(seed, jobs, keep, promised=0.0)
    fewer = without_alternatives(problem)
    solution = a_solution(np.random.default_rng(seed), fewer, keep)
    without = place(snapshot, fewer, solution, deadline_expired=never_cancelled)
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    for job in np.flatnonzero(solution.choice >= 0).tolist():
        columns = problem.columns_of(job)
        cell = fewer.cell[solution.choice[job]]
        choice[job] = columns.start + problem.cell[columns.start : columns.stop].tolist().index(
            cell
        )
    same = dataclasses.replace(solution, choice=choice)
    placed = place(snapshot, problem, same, deadline_expired=never_cancelled)
    assert broken_rules(snapshot, problem, placed) == set()
    assert placed_score(problem, placed) >= placed_score(fewer, without) - 1e-9


GPUS = (1, 2, 4)


def a_cluster_with_resources(rng: np.random.Generator, jobs: int) -> Snapshot:
    """Return nodes of 4 and 8 GPUs with few, many or unstated CPU cores and bytes."""
    nodes = [
        a_node(
            f"n{i}",
            gpus=int(rng.choice([4, 8])),
            rack=f"r{int(rng.integers(2))}",
            cpus=int(rng.choice([NOT_STATED, 0, 3, 6, 12])),
            host_bytes=int(rng.choice([NOT_STATED, 5, 10, 40])),
        )
        for i in range(int(rng.integers(1, 5)))
    ]
    return a_snapshot(
        nodes=nodes,
        jobs=[a_job(f"j{j}", pinned=bool(rng.random() >= 0.7)) for j in range(jobs)],
        estimates=[an_estimate(gpus=n, iter_time_s=1.0 / n**0.9) for n in (*GPUS, 8, 12)],
    )


def with_demands(rng: np.random.Generator, problem: Problem) -> Problem:
    """Return the problem with Cells that need CPU cores and host memory in addition to GPUs."""
    cells = problem.cells
    cpus = cells.gpus * rng.integers(0, 4) + rng.integers(0, 3, len(cells))
    host_bytes = cells.gpus * rng.integers(0, 4) + rng.integers(0, 6, len(cells))
    return replace(problem, cells=replace(cells, cpus=cpus, host_bytes=host_bytes))


def a_random_choice(rng: np.random.Generator, problem: Problem) -> Solution:
    """Return a random choice of columns that fits the cluster's GPUs; running jobs often stay."""
    choice = np.full(len(problem.jobs), -1)
    for job in rng.permutation(len(problem.jobs)).tolist():
        columns, current = problem.columns_of(job), int(problem.current[job])
        if current >= 0 and rng.random() < 0.7:
            columns = range(current, current + 1)
        if rng.random() < 0.9 and len(columns):
            choice[job] = int(rng.choice(list(columns)))
            if (problem.used(choice) > problem.capacity).any():
                choice[job] = -1
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=choice,
        solver="random",
        objective=int(problem.value[choice[choice >= 0]].sum()),
        bound=float(np.abs(problem.value).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeResources:
    """The free GPUs (masks), CPU cores and bytes of nodes, counted independently of the product."""

    mask: list[int]
    cpus: list[float]
    host_bytes: list[float]

    @classmethod
    def of(cls, snapshot: Snapshot) -> FreeResources:
        nodes = snapshot.nodes
        return cls(
            mask=[(1 << n) - 1 for n in nodes.gpus.tolist()],
            cpus=[np.inf if n == NOT_STATED else float(n) for n in nodes.cpus.tolist()],
            host_bytes=[np.inf if n == NOT_STATED else float(n) for n in nodes.host_bytes.tolist()],
        )

    def take(self, node: int, mask: int, demand: Demand) -> None:
        assert self.mask[node] & mask == mask
        self.mask[node] ^= mask
        part = mask.bit_count() / demand.gpus
        self.cpus[node] -= np.ceil(demand.cpus * part - 1e-9)
        self.host_bytes[node] -= np.ceil(demand.host_bytes * part - 1e-9)
        assert self.cpus[node] >= 0
        assert self.host_bytes[node] >= 0

    def has_room(self, node: int, gpus: int, demand: Demand) -> bool:
        part = gpus / demand.gpus
        return (
            carve_share(self.mask[node], gpus) > 0
            and np.ceil(demand.cpus * part - 1e-9) <= self.cpus[node]
            and np.ceil(demand.host_bytes * part - 1e-9) <= self.host_bytes[node]
        )


def free_resources_after(
    snapshot: Snapshot, problem: Problem, placed: PlacementResult
) -> FreeResources:
    """Return the resources that a placement leaves free; fail if it gives more than a node has."""
    rest = FreeResources.of(snapshot)
    for job, gang in placed.placement.gangs.items():
        cell = int(problem.cell[placed.solution.choice[job]])
        for node, gpus in gang.members:
            rest.take(node, sum(1 << gpu for gpu in gpus), problem.cells.demand.of(cell))
    return rest


def check_placement(snapshot: Snapshot, problem: Problem, placed: PlacementResult) -> FreeResources:
    assert find_violations(problem, placed.solution) == []
    assert find_placement_violations(snapshot, problem, placed.solution, placed.placement) == []
    return free_resources_after(snapshot, problem, placed)


def next_round(snapshot: Snapshot, problem: Problem, placed: PlacementResult) -> Snapshot:
    """Return the cluster in which the placed jobs hold their GPUs."""
    gangs: dict[int, Gang] = placed.placement.gangs
    rows = [snapshot.jobs.row(j) for j in range(len(snapshot.jobs))]
    running = a_job("", state=JobState.RUNNING)
    for job in gangs:
        cell = problem.cells.row(int(problem.cell[placed.solution.choice[job]]))
        rows[job] |= {
            "state": running["state"],
            "current_type": cell["gpu_type"],
            "current_gpus": cell["gpus"],
            "current_degree": cell["pipeline_degree"],
        }
    return a_snapshot(
        nodes=[snapshot.nodes.row(n) for n in range(len(snapshot.nodes))],
        jobs=rows,
        estimates=[snapshot.estimates.row(e) for e in range(len(snapshot.estimates))],
        gangs=gangs,
    )


@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
@examples(150)
def test_no_node_gives_more_than_it_has_over_several_rounds(
    seed: int, jobs: int, other_needs: bool
) -> None:
    """Running jobs may need more than before, so that not all of them can stay."""
    rng = np.random.default_rng(seed)
    snapshot = a_cluster_with_resources(rng, jobs)
    cells = with_demands(rng, build_problem(snapshot, Policy())).cells
    for _ in range(3):
        problem = replace(build_problem(snapshot, Policy()), cells=cells)
        placed = place(
            snapshot, problem, a_random_choice(rng, problem), deadline_expired=never_cancelled
        )
        check_placement(snapshot, problem, placed)
        mended = defragment(snapshot, problem, placed)
        check_placement(snapshot, problem, mended)
        snapshot = next_round(snapshot, problem, mended)
        if other_needs:
            cells = with_demands(rng, problem).cells


@given(st.integers(0, 2**32), st.integers(1, 8))
@examples(150)
def test_no_job_waits_if_its_share_fits_a_node(seed: int, jobs: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = a_cluster_with_resources(rng, jobs)
    problem = with_demands(rng, build_problem(snapshot, Policy()))
    placed = place(
        snapshot, problem, a_random_choice(rng, problem), deadline_expired=never_cancelled
    )
    rest = check_placement(snapshot, problem, placed)
    for job, column in placed.wanted.items():
        if placed.solution.choice[job] < 0:
            cell = int(problem.cell[column])
            demand = problem.cells.demand.of(cell)
            nodes = range(len(snapshot.nodes))
            assert not any(rest.has_room(node, demand.gpus, demand) for node in nodes)
            assert placed.unplaced[job]


def a_partly_used_cluster(rng: np.random.Generator) -> tuple[FreeGpus, FreeResources]:
    """Return a cluster partly used by random gangs, as counted by the product and independently."""
    snapshot = a_cluster_with_resources(rng, 1)
    free, rest = FreeGpus(snapshot), FreeResources.of(snapshot)
    for node in range(len(snapshot.nodes)):
        for _ in range(int(rng.integers(4))):
            gpus = int(rng.choice(GPUS))
            demand = Demand(gpus=gpus, cpus=int(rng.integers(5)), host_bytes=int(rng.integers(6)))
            if rest.has_room(node, gpus, demand):
                spots: Spots = ((node, carve_share(rest.mask[node], gpus)),)
                assert free.are_free(spots, demand)
                assert free.take_if_free(spots, 0, gpus, demand)
                rest.take(*spots[0], demand)
    return free, rest


@given(st.integers(0, 2**32))
@examples(300)
def test_a_layout_is_found_exactly_if_some_nodes_have_room_for_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free, rest = a_partly_used_cluster(rng)
    gpus = int(rng.choice([*GPUS, 6, 8, 12, 16]))
    demand = Demand(gpus=gpus, cpus=int(rng.integers(20)), host_bytes=int(rng.integers(40)))
    nodes = range(len(rest.mask))
    for layout in free.layouts(0, gpus):
        if layout.mixed:
            continue
        found = free.find(0, layout, {}, demand=demand)
        assert (found is not None) == _some_nodes_do(free, rest, layout, demand, nodes)
        if found is not None:
            before = [free.left(node) for node in nodes]
            free.take(found, demand)
            free.give(found, demand)
            assert [free.left(node) for node in nodes] == before


def _some_nodes_do(
    free: FreeGpus, rest: FreeResources, layout: Layout, demand: Demand, nodes: range
) -> bool:
    def whole(node: int) -> bool:
        return rest.mask[node].bit_count() == free.size[node] == layout.each

    for equal in itertools.combinations(nodes, layout.count):
        if all(
            rest.has_room(node, layout.each, demand) and (not layout.whole or whole(node))
            for node in equal
        ):
            others = set(nodes) - set(equal)
            if not layout.rest or any(rest.has_room(n, layout.rest, demand) for n in others):
                return True
    return False


def test_resources_that_a_node_lacks_are_not_given() -> None:
    free = FreeGpus(a_snapshot(nodes=[a_node("n0", cpus=4)], jobs=[], estimates=[]))
    demand = Demand(gpus=1, cpus=3)
    free.take(((0, 1),), demand)
    assert not free.are_free(((0, 2),), demand)
    assert not free.take_if_free(((0, 2),), 0, 1, demand)
    assert free.are_free(((0, 2),), replace(demand, cpus=1))
    with pytest.raises(AssertionError, match="lacks what its jobs need"):
        free.take(((0, 2),), demand)
