"""Placement of gangs on nodes and GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.check import (
    find_placement_violations,
    find_violations,
    score_solution,
)
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.texts import HIDDEN_NAME, Text, render
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.placement import PlacementResult, defragment, place
from tessera.solvers.placement.board import Board
from tessera.solvers.placement.free import FreeGpus
from tessera.solvers.placement.results import explain_change
from tessera.solvers.placement.search import SeatChange
from tests.support.builders import (
    a_job,
    a_node,
    a_snapshot,
    an_estimate,
    some_nodes,
    state_freely,
)
from tests.support.driver import FOREVER


def a_running_job(name: str, gpus: int, workload: int = 0, **overrides: Any) -> dict[str, Any]:
    return a_job(name, workload, state=JobState.RUNNING, cell=(0, gpus, 1), **overrides)


def a_solution(problem: Problem, gpus: dict[int, int], gpu_type: int = 0) -> Solution:
    """Return the solution that runs these jobs on these numbers of GPUs of one type."""
    choice = np.full(len(problem.jobs), -1)
    for job, want in gpus.items():
        (choice[job],) = (
            c
            for c in problem.columns_of(job)
            if problem.cells.gpus[problem.cell[c]] == want
            and problem.cells.gpu_type[problem.cell[c]] == gpu_type
        )
    objective = int(problem.value[choice[choice >= 0]].sum())
    return Solution(
        status=SolveStatus.OPTIMAL,
        choice=choice,
        objective=objective,
        bound=float(np.maximum(problem.value, 0).sum()),
        solver="test",
    )


def estimates_of(*gpus: int, gpu_type: int = 0, workload: int = 0) -> list[dict[str, Any]]:
    """Return estimates that scale perfectly on one node (other shapes: 0.9 for each halving)."""
    return [an_estimate(workload, gpu_type, n, 1, iter_time_s=8.0 / n) for n in gpus]


def place_jobs(
    snapshot: Snapshot, gpus: dict[int, int], problem: Problem | None = None
) -> tuple[PlacementResult, Problem]:
    """Place these jobs at these numbers of GPUs; check the outcome."""
    problem = problem or state_freely(snapshot, Policy(objective="throughput")).problem
    outcome = place(snapshot, problem, a_solution(problem, gpus), deadline_expired=never_cancelled)
    check_placement(snapshot, problem, outcome)
    return outcome, problem


def check_placement(snapshot: Snapshot, problem: Problem, outcome: PlacementResult) -> None:
    assert find_placement_violations(snapshot, problem, outcome.solution, outcome.placement) == []
    assert find_violations(problem, outcome.solution) == []


def gang(*members: tuple[int, tuple[int, ...]]) -> Gang:
    return Gang(members=members)


def a_snapshot_of_waiting_jobs(
    nodes: Sequence[dict[str, Any]], *sizes: int, gangs: dict[int, Gang] | None = None
) -> Snapshot:
    """Return queued jobs that can run at these numbers of GPUs."""
    return a_snapshot(
        nodes=nodes,
        jobs=[a_job(f"j{i}") for i in range(4)],
        estimates=estimates_of(*sizes),
        gangs=gangs,
    )


def test_nodes_of_one_rack_are_preferred() -> None:
    nodes = [a_node("a", rack="r0"), a_node("b", rack="r1"), a_node("c", rack="r1")]
    outcome, _ = place_jobs(a_snapshot_of_waiting_jobs(nodes, 16), {0: 16})
    assert [node for node, _ in outcome.placement.gangs[0].members] == [1, 2]


def test_the_tightest_block_is_taken_and_free_nodes_stay_whole() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 3, 8)),
        jobs=[a_running_job("six", 6, 1), a_job("two")],
        estimates=[*estimates_of(2), *estimates_of(6, workload=1)],
        gangs={0: gang((1, (0, 1, 2, 3, 4, 5)))},
    )
    outcome, _ = place_jobs(snapshot, {0: 6, 1: 2})
    assert outcome.placement.gangs[1].members == ((1, (6, 7)),)


def a_fragmented_snapshot(
    *,
    pinned: bool = False,
    restart_s: float = 36.0,
    sizes: tuple[int, ...] = (4,),
    guaranteed: bool = False,
    slow_apart: bool = True,
) -> Snapshot:
    """Return two nodes of four GPUs, each half used by a job of two, and a job that needs four together."""
    estimates = [*estimates_of(*sizes), *estimates_of(2, workload=1)]
    if slow_apart and 4 in sizes:
        estimates += [an_estimate(0, 0, 4, nodes, iter_time_s=np.inf) for nodes in (2, 4)]
    jobs = [
        a_running_job(
            f"small{i}",
            2,
            1,
            pinned=pinned,
            restart_s=restart_s,
            guaranteed=guaranteed,
            requested_gpus=2,
        )
        for i in range(2)
    ]
    return a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        estimates=estimates,
        jobs=[*jobs, a_job("big", requested_gpus=4)],
        gangs={0: gang((0, (0, 1))), 1: gang((1, (0, 1)))},
    )


def test_a_small_job_moves_if_that_gains_more_than_it_costs() -> None:
    snapshot = a_fragmented_snapshot()
    outcome, problem = place_jobs(snapshot, {0: 2, 1: 2, 2: 4})
    assert len(outcome.placement.migrated) == 1
    assert outcome.placement.gangs[2].nodes == 1
    assert outcome.unplaced == {}
    assert outcome.solution.status is SolveStatus.OPTIMAL
    moved_price = 0.02  # 36 s of an hour of a job worth two effective GPUs
    assert score_solution(problem, outcome.solution, outcome.placement) == pytest.approx(
        8.0 - moved_price
    )


def test_a_pinned_job_is_not_moved_and_the_job_waits_with_a_reason() -> None:
    outcome, _ = place_jobs(a_fragmented_snapshot(pinned=True), {0: 2, 1: 2, 2: 4})
    assert outcome.placement.migrated == frozenset()
    assert 2 not in outcome.placement.gangs
    assert outcome.unplaced == {
        2: "the job needs 4 free GPUs on one a100 node, but the freest node has 2"
    }
    assert outcome.solution.status is SolveStatus.FEASIBLE
    assert outcome.solution.choice[2] == -1


def test_a_worse_shape_is_used_if_moving_costs_more() -> None:
    outcome, problem = place_jobs(
        a_fragmented_snapshot(restart_s=1800.0, slow_apart=False), {0: 2, 1: 2, 2: 4}
    )
    assert outcome.degraded == {2}
    assert [len(g) for _, g in outcome.placement.gangs[2].members] == [2, 2]
    assert outcome.unplaced == {}
    assert score_solution(problem, outcome.solution, outcome.placement) == pytest.approx(7.6)


def test_the_cheapest_blocking_job_is_moved() -> None:
    """Either half of the first node could be cleared; the second node has room for only one GPU."""
    dead = [an_estimate(0, 0, 4, nodes, iter_time_s=np.inf) for nodes in (2, 4)]
    snapshot = a_snapshot(
        nodes=[a_node("a"), a_node("b", gpus=1)],
        jobs=[
            a_running_job("dear", 1, 1, weight=5.0, restart_s=36.0),
            a_running_job("cheap", 1, 1, restart_s=36.0),
            a_job("new", requested_gpus=4),
        ],
        estimates=[*estimates_of(4), *dead, *estimates_of(1, workload=1)],
        gangs={0: gang((0, (0,))), 1: gang((0, (4,)))},
    )
    outcome, _ = place_jobs(snapshot, {0: 1, 1: 1, 2: 4})
    assert outcome.placement.migrated == {1}
    assert outcome.placement.gangs[2].members == ((0, (4, 5, 6, 7)),)


def a_promise_at_risk() -> Snapshot:
    """Return guaranteed job 0, whose node was lost; pinned best-effort jobs 1 and 2 use the other nodes."""
    running = [
        a_running_job("promised", 4, guaranteed=True),
        a_running_job("cheap", 2, 1, pinned=True, weight=0.5, requested_gpus=2),
        a_running_job("dear", 2, 1, pinned=True, weight=2.0, requested_gpus=2),
    ]
    estimates = [*estimates_of(4), *estimates_of(2, workload=1)]
    estimates += [an_estimate(0, 0, 4, nodes, iter_time_s=np.inf) for nodes in (2, 4)]
    return a_snapshot(
        nodes=[a_node("lost", gpus=4, schedulable=False), a_node("b", gpus=4), a_node("c", gpus=4)],
        jobs=running,
        estimates=estimates,
        gangs={0: gang((0, (0, 1, 2, 3))), 1: gang((1, (0, 1))), 2: gang((2, (0, 1)))},
    )


def test_a_promise_is_kept_by_displacing_the_best_effort_job_of_least_value() -> None:
    snapshot = a_promise_at_risk()
    policy = Policy(objective="throughput", keep_requests=False, promise_starts=False)
    problem = state_round(snapshot, policy).problem
    outcome, _ = place_jobs(snapshot, {0: 4, 1: 2, 2: 2}, problem)
    assert outcome.placement.gangs[0].members == ((1, (0, 1, 2, 3)),)
    assert outcome.placement.gangs[2].members == ((2, (0, 1)),)
    assert set(outcome.unplaced) == {1}


def test_a_job_that_loses_its_column_learns_for_which_job_if_it_may_know_it() -> None:
    snapshot = a_promise_at_risk()
    policy = Policy(objective="throughput", keep_requests=False, promise_starts=False)
    board = Board(snapshot, state_round(snapshot, policy).problem)
    reasons: dict[int, Text] = {}
    change = SeatChange(0.0, {1: (2, ((1, 0b11),))})
    explain_change(board, change, 0, {1: 3}, reasons)
    assert str(reasons[1]) == "promised, which must run, needs its GPUs"
    assert render(reasons[1], "blue".__eq__) == f"{HIDDEN_NAME}, which must run, needs its GPUs"


def a_degraded_job(*, pinned: bool = False, restart_s: float = 36.0) -> Snapshot:
    """Return a job on halves of two nodes of four GPUs; another node is free."""
    return a_snapshot(
        nodes=some_nodes((0, 3, 4)),
        estimates=estimates_of(4),
        jobs=[a_running_job("j", 4, requested_gpus=4, pinned=pinned, restart_s=restart_s)],
        gangs={0: gang((0, (0, 1)), (1, (0, 1)))},
    )


def test_defragmentation_moves_a_degraded_job_to_a_better_shape() -> None:
    snapshot = a_degraded_job()
    before, problem = place_jobs(snapshot, {0: 4})
    assert before.degraded == {0}
    assert before.placement.migrated == frozenset()
    after = defragment(snapshot, problem, before)
    check_placement(snapshot, problem, after)
    assert after.placement.migrated == {0}
    assert after.placement.gangs[0].nodes == 1
    assert after.degraded == frozenset()
    gain = score_solution(problem, after.solution, after.placement) - score_solution(
        problem, before.solution, before.placement
    )
    assert gain == pytest.approx(4 * (0.1 - 0.01))  # four effective GPUs


def test_defragmentation_empties_nodes_for_a_job_that_could_not_be_placed() -> None:
    snapshot = a_fragmented_snapshot()
    problem = state_freely(snapshot, Policy()).problem
    before = place(
        snapshot, problem, a_solution(problem, {0: 2, 1: 2, 2: 4}), deadline_expired=lambda: True
    )
    after = defragment(snapshot, problem, before)
    check_placement(snapshot, problem, after)
    assert after.unplaced == {}
    assert after.placement.gangs[2].nodes == 1
    assert len(after.placement.migrated) == 1
    quick_restart = defragment(snapshot, problem, before, deadline_expired=lambda: True)
    assert quick_restart.placement == before.placement


def with_gang(
    outcome: PlacementResult, job: int, *members: tuple[int, tuple[int, ...]]
) -> Placement:
    return dataclasses.replace(
        outcome.placement, gangs=outcome.placement.gangs | {job: gang(*members)}
    )


def rules_broken(
    snapshot: Snapshot, problem: Problem, outcome: PlacementResult, wrong: Placement
) -> set[str]:
    return {v.rule for v in find_placement_violations(snapshot, problem, outcome.solution, wrong)}


def test_the_checker_finds_a_gpu_listed_twice_and_moves_that_are_not_allowed() -> None:
    snapshot = a_degraded_job(pinned=True)
    outcome, problem = place_jobs(snapshot, {0: 4})
    twice = with_gang(outcome, 0, (0, (0, 0)), (1, (0, 1)))
    assert "GPU once" in rules_broken(snapshot, problem, outcome, twice)
    moved_gang = with_gang(outcome, 0, (2, (0, 1, 2, 3)))
    assert rules_broken(snapshot, problem, outcome, moved_gang) == {"kept in place"}
    marked = dataclasses.replace(moved_gang, migrated=frozenset({0}))
    assert rules_broken(snapshot, problem, outcome, marked) == {"pinned"}
    idle = dataclasses.replace(outcome.placement, migrated=frozenset({0}))
    assert rules_broken(snapshot, problem, outcome, idle) == {"migrated"}


def test_a_large_gang_that_is_cheap_to_move_is_skipped_if_no_place_can_hold_it() -> None:
    """Two whole nodes are needed: one is free, two are half free.

    Moving `large` is cheapest but takes as much room as it frees. Moving `small` next to `other` frees
    the node that is needed.
    """
    running: dict[str, Any] = {"state": JobState.RUNNING, "iterations_left": 1e5}
    jobs = [
        a_job("large", 1, cell=(0, 4, 1), restart_s=1.0, **running),
        a_job("small", cell=(0, 2, 1), restart_s=300.0, **running),
        a_job("other", cell=(0, 2, 1), restart_s=600.0, **running),
        a_job("wide", 2, weight=9.0),
    ]
    gangs = {
        0: Gang(members=((1, (0, 1, 2, 3)),)),
        1: Gang(members=((2, (0, 1)),)),
        2: Gang(members=((3, (0, 1)),)),
    }
    estimates = [an_estimate(gpus=2), an_estimate(1, gpus=4), an_estimate(2, gpus=8, nodes=2)]
    snapshot = a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=jobs, estimates=estimates, gangs=gangs)
    problem = state_freely(snapshot, Policy()).problem
    solution = Portfolio().solve(problem, FOREVER)
    result = place(snapshot, problem, solution, deadline_expired=lambda: False)
    assert result.unplaced == {}
    assert result.placement.migrated == {1}
    assert find_placement_violations(snapshot, problem, result.solution, result.placement) == []


def test_without_a_solution_nothing_is_placed() -> None:
    snapshot = a_snapshot_of_waiting_jobs(some_nodes((0, 1, 4)), 4)
    problem = state_freely(snapshot, Policy()).problem
    nothing = dataclasses.replace(
        a_solution(problem, {}), status=SolveStatus.UNKNOWN, bound=float("inf")
    )
    outcome = place(snapshot, problem, nothing, deadline_expired=never_cancelled)
    assert outcome.placement.gangs == {}
    assert defragment(snapshot, problem, outcome) == outcome


@pytest.mark.parametrize("searched_before", [False, True])
def test_gpus_are_taken_completely_or_not_at_all(searched_before: bool) -> None:
    nodes = [*some_nodes((0, 2, 4)), *some_nodes((1, 1, 4))]
    free = FreeGpus(a_snapshot(nodes=nodes, jobs=[], estimates=[]))
    if searched_before:  # so that taking GPUs must update the buckets of nodes
        assert free.find(0, free.layouts(0, 4)[0], {}) == ((0, 0b1111),)
    assert free.take_if_free(((0, 0b0011), (1, 0b0001)), 0, 3)
    before = list(free.mask), list(free.total)
    assert before == ([0b1100, 0b1110, 0b1111], [5, 4])
    for spots, kind, gpus in (
        (((0, 0b0100), (1, 0b0001)), 0, 2),  # one of them is taken
        (((0, 0b1100),), 1, 2),  # of another type
        (((0, 0b1100),), 0, 3),  # too few
    ):
        assert not free.take_if_free(spots, kind, gpus)
        assert (free.mask, free.total) == before
    assert free.find(0, free.layouts(0, 4)[0], {}) is None
    free.take(((0, 0b1100),))
    assert free.find(0, free.layouts(0, 2)[0], {}) == ((1, 0b1100),)
