"""Jobs of the least value on the GPUs that all other jobs leave idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.formulation.answer.placement import Gang
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement.board import Board, spots_of
from tessera.solvers.placement.results import PlacementResult, make_result


def seat_leftover(
    snapshot: Snapshot,
    problem: Problem,
    placed: PlacementResult,
    jobs: Sequence[int],
    *,
    now: Mapping[int, Gang],
) -> PlacementResult:
    """Return ``placed`` with those of ``jobs`` that fit on the GPUs it leaves idle.

    The other jobs keep the columns and GPUs that ``placed`` gives them. Of ``jobs``, none of which
    it has seated, those that can stay where they are come first. The others follow in their order.
    A job that runs keeps its Cell; any other gets its first. ``now`` is the result of
    ``current_gangs``.
    """
    columns = {job: _column_of(problem, job) for job in jobs}
    wanted = {job: column for job, column in columns.items() if column >= 0}
    if not wanted:
        return placed
    board, choice = Board(snapshot, problem, now), placed.solution.choice.tolist()
    for job, gang in placed.placement.gangs.items():
        board.put(job, choice[job], spots_of(gang))
    for job, column in wanted.items():
        if board.rows.affords(column):
            board.keep(job, column)
    for job, column in wanted.items():
        if job in board.seats or not board.rows.affords(column):
            continue
        spots = board.find(job, column, board.nodes[column])
        if spots is not None:
            board.put(job, column, spots)
    first = {job: column for job, column in enumerate(choice) if column >= 0} | placed.wanted
    return make_result(board, placed.solution, first, dict(placed.unplaced))


def _column_of(problem: Problem, job: int) -> int:
    """Return the column that the job runs on now, else its first one, or -1 if it has none."""
    first, end = problem.job_start[job : job + 2].tolist()
    current = int(problem.current[job])
    return current if current >= 0 else (first if first < end else -1)
