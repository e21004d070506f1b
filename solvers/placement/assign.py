"""Placement of a solution: big gangs first, each where it fits best.

It also decides what to do if no blocks are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tessera.formulation.placement import Gang, Placement
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.solvers.placement.board import Board
from tessera.solvers.placement.promises import displace_jobs, fall_back
from tessera.solvers.placement.results import PlacementResult, describe_shortage, make_result
from tessera.solvers.placement.search import TrialEffort, best_change

MAX_TRIALS: Final = 500
"""Sets of moves tried in a round: a tenth of a second. The periodic pass may try more."""


def place(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    *,
    deadline_expired: Callable[[], bool],
    now: Mapping[int, Gang] | None = None,
    chosen_only: bool = False,
) -> PlacementResult:
    """Give each chosen job its GPUs.

    If its Cell finds no place, a job gets its next best Cell or waits. ``now`` is the result of
    ``current_gangs``, if that is known already. With ``chosen_only``, no job gets another Cell.
    Once ``deadline_expired``, no more moves are searched, but all jobs are still placed. A must-run
    job is left without GPUs only if no way is found; the checker then refuses the round.
    """
    if not solution.has_answer:
        return PlacementResult(solution=solution, placement=Placement())
    chosen = np.flatnonzero(solution.choice >= 0)
    wanted = dict(zip(chosen.tolist(), solution.choice[chosen].tolist(), strict=True))
    board = Board(snapshot, problem, now, only=wanted if chosen_only else None)
    failed = _place_directly(board, board.keep_all(wanted), wanted)
    effort = TrialEffort(deadline_expired, MAX_TRIALS)
    return make_result(board, solution, wanted, _settle(board, failed, wanted, effort))


def _place_directly(board: Board, pending: list[int], wanted: dict[int, int]) -> list[int]:
    """Seat jobs at their Cells' shapes, big gangs first; return those that do not fit."""

    def order(job: int) -> tuple[int, bool, int, int]:
        column = wanted[job]
        return (-board.gpus[column], not board.must_run[job], -board.value[column], job)

    failed = []
    for job in sorted(pending, key=order):
        column = wanted[job]
        # The job may not move, but its present nodes lack something now.
        stays = board.pinned(job, column)
        spots = None if stays else board.find(job, column, board.nodes[column])
        if spots is None:
            failed.append(job)
        else:
            board.put(job, column, spots)
    return failed


def _settle(
    board: Board, failed: list[int], wanted: dict[int, int], effort: TrialEffort
) -> dict[int, str]:
    """Give each job that did not fit its most valuable alternative. Return why each did not fit.

    Must-run jobs come first, then the others by value. A job takes nothing that later jobs were
    chosen to have, unless it must run. Jobs that lose their GPUs to a must-run job return to the
    queue.
    """

    def order(job: int) -> tuple[bool, int, int]:
        return (not board.must_run[job], -board.value[wanted[job]], job)

    reasons: dict[int, str] = {}
    queue = sorted(failed, key=order)
    while queue:
        job = queue.pop(0)
        promised = board.must_run[job]
        reasons.setdefault(job, describe_shortage(board, wanted[job]))
        board.keep_back([] if promised else [wanted[other] for other in queue])
        columns = board.columns_of(job)
        change = best_change(board, job, columns, wanted[job], effort, required=promised)
        if change is None and promised:
            change = displace_jobs(board, job) or fall_back(board, job, wanted)
        if change is None:
            continue
        for other, seat in change.seats.items():
            if seat is not None and seat[0] != wanted[other]:
                reasons.setdefault(
                    other, f"{board.problem.jobs[job]}, which must run, needs its GPUs"
                )
        board.reseat(change.seats)
        bumped = {other for other, seat in change.seats.items() if seat is None}
        queue = sorted(bumped.union(queue), key=order)
    board.keep_back([])
    return reasons
