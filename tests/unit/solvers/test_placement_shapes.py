"""Placement of wide shapes, and of the alternatives to a column: other shapes and other degrees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tessera.formulation.check import (
    find_placement_violations,
    find_violations,
    score_solution,
)
from tessera.formulation.decisions import Decision, DecisionKind
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import build_problem
from tessera.solvers.placement import PlacementResult, defragment, place
from tessera.solvers.placement.free import Layout, list_layouts, spread_evenly
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate, some_nodes
from tests.support.driver import FOREVER


def never() -> bool:
    return False


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
    problem = build_problem(snapshot, Policy())
    placed = place(snapshot, problem, choose(problem, shapes), deadline_expired=never)
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


def test_layouts_of_a_wide_column_have_no_fewer_nodes() -> None:
    assert list_layouts(8, (8,), 2) == [Layout(2, 4, 0), Layout(4, 2, 0), Layout(8, 1, 0)]


def test_a_wide_column_is_spread_over_its_nodes() -> None:
    snapshot = a_snapshot(nodes=some_nodes((0, 3, 8)), jobs=[a_job("wide")], estimates=WIDE)
    placed, problem = place_jobs(snapshot, {0: (8, 2)})
    assert shares(placed, 0) == [4, 4]
    assert score_solution(problem, placed.solution, placed.placement) == pytest.approx(
        placed.solution.objective / problem.scale
    )


def test_five_gpus_on_nodes_of_four_are_four_and_one_or_else_three_and_two() -> None:
    estimates = [an_estimate(gpus=5, nodes=2), an_estimate(1, gpus=1)]
    jobs = [
        a_job("odd"),
        *(a_job(f"one-{i}", 1, state=JobState.RUNNING, cell=(0, 1, 1)) for i in range(2)),
    ]
    free = a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=jobs[:1], estimates=estimates)
    assert sorted(shares(place_jobs(free, {0: (5, 2)})[0], 0)) == [1, 4]
    gangs = {1: Gang(members=((0, (0,)),)), 2: Gang(members=((1, (0,)),))}
    taken = a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=jobs, estimates=estimates, gangs=gangs)
    placed, _ = place_jobs(taken, {0: (5, 2), 1: (1, 1), 2: (1, 1)})
    assert sorted(shares(placed, 0)) == [2, 3]


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
    assert "4 free GPUs on each of 2 a100 nodes, but 1 have them" in placed.unplaced[0]
    assert placed.wanted[0] != placed.solution.choice[0]


def a_cluster_where_one_may_make_room(weight: float) -> Snapshot:
    """Return two nodes of 8 with 2 GPUs taken on one: moving these makes room for a wide gang.

    The third node has 2 GPUs.
    """
    running = a_job(
        "small",
        1,
        state=JobState.RUNNING,
        cell=(0, 2, 1),
        restart_s=600.0,
        weight=weight,
    )
    filler = a_job("filler", 2, state=JobState.RUNNING, cell=(0, 3, 1), movable=False)
    estimates = [*WIDE, an_estimate(1, gpus=2), an_estimate(2, gpus=3)]
    return a_snapshot(
        nodes=[a_node("n0"), a_node("n1"), a_node("n2", gpus=2)],
        jobs=[a_job("wide"), running, filler],
        estimates=estimates,
        gangs={1: Gang(members=((1, (0, 1)),)), 2: Gang(members=((1, (4, 5, 6)),))},
    )


@pytest.mark.parametrize(("weight", "shape"), [(1.0, [4, 4]), (100.0, [8])])
def test_a_job_changes_shape_where_that_is_cheaper_than_moving_others(
    weight: float, shape: list[int]
) -> None:
    snapshot = a_cluster_where_one_may_make_room(weight)
    placed, _ = place_jobs(snapshot, {0: (8, 2), 1: (2, 1), 2: (3, 1)})
    assert shares(placed, 0) == shape
    assert placed.placement.migrated == (frozenset({1}) if shape == [4, 4] else frozenset())


def test_another_job_gives_up_its_wide_shape_where_that_lets_a_job_in() -> None:
    """A whole node is needed; the wide job that takes half of each runs on one node instead."""
    estimates = [
        an_estimate(gpus=8, nodes=1, iter_time_s=8.5),
        an_estimate(gpus=8, nodes=2, iter_time_s=8.0),
        an_estimate(1, gpus=8, nodes=1),
        an_estimate(1, gpus=8, nodes=2, iter_time_s=math.inf),
        an_estimate(1, gpus=8, nodes=4, iter_time_s=math.inf),
        an_estimate(1, gpus=8, nodes=8, iter_time_s=math.inf),
    ]
    wide = a_job("wide", state=JobState.RUNNING, cell=(0, 8, 1), restart_s=1.0)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[wide, a_job("whole", 1)],
        estimates=estimates,
        gangs={0: Gang(members=((0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))))},
    )
    placed, problem = place_jobs(snapshot, {0: (8, 2), 1: (8, 1)})
    assert (shares(placed, 0), shares(placed, 1)) == ([8], [8])
    assert placed.unplaced[0] == "whole, which is worth more, needs its GPUs"
    again = defragment(snapshot, problem, placed)
    assert again.placement == placed.placement
    decisions = decide(snapshot)
    assert decisions[0].kind is DecisionKind.MOVE
    assert decisions[0].restart_price > 0


@pytest.mark.parametrize("on_nodes", [1, 2])
def test_a_job_keeps_the_shape_and_degree_that_it_runs_on_without_restart_cost(
    on_nodes: int,
) -> None:
    """Neither is the other's column: staying costs nothing, and changing costs a restart."""
    degree = on_nodes  # of WIDE
    job = a_job("runs", state=JobState.RUNNING, cell=(0, 8, degree), restart_s=600.0)
    half = (0, 1, 2, 3)
    gang = ((0, tuple(range(8))),) if on_nodes == 1 else ((0, half), (1, half))
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)), jobs=[job], estimates=WIDE, gangs={0: Gang(members=gang)}
    )
    problem = build_problem(snapshot, Policy())
    current = int(problem.current[0])
    assert problem.cells.nodes[problem.cell[current]] == on_nodes
    others = [c for c in problem.columns_of(0) if c != current]
    assert problem.restart_price[current] == 0
    assert [int(problem.cells.nodes[problem.cell[c]]) for c in others] == [3 - on_nodes]
    assert (problem.restart_price[others] > 0).all()
    decision = decide(snapshot)[0]
    if on_nodes == 2:
        assert decision.kind is DecisionKind.KEEP
    else:  # the job runs for long, so the wide shape is worth a restart
        assert decision.kind is DecisionKind.MOVE
        assert decision.gang is not None
        assert decision.gang.nodes == 2
    assert decision.rate == pytest.approx(256 / 8.0)


