"""Placement keeps room on nodes for planned starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.placement import Gang
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.last_round import ExpectedReleases, PlannedNodes, PlannedStarts
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement import PlacementResult, place
from tessera.solvers.placement.board import Board
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes, state_freely

NOW_S = 1000.0
"""The time of ``a_snapshot``."""

CELLS = [an_estimate(gpus=n, iter_time_s=1 / n) for n in (1, 2, 4)]
"""The seconds of an iteration on n GPUs are 1 / n."""


def a_start(
    job: int, node: int, gpus: int, start_s: float, lasts_s: float = 100.0
) -> dict[str, Any]:
    """Return a planned start on one node."""
    return {"job": job, "node": node, "gpus": gpus, "start_s": start_s, "end_s": start_s + lasts_s}


def with_starts(snapshot: Snapshot, *starts: dict[str, Any]) -> Snapshot:
    """Return the snapshot with planned starts."""
    cell = {"gpu_type": 0, "pipeline_degree": 1, "plan": 0}
    names = ("job", "gpus", "start_s", "end_s")
    rows = [{name: start[name] for name in names} | cell for start in starts]
    nodes = [
        {"start": k, "node": start["node"], "gpus": start["gpus"]} for k, start in enumerate(starts)
    ]
    return replace(
        snapshot,
        planned_starts=PlannedStarts.from_rows(rows),
        planned_nodes=PlannedNodes.from_rows(nodes),
    )


def a_round(
    *jobs: dict[str, Any], nodes: int = 2, gangs: dict[int, Gang] | None = None
) -> Snapshot:
    """Return nodes of four GPUs. The last job is ``wide``, which waits for four."""
    wide = a_job("wide", requested_gpus=4)
    return a_snapshot(
        nodes=some_nodes((0, nodes, 4)), jobs=[*jobs, wide], estimates=CELLS, gangs=gangs
    )


def a_waiting_job(name: str, lasts_s: float, gpus: int = 2) -> dict[str, Any]:
    """Return a job that runs for ``lasts_s`` on its GPUs."""
    return a_job(name, requested_gpus=gpus, iterations_left=lasts_s * gpus)


def column_on(problem: Problem, job: int, gpus: int) -> int:
    """Return the column of a job on a number of GPUs."""
    columns = problem.columns_of(job)
    return next(c for c in columns if problem.cells.gpus[problem.cell[c]] == gpus)


def make_board(snapshot: Snapshot, *, by_plan: bool = False) -> Board:
    return Board(snapshot, state_freely(snapshot, Policy()).problem, by_plan=by_plan)


def closed_nodes(board: Board, job: int, gpus: int = 2) -> set[int]:
    """Return the nodes that are closed to a job on one node."""
    return set(board.closed(job, column_on(board.problem, job, gpus), gpus, 1))


def place_jobs(snapshot: Snapshot, gpus: Sequence[int]) -> dict[str, set[int]]:
    """Return the nodes of each job if a solution runs jobs on these numbers of GPUs."""
    problem = state_freely(snapshot, Policy()).problem
    choice = np.array([column_on(problem, j, n) if n else -1 for j, n in enumerate(gpus)])
    objective = int(problem.value[choice[choice >= 0]].sum())
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=choice, objective=objective, bound=1e18, solver="test"
    )
    result = place(snapshot, problem, solution, deadline_expired=never_cancelled, chosen_only=True)
    return {
        snapshot.jobs.name[job]: {node for node, _ in gang.members}
        for job, gang in result.placement.gangs.items()
    }


@pytest.mark.parametrize(("lasts_s", "nodes"), [(100.0, set()), (101.0, {0})])
def test_a_node_is_closed_to_a_job_that_lasts_into_the_start_of_all_its_gpus(
    lasts_s: float, nodes: set[int]
) -> None:
    snapshot = with_starts(a_round(a_waiting_job("a", lasts_s)), a_start(1, 0, 4, NOW_S + 100))
    assert closed_nodes(make_board(snapshot), 0) == nodes


def test_a_node_is_open_to_a_job_on_gpus_that_the_start_leaves() -> None:
    snapshot = a_round(a_waiting_job("a", 9e6))
    snapshot = with_starts(snapshot, a_start(1, 0, 2, NOW_S + 100))
    board = make_board(snapshot)
    assert closed_nodes(board, 0) == set()
    assert closed_nodes(board, 0, gpus=4) == {0}


def test_seated_jobs_count_for_as_long_as_they_last() -> None:
    """The start takes two GPUs of node 0. ``b`` has the others until it ends."""
    jobs = [a_waiting_job("a", 9e6), a_waiting_job("b", 99.0), a_waiting_job("c", 9e6)]
    snapshot = with_starts(a_round(*jobs), a_start(3, 0, 2, NOW_S + 100))
    board = make_board(snapshot)
    board.put(1, column_on(board.problem, 1, 2), ((0, 0b0011),))
    assert closed_nodes(board, 0) == set()
    board.lift(1)
    board.put(2, column_on(board.problem, 2, 2), ((0, 0b0011),))
    assert closed_nodes(board, 0) == {0}


def test_a_seated_job_that_yields_counts_for_the_part_that_it_keeps() -> None:
    running = a_job("old", state=JobState.RUNNING, cell=(0, 4, 1), requested_gpus=2)
    gangs = {0: Gang(members=((0, (0, 1, 2, 3)),))}
    snapshot = a_round(running, a_waiting_job("a", 9e6), gangs=gangs)
    snapshot = with_starts(snapshot, a_start(2, 0, 2, NOW_S + 100))
    board = make_board(snapshot)
    board.put(0, column_on(board.problem, 0, 4), ((0, 0b1111),))
    assert closed_nodes(board, 1) == {0}
    row = {"job": 0, "node": 0, "from_s": NOW_S + 50, "kept": 0}
    board = make_board(replace(snapshot, expected_releases=ExpectedReleases.from_rows([row])))
    board.put(0, column_on(board.problem, 0, 4), ((0, 0b1111),))
    assert closed_nodes(board, 1) == set()


def test_the_start_of_a_job_that_has_a_seat_needs_no_room() -> None:
    snapshot = with_starts(a_round(a_waiting_job("a", 9e6)), a_start(1, 0, 4, NOW_S + 100))
    board = make_board(snapshot)
    board.put(1, column_on(board.problem, 1, 4), ((1, 0b1111),))
    assert closed_nodes(board, 0) == set()


def test_the_nodes_of_its_own_start_are_open_to_a_job() -> None:
    snapshot = with_starts(a_round(a_waiting_job("a", 9e6)), a_start(1, 0, 4, NOW_S + 100))
    assert closed_nodes(make_board(snapshot), 1, gpus=4) == set()


def test_starts_that_are_due_close_their_nodes_only_if_jobs_are_placed_by_the_plan() -> None:
    snapshot = with_starts(a_round(a_waiting_job("a", 9e6)), a_start(1, 0, 4, NOW_S))
    assert closed_nodes(make_board(snapshot), 0) == set()
    assert closed_nodes(make_board(snapshot, by_plan=True), 0) == {0}


def test_two_starts_on_a_node_count_together_while_they_overlap() -> None:
    """At 1150, the second start joins the first one. Both take three of four GPUs."""
    jobs = [a_waiting_job("a", 151.0), a_waiting_job("b", 149.0), a_waiting_job("c", 1.0)]
    starts = a_start(2, 0, 2, NOW_S + 100), a_start(3, 0, 1, NOW_S + 150)
    board = make_board(with_starts(a_round(*jobs), *starts))
    assert (closed_nodes(board, 0), closed_nodes(board, 1)) == ({0}, set())


def test_a_long_job_is_placed_next_to_a_planned_start_and_a_short_one_on_its_node() -> None:
    snapshot = a_round(a_waiting_job("long", 9e6), a_waiting_job("short", 50.0, gpus=4))
    snapshot = with_starts(snapshot, a_start(2, 0, 4, NOW_S + 100))
    assert place_jobs(snapshot, [2, 0, 0]) == {"long": {1}}
    assert place_jobs(snapshot, [2, 4, 0]) == {"long": {1}, "short": {0}}


def test_a_job_that_fits_only_where_it_would_delay_a_start_waits() -> None:
    snapshot = a_round(a_waiting_job("long", 9e6), nodes=1)
    assert place_jobs(snapshot, [2, 0]) == {"long": {0}}
    snapshot = with_starts(snapshot, a_start(1, 0, 4, NOW_S + 100))
    assert place_jobs(snapshot, [2, 0]) == {}


def gpus_on_nodes(result: PlacementResult) -> dict[int, dict[int, int]]:
    """Return the GPUs of each job on each of its nodes."""
    return {
        job: {node: len(gpus) for node, gpus in gang.members}
        for job, gang in result.placement.gangs.items()
    }


def test_a_promise_without_a_planned_start_comes_before_those_with_one() -> None:
    """``new`` must run, for example for its deadline, and needs all of a node.

    To make room, ``old`` has to move to node 1, where ``wide`` is planned to start when ``short`` ends.
    """
    runs: dict[str, Any] = {"state": JobState.RUNNING, "cell": (0, 1, 1), "requested_gpus": 1}
    jobs = [a_job("old", **runs, iterations_left=1e6), a_job("short", **runs, iterations_left=50)]
    jobs += [a_waiting_job("new", 9e6, gpus=4)]
    snapshot = a_round(*jobs, gangs={k: Gang(members=((k, (0,)),)) for k in (0, 1)})
    snapshot = with_starts(snapshot, a_start(3, 1, 4, NOW_S + 50))
    problem = state_freely(snapshot, Policy()).problem
    problem = replace(problem, must_run=np.array([True, True, True, False]))
    choice = np.array([column_on(problem, j, n) for j, n in enumerate([1, 1, 4])] + [-1])
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=choice, objective=1, bound=1e18, solver="test"
    )
    result = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    gpus = gpus_on_nodes(result)
    assert gpus.keys() == {0, 1, 2}
    assert gpus[2] in ({0: 4}, {1: 4})


def test_starts_that_are_due_take_their_nodes_where_the_best_fit_leaves_one_without() -> None:
    """Where ``wide`` takes a whole node of four and half of the other, ``small`` finds no GPU.

    ``large`` is planned on node 0 and ``next`` on node 1 once ``wide`` has ended, three GPUs each.
    """
    cells = [
        *CELLS,
        *(an_estimate(gpus=n, nodes=k, iter_time_s=1 / n) for n, k in ((3, 1), (6, 2))),
    ]
    jobs = [a_job("old", state=JobState.RUNNING, cell=(0, 1, 1), iterations_left=1e6)]
    jobs += [
        a_job(name, requested_gpus=gpus, iterations_left=iterations)
        for name, gpus, iterations in (
            ("wide", 6, 100.0),
            ("small", 1, 1e6),
            ("large", 3, 1e6),
            ("next", 3, 1e6),
        )
    ]
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4)),
        jobs=jobs,
        estimates=cells,
        gangs={0: Gang(members=((1, (0,)),))},
    )
    starts = [a_start(1, 0, 6, NOW_S), a_start(2, 0, 1, NOW_S, 1e6)]
    starts += [a_start(3, 0, 3, NOW_S + 100), a_start(4, 1, 3, NOW_S + 100)]
    snapshot = with_starts(snapshot, *starts)
    shares = [(0, 0, 3), (0, 1, 3), (1, 0, 1), (2, 0, 3), (3, 1, 3)]
    rows = [{"start": start, "node": node, "gpus": gpus} for start, node, gpus in shares]
    snapshot = replace(snapshot, planned_nodes=PlannedNodes.from_rows(rows))
    problem = state_freely(snapshot, Policy()).problem
    problem = replace(problem, must_run=np.array([True, True, True, False, False]))
    choice = np.array(
        [column_on(problem, j, n) if n else -1 for j, n in enumerate([1, 6, 1, 0, 0])]
    )
    solution = Solution(
        status=SolveStatus.FEASIBLE, choice=choice, objective=1, bound=1e18, solver="test"
    )
    result = place(snapshot, problem, solution, deadline_expired=never_cancelled)
    assert gpus_on_nodes(result) == {0: {1: 1}, 1: {0: 3, 1: 3}, 2: {0: 1}}


def test_a_start_that_is_due_delays_others_only_with_more_gpus_than_were_planned() -> None:
    jobs = [a_waiting_job("due", 9e6), a_waiting_job("next", 9e6)]
    snapshot = with_starts(
        a_round(*jobs), a_start(0, 0, 2, NOW_S, 9e6), a_start(1, 0, 2, NOW_S + 100)
    )
    board = make_board(snapshot, by_plan=True)
    assert closed_nodes(board, 0, gpus=2) == set()
    assert closed_nodes(board, 0, gpus=4) == {0}
