"""The checker finds each broken rule, and only that rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.check import (
    find_placement_violations,
    find_violations,
    score_solution,
)
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import Snapshot
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes

ESTIMATES = [an_estimate(gpus=2), an_estimate(gpus=4, iter_time_s=0.6)]


def a_round() -> tuple[Snapshot, Problem, Solution, Placement]:
    """Return two jobs of 2 and 4 GPUs on two 4-GPU nodes. The first job runs and must run."""
    gangs = {0: Gang(members=((0, (0, 1)),))}
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        estimates=ESTIMATES,
        gangs=gangs,
        jobs=[a_job("j", state=JobState.RUNNING, cell=(0, 2, 1), guaranteed=True), a_job("k")],
    )
    problem = state_round(snapshot, Policy(keep_requests=False, promise_starts=False)).problem
    choice = np.array([0, 3])
    objective = int(problem.value[choice].sum())
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=choice, objective=objective, bound=objective, solver="t"
    )
    gangs = {**gangs, 1: Gang(members=((1, (0, 1, 2, 3)),))}
    return snapshot, problem, solution, Placement(gangs=gangs)


def test_a_valid_round_has_no_violation() -> None:
    snapshot, problem, solution, placement = a_round()
    assert find_violations(problem, solution) == []
    assert find_placement_violations(snapshot, problem, solution, placement) == []
    assert score_solution(problem, solution) == pytest.approx(solution.objective / problem.scale)
    assert score_solution(problem, solution, placement) == pytest.approx(
        score_solution(problem, solution)
    )


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("one choice for each job", {"choice": [0]}),
        ("must run", {"choice": [-1, 3]}),
        ("own column", {"choice": [0, 1]}),
        ("objective", {"objective": 1}),
        ("bound", {"bound": 1.0}),
    ],
)
def test_an_invalid_solution_is_detected(rule: str, change: dict[str, object]) -> None:
    _, problem, solution, _ = a_round()
    violations = find_violations(problem, replace(solution, **change))  # type: ignore[arg-type]
    assert rule in {v.rule for v in violations}


def gang(*members: tuple[int, tuple[int, ...]]) -> Gang:
    return Gang(members=members)


@pytest.mark.parametrize(
    ("rule", "gangs"),
    [
        ("all or nothing", {0: gang((0, (0, 1)))}),
        ("gang", {0: gang((0, (0, 1))), 1: gang((1, (0, 1, 2)))}),
        ("GPU once", {0: gang((0, (0, 1))), 1: gang((0, (1, 2)), (1, (0, 1)))}),
        ("GPU exists", {0: gang((0, (0, 1))), 1: gang((1, (1, 2, 3, 4)))}),
        ("node once", {0: gang((0, (0, 1))), 1: gang((1, (0, 1)), (1, (2, 3)))}),
        ("equal shares", {0: gang((0, (0, 1))), 1: gang((0, (2,)), (1, (0, 1, 2)))}),
        ("kept in place", {0: gang((0, (2, 3))), 1: gang((1, (0, 1, 2, 3)))}),
    ],
)
def test_an_invalid_placement_is_detected(rule: str, gangs: dict[int, Gang]) -> None:
    snapshot, problem, solution, _ = a_round()
    violations = find_placement_violations(snapshot, problem, solution, Placement(gangs=gangs))
    assert rule in {v.rule for v in violations}


def _draining_one_node(s: Snapshot) -> Snapshot:
    return replace(s, nodes=replace(s.nodes, schedulable=np.array([True, False])))


def _with_another_type(s: Snapshot) -> Snapshot:
    nodes = replace(s.nodes, gpu_type=np.array([0, 1]))
    return replace(s, gpu_types=s.gpu_types * 2, nodes=nodes)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("schedulable node", _draining_one_node),
        ("one GPU type", _with_another_type),
        ("may run", lambda s: replace(s, jobs=replace(s.jobs, state=np.array([3, 1])))),
    ],
)
def test_a_placement_that_contradicts_the_snapshot_is_detected(
    rule: str, change: Callable[[Snapshot], Snapshot]
) -> None:
    snapshot, problem, solution, placement = a_round()
    violations = find_placement_violations(change(snapshot), problem, solution, placement)
    assert rule in {v.rule for v in violations}


def test_a_worse_shape_has_the_value_of_its_own_rate() -> None:
    _, problem, solution, placement = a_round()
    spread = Placement(gangs={0: placement.gangs[0], 1: gang((0, (2, 3)), (1, (0, 1)))})
    value = problem.value / problem.scale
    assert score_solution(problem, solution, spread) == pytest.approx(value[0] + 0.9 * value[3])


def test_a_migration_is_charged_its_restart() -> None:
    _, problem, solution, placement = a_round()
    share = replace(problem, restart_share=np.array([0.25, 0.0]))
    moved = Placement(gangs=placement.gangs, migrated=frozenset({0}))
    lost = score_solution(share, solution, placement) - score_solution(share, solution, moved)
    assert lost == pytest.approx(0.25 * problem.value[0] / problem.scale)


@pytest.mark.parametrize(
    ("cpus", "host_bytes", "expected"),
    [
        ([5, -1], [-1, -1], []),
        ([4, -1], [-1, -1], ["a100-0 has 4 CPU cores, but its jobs need 5"]),
        ([5, 6], [30, 40], []),
        (
            [5, 5],
            [29, 39],
            [
                "a100-1 has 5 CPU cores, but its jobs need 6",
                "a100-0 has 29 bytes of host memory, but its jobs need 30",
                "a100-1 has 39 bytes of host memory, but its jobs need 40",
            ],
        ),
    ],
)
def test_a_node_whose_jobs_need_more_than_it_has_is_detected(
    cpus: list[int], host_bytes: list[int], expected: list[str]
) -> None:
    """The jobs need 2 and 9 cores. The first node has all of the 2 and a third of the 9: 5."""
    snapshot, problem, solution, _ = a_round()
    cells = replace(
        problem.cells, gpus=np.array([2, 3]), cpus=np.array([2, 9]), host_bytes=np.array([10, 60])
    )
    nodes = replace(snapshot.nodes, cpus=np.array(cpus), host_bytes=np.array(host_bytes))
    placement = Placement(gangs={0: gang((0, (0, 1))), 1: gang((0, (2,)), (1, (0, 1)))})
    wrong = find_placement_violations(
        replace(snapshot, nodes=nodes), replace(problem, cells=cells), solution, placement
    )
    assert [v.detail for v in wrong if v.rule == "node capacity"] == expected
