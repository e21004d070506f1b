"""Placement on nodes that state CPU cores and host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.formulation.check import find_placement_violations, find_violations
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution, SolveStatus
from tessera.formulation.statement import build_problem
from tessera.solvers.placement import PlacementResult, place
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate


def never() -> bool:
    return False


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
    problem = build_problem(snapshot, Policy())
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
    outcome = place(snapshot, problem, solution, deadline_expired=never)
    assert find_violations(problem, outcome.solution) == []
    violations = find_placement_violations(snapshot, problem, outcome.solution, outcome.placement)
    assert violations == []
    return outcome


def nodes_by_job(outcome: PlacementResult) -> dict[int, list[int]]:
    """Return the nodes of each job."""
    return {j: [node for node, _ in g.members] for j, g in outcome.placement.gangs.items()}


def a_running_job(name: str, gpus: int, **overrides: Any) -> dict[str, Any]:
    return a_job(name, state=JobState.RUNNING, cell=(0, gpus, 1), **overrides)


def test_a_small_job_is_moved_to_free_cores_for_a_larger_one() -> None:
    nodes = [a_node("n0", gpus=4, cpus=8), a_node("n1", gpus=1, cpus=4)]
    gangs = {0: Gang(members=((0, (3,)),))}
    jobs = [a_running_job("a", 1), a_job("b")]
    outcome = place_columns(*a_round(nodes, jobs, [(1, 4, 0), (2, 6, 0)], gangs))
    assert nodes_by_job(outcome) == {0: [1], 1: [0]}
    assert outcome.placement.migrated == {0}


def test_a_must_run_job_takes_the_cores_of_one_that_may_wait() -> None:
    nodes = [a_node("n0", gpus=4, cpus=8)]
    gangs = {0: Gang(members=((0, (0,)),))}
    snapshot, problem = a_round(
        nodes, [a_running_job("a", 1), a_job("b")], [(1, 4, 0), (2, 6, 0)], gangs
    )
    must = dataclasses.replace(problem, must_run=np.array([False, True]))
    outcome = place_columns(snapshot, must)
    assert nodes_by_job(outcome) == {1: [0]}


def test_a_pinned_job_with_increased_demand_displaces_a_job_next_to_it() -> None:
    nodes = [a_node("n0", gpus=4, cpus=8), a_node("n1", gpus=4, cpus=8)]
    gangs = {0: Gang(members=((0, (0,)),)), 1: Gang(members=((0, (1,)),))}
    jobs = [a_running_job("a", 1), a_running_job("b", 1, movable=False, guaranteed=True)]
    outcome = place_columns(*a_round(nodes, jobs, [(1, 2, 0), (1, 7, 0)], gangs))
    assert nodes_by_job(outcome) == {0: [1], 1: [0]}
    assert outcome.placement.migrated == {0}


def test_a_job_without_enough_cores_says_so() -> None:
    nodes = [a_node("n0", gpus=4, cpus=8, host_bytes=100)]
    outcome = place_columns(*a_round(nodes, [a_job("a")], [(2, 9, 50)]))
    assert nodes_by_job(outcome) == {}
    assert outcome.unplaced == {
        0: "the job needs 9 CPU cores and 50 bytes of host memory in addition to 2 GPUs on a node;"
        " nodes that have the GPUs free but lack the rest: 1"
    }
