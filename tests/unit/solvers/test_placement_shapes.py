"""Placement of wide shapes, blocks and layouts, and nodes that state CPU cores and host memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.check import find_placement_violations, find_violations
from tessera.formulation.answer.decisions import Decision
from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.placement import PlacementResult, place
from tessera.solvers.placement.blocks import (
    carve_share,
    mask_of,
    maximal_blocks,
)
from tessera.solvers.placement.free import Layout, list_layouts, spread_evenly
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import (
    a_job,
    a_node,
    a_snapshot,
    an_estimate,
    some_nodes,
    state_freely,
)
from tests.support.driver import FOREVER


def choose(problem: Problem, shapes: dict[int, tuple[int, int]]) -> Solution:
    """Return the solution that runs these jobs on these (GPUs, nodes)."""
    choice = np.full(len(problem.jobs), -1)
    cells = problem.cells
    for job, shape in shapes.items():
        (choice[job],) = (
            c
            for c in problem.columns_of(job)
            if (cells.gpus[problem.cell[c]], cells.nodes[problem.cell[c]]) == shape
        )
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=choice,
        objective=int(problem.value[choice[choice >= 0]].sum()),
        bound=math.inf,
        solver="test",
    )


def place_jobs(
    snapshot: Snapshot, shapes: dict[int, tuple[int, int]]
) -> tuple[PlacementResult, Problem]:
    """Place these jobs on these (GPUs, nodes); check the outcome."""
    problem = state_freely(snapshot, Policy()).problem
    placed = place(snapshot, problem, choose(problem, shapes), deadline_expired=never_cancelled)
    assert find_placement_violations(snapshot, problem, placed.solution, placed.placement) == []
    assert find_violations(problem, placed.solution) == []
    return placed, problem


def shares(placed: PlacementResult, job: int) -> list[int]:
    return [len(gpus) for _, gpus in placed.placement.gangs[job].members]


def nodes_of(placed: PlacementResult, problem: Problem, job: int) -> int:
    """Return the nodes of the column that a job got."""
    return int(problem.cells.nodes[problem.cell[placed.solution.choice[job]]])


WIDE = [
    an_estimate(gpus=8, nodes=1, degree=1, iter_time_s=14.0),
    an_estimate(gpus=8, nodes=2, degree=2, iter_time_s=8.0),
]
"""Eight GPUs run faster on two nodes."""


def decide(snapshot: Snapshot, policy: Policy | None = None) -> dict[int, Decision]:
    outcome = plan_round(snapshot, policy or Policy(), Portfolio(), FOREVER)
    assert outcome.violations == ()
    return {decision.job: decision for decision in outcome.decisions}


@pytest.mark.parametrize(
    ("gpus", "nodes", "layout"),
    [
        (16, 2, Layout(2, 8, 0)),
        (5, 2, Layout(1, 3, 2)),
        (9, 4, Layout(3, 2, 3)),
        (10, 4, Layout(3, 3, 1)),
        (3, 3, Layout(3, 1, 0)),
    ],
)
def test_gpus_are_spread_as_evenly_as_they_divide(gpus: int, nodes: int, layout: Layout) -> None:
    assert spread_evenly(gpus, nodes) == layout
    assert layout in list_layouts(gpus, (16,), nodes)


def a_half_full_cluster(**of_running: Any) -> Snapshot:
    """Return a whole node, a node that a running job fills, and a job that would best be wide."""
    running = a_job("full", 1, state=JobState.RUNNING, cell=(0, 8, 1), **of_running)
    return a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[a_job("wide"), running],
        estimates=[*WIDE, an_estimate(1, gpus=8)],
        gangs={1: Gang(members=((1, tuple(range(8))),))},
    )


def test_a_narrower_shape_is_taken_where_the_wide_one_finds_no_place() -> None:
    placed, problem = place_jobs(a_half_full_cluster(), {0: (8, 2), 1: (8, 1)})
    assert shares(placed, 0) == [8]
    assert nodes_of(placed, problem, 0) == 1
    assert set(placed.unplaced) == {0}
    assert "4 free GPUs on each of 2 a100 nodes, but 1 have them" in str(placed.unplaced[0])
    assert placed.wanted[0] != placed.solution.choice[0]


def test_placement_takes_no_alternative_below_the_rate_of_a_deadline() -> None:
    """Only the wide shape is fast enough: the other is not taken, though it has room."""
    batches = 1000.0
    job = a_job(
        "dated", iterations=batches, iterations_left=batches, deadline_s=batches * 10, submit_s=0.0
    )
    full = a_job("full", 1, state=JobState.RUNNING, cell=(0, 8, 1), weight=100.0, min_gpus=8)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[job, full],
        estimates=[*WIDE, an_estimate(1, gpus=8)],
        gangs={1: Gang(members=((1, tuple(range(8))),))},
    )
    policy = Policy(deadlines="myopic")
    assert decide(snapshot, policy)[0].gang is None
    alone = a_snapshot(nodes=some_nodes((0, 2, 8)), jobs=[job], estimates=WIDE)
    gang = decide(alone, policy)[0].gang
    assert gang is not None
    assert gang.nodes == 2


def free_mask(*indices: int) -> int:
    return mask_of(indices)


def test_a_mask_falls_into_maximal_aligned_blocks() -> None:
    assert maximal_blocks(free_mask(0, 1, 2, 3, 6, 7)) == ((4, 0), (2, 6))
    assert maximal_blocks(free_mask(1, 2, 3)) == ((2, 2), (1, 1))
    assert maximal_blocks(free_mask(0, 1, 2, 3, 4, 5)) == ((4, 0), (2, 4))
    assert maximal_blocks(0) == ()


def test_a_share_takes_the_tightest_block() -> None:
    assert carve_share(free_mask(0, 1, 2, 3, 6, 7), 2) == free_mask(6, 7)
    assert carve_share(free_mask(0, 1, 2, 3, 6, 7), 1) == free_mask(6)


def test_a_share_fits_if_disjoint_blocks_for_it_exist() -> None:
    def fits(left: int, sizes: tuple[int, ...]) -> bool:
        if not sizes:
            return True
        size, *others = sizes
        return any(
            fits(left & ~block, tuple(others))
            for first in range(0, 8, size)
            if left & (block := ((1 << size) - 1) << first) == block
        )

    for mask, gpus in itertools.product(range(1, 256), range(1, 9)):
        sizes = tuple(1 << k for k in reversed(range(4)) if gpus >> k & 1)
        taken = carve_share(mask, gpus)
        assert bool(taken) == fits(mask, sizes)
        assert taken & ~mask == 0
        assert taken.bit_count() in (0, gpus)


@pytest.mark.parametrize(
    ("gpus", "sizes", "best"),
    [
        (4, (8,), Layout(0, 0, 4)),
        (8, (8,), Layout(0, 0, 8)),
        (24, (8,), Layout(3, 8, 0, whole=True)),
        (40, (8,), Layout(5, 8, 0, whole=True)),
        (48, (8,), Layout(6, 8, 0, whole=True)),
        (24, (16,), Layout(1, 16, 8, whole=True)),
        (20, (6,), Layout(3, 6, 2, whole=True)),
        (12, (8, 4), Layout(1, 8, 4, whole=True)),
    ],
)
def test_the_best_layout_is_whole_nodes_and_a_remainder(
    gpus: int, sizes: tuple[int, ...], best: Layout
) -> None:
    assert list_layouts(gpus, sizes)[0] == best


def test_worse_layouts_are_equal_powers_of_two_larger_first() -> None:
    assert list_layouts(24, (16,))[1:] == [
        Layout(3, 8, 0),
        Layout(6, 4, 0),
        Layout(12, 2, 0),
        Layout(24, 1, 0),
    ]
    assert list_layouts(6, (8,))[1:] == [Layout(3, 2, 0), Layout(6, 1, 0)]


def a_round(
    nodes: Sequence[dict[str, Any]],
    jobs: Sequence[dict[str, Any]],
    needs: Sequence[tuple[int, int, int]],
    gangs: dict[int, Gang] | None = None,
) -> tuple[Snapshot, Problem]:
    """Return a round; job j runs workload j, whose one Cell ``needs`` (GPUs, cores, bytes)."""
    snapshot = a_snapshot(
        nodes=nodes,
        jobs=[job | {"workload": j} for j, job in enumerate(jobs)],
        gangs=gangs,
        estimates=[
            an_estimate(j, gpus=gpus, iter_time_s=1.0 / gpus)
            for j, (gpus, _, _) in enumerate(needs)
        ],
    )
    problem = state_freely(snapshot, Policy()).problem
    assert problem.cells.workload.tolist() == list(range(len(needs)))
    cells = dataclasses.replace(
        problem.cells,
        cpus=np.array([cpus for _, cpus, _ in needs]),
        host_bytes=np.array([size for _, _, size in needs]),
    )
    return snapshot, dataclasses.replace(problem, cells=cells)


def place_columns(snapshot: Snapshot, problem: Problem) -> PlacementResult:
    """Place the one column of each job; check the outcome."""
    choice = np.arange(len(problem.jobs))
    solution = Solution(
        status=SolveStatus.OPTIMAL,
        choice=choice,
        objective=int(problem.value.sum()),
        bound=float(np.maximum(problem.value, 0).sum()),
        solver="test",
    )
    outcome = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    assert find_violations(problem, outcome.solution) == []
    violations = find_placement_violations(snapshot, problem, outcome.solution, outcome.placement)
    assert violations == []
    return outcome


def nodes_by_job(outcome: PlacementResult) -> dict[int, list[int]]:
    """Return the nodes of each job."""
    return {j: [node for node, _ in g.members] for j, g in outcome.placement.gangs.items()}


def test_a_job_without_enough_cores_says_so() -> None:
    nodes = [a_node("n0", gpus=4, cpus=8, host_bytes=100)]
    outcome = place_columns(*a_round(nodes, [a_job("a")], [(2, 9, 50)]))
    assert nodes_by_job(outcome) == {}
    assert outcome.unplaced == {
        0: "the job needs 9 CPU cores and 50 bytes of host memory in addition to 2 GPUs on a node;"
        " nodes that have the GPUs free but lack the rest: 1"
    }
