"""The periodic pass: moves within Cells that gain more than the restarts that they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tessera.formulation.answer.placement import Gang
from tessera.formulation.base.texts import Text
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement.board import Board, spots_of
from tessera.solvers.placement.results import PlacementResult, explain_change, make_result
from tessera.solvers.placement.search import TrialEffort, best_change

MAX_TRIALS: Final = 5000
"""Sets of moves tried in a pass, about a second."""

MAX_SWEEPS: Final = 3
"""Sweeps over the jobs in a pass. Several are useful, since a move may make room for another."""


def _never() -> bool:
    return False


def defragment(
    snapshot: Snapshot,
    problem: Problem,
    placed: PlacementResult,
    *,
    deadline_expired: Callable[[], bool] = _never,
    now: Mapping[int, Gang] | None = None,
    chosen_only: bool = False,
) -> PlacementResult:
    """Repair what fragmentation cost: jobs on worse shapes, and jobs whose Cell found no place.

    Each of these jobs gets a better seat, directly or by moving others within their Cells. This
    happens only if it gains more than the migration costs of all jobs that move. The score never
    falls. Pinned jobs stay. ``now`` is the result of ``current_gangs``, if that is known already.
    With ``chosen_only``, no job gets a Cell that was not chosen for it.
    """
    if not placed.wanted and not placed.degraded:
        return placed  # nothing was lost
    choice = placed.solution.choice.tolist()
    wanted = {job: column for job, column in enumerate(choice) if column >= 0} | placed.wanted
    board = Board(snapshot, problem, now, only=wanted if chosen_only else None)
    for job, gang in placed.placement.gangs.items():
        board.put(job, choice[job], spots_of(gang))
    effort = TrialEffort(deadline_expired, MAX_TRIALS)
    reasons = dict(placed.unplaced)
    for _ in range(MAX_SWEEPS):
        if not _sweep(board, wanted, effort, reasons) or effort.over:
            break
    return make_result(board, placed.solution, wanted, reasons)


def _sweep(
    board: Board, wanted: dict[int, int], effort: TrialEffort, reasons: dict[int, Text]
) -> bool:
    """Try once to improve each job that lost to fragmentation, the greatest loss first.

    Return whether a job gained. ``reasons`` receives why jobs do not have the columns ``wanted``.
    """

    def loss(job: int) -> float:
        return board.value[wanted[job]] - board.worth(job)

    denied = {job for job, column in wanted.items() if board.seats.get(job, (-1, ()))[0] != column}
    gained = False
    for job in sorted(denied | board.degraded(), key=lambda job: (-loss(job), job)):
        seat = board.seats.get(job)
        if seat is not None and seat[0] == wanted[job]:
            columns: Sequence[int] = range(seat[0], seat[0] + 1)
        else:
            columns = board.columns_of(job)
        change = best_change(board, job, columns, wanted[job], effort)
        if change is not None:
            explain_change(board, change, job, wanted, reasons)
            board.reseat(change.seats)
            gained = True
        if effort.over:
            break
    return gained