def test_a_job_on_an_imported_profile_keeps_its_shape_too() -> None:
    """The Cell is the same on both shapes; only the number of nodes differs."""
    estimates = [row | {"pipeline_degree": 0} for row in WIDE]
    job = a_job("runs", state=JobState.RUNNING, cell=(0, 8, 0), restart_s=1e9)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[job],
        estimates=estimates,
        gangs={0: Gang(members=((0, tuple(range(8))),))},
    )
    decision = decide(snapshot)[0]
    assert (decision.kind, decision.restart_price) == (DecisionKind.KEEP, 0.0)
    assert decision.rate == pytest.approx(256 / 14.0)


def test_a_running_job_keeps_its_gpus_if_the_shape_that_it_was_given_finds_no_place() -> None:
    """The solver counts GPUs only: it gives the job two nodes, but only one has room."""
    full = a_job("full", 1, state=JobState.RUNNING, cell=(0, 8, 1))
    job = a_job("runs", state=JobState.RUNNING, cell=(0, 8, 1))
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[job, full],
        estimates=[*WIDE, an_estimate(1, gpus=8)],
        gangs={
            0: Gang(members=((0, tuple(range(8))),)),
            1: Gang(members=((1, tuple(range(8))),)),
        },
    )
    placed, problem = place_jobs(snapshot, {0: (8, 2), 1: (8, 1)})
    assert placed.solution.choice.tolist() == problem.current.tolist()
    assert placed.placement.migrated == frozenset()


def test_a_guaranteed_job_may_run_wherever_its_request_would_have_run() -> None:
    """A request is for GPUs: on one node, they are all that it is guaranteed."""
    job = a_job("owed", guaranteed=True, requested_gpus=8)
    full = a_job("full", 1, state=JobState.RUNNING, cell=(0, 8, 1), guaranteed=True)
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 8)),
        jobs=[job, full | {"requested_gpus": 8}],
        estimates=[*WIDE, an_estimate(1, gpus=8)],
        gangs={1: Gang(members=((1, tuple(range(8))),))},
    )
    decision = decide(snapshot)[0]
    assert decision.gang is not None
    assert decision.gang.nodes == 1
    assert decision.rate == pytest.approx(256 / 14.0)


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
