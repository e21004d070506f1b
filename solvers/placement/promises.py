"""Room for jobs that must run.

Other jobs lose their GPUs, those of least value first, before a promise is broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tessera.solvers.placement.board import Board, Seat
from tessera.solvers.placement.search import (
    Aim,
    SeatChange,
    displacing_cost,
    find_sitters,
    is_within,
    reseat_victim,
    seat_job,
    try_change,
    victim_order,
    victim_sets,
)


def displace_jobs(board: Board, job: int) -> SeatChange | None:
    """Return the change that seats the must-run ``job`` at the least loss of other jobs' value.

    Jobs without a promise may be left waiting. The search tries the cheap sets of victims of each
    column. If none of these works, it tries all such jobs together. Return None if that fails, too.
    """
    best: SeatChange | None = None
    for column in sorted(board.columns_of(job), key=lambda c: (-board.value[c], c)):
        if best is not None and best.gain >= board.value[column]:
            break
        for aim, victims in _takings(board, job, column):
            change = try_change(board, aim, victims)
            if change is not None and (best is None or change.gain > best.gain):
                best = change
    if best is not None:
        return best
    everyone = tuple(sorted(other for other in board.seats if not board.must_run[other]))
    for aligned in (True, False):
        for column in sorted(board.columns_of(job), key=lambda c: (-board.value[c], c)):
            aim = Aim(job, column, board.gpus[column], aligned=aligned, displacing=True)
            change = try_change(board, aim, everyone)
            if change is not None:
                return change
    return None


def _takings(board: Board, job: int, column: int) -> Iterator[tuple[Aim, tuple[int, ...]]]:
    most = board.gpus[column]
    if column == board.current[job]:
        yield (
            Aim(job, column, most, displacing=True, in_place=True),
            find_sitters(board, job, column),
        )
    cost = displacing_cost(board, job, column)
    for victims in victim_sets(board, column, most, cost):
        yield Aim(job, column, most, displacing=True), victims


def fall_back(board: Board, job: int, wanted: dict[int, int]) -> SeatChange | None:
    """Return the change in which all promised jobs run and are seated first, or None.

    This is the last resort. First, each promised job that can stays as it is. Such jobs own
    disjoint GPUs, so only those that lost theirs need room. If that fails, only pinned jobs stay.
    If that fails, too, the same is tried with the smallest Cells of each job. All other jobs are
    seated in what is left, or wait. If not all promised jobs fit, launched jobs are still seated
    before those that only start.
    """
    promised = [other for other in sorted(wanted) if board.must_run[other]]
    launched = [other for other in promised if other in board.present]
    before: dict[int, Seat | None] = {
        other: board.seats.get(other) for other in sorted({job, *promised, *board.seats})
    }
    limits = board.rows.overdraft()
    change = None
    groups = [promised, launched] if job in board.present and launched != promised else [promised]
    for first, smallest, pinned_only in itertools.product(groups, (False, True), (False, True)):
        for other in before:
            board.lift(other)
        if _all_seated(board, first, wanted, smallest=smallest, pinned_only=pinned_only):
            rest = before.keys() - set(first)
            for other in sorted(rest, key=lambda o: victim_order(board, o, before[o])):
                reseat_victim(board, other, before[other], displacing=True)
            if is_within(board, limits):
                change = SeatChange(0.0, {other: board.seats.get(other) for other in before})
                break
    board.reseat(before)
    return change


def _all_seated(
    board: Board, promised: list[int], wanted: dict[int, int], *, smallest: bool, pinned_only: bool
) -> bool:
    homeless = [
        job
        for job in promised
        if not (_has_place(board, job) and not (pinned_only and board.movable[job]))
        or not board.keep(job, board.current[job])
    ]
    homeless.sort(key=lambda job: (-board.gpus[wanted[job]], job))
    return all(_seated_somehow(board, job, smallest=smallest) for job in homeless)


def _has_place(board: Board, job: int) -> bool:
    column = board.current[job]
    return column >= 0 and board.rows.affords(column)


def _seated_somehow(board: Board, job: int, *, smallest: bool) -> bool:
    def order(column: int) -> tuple[int, int, int]:
        return (board.gpus[column] if smallest else 0, -board.value[column], column)

    columns = sorted(board.columns_of(job), key=order)
    return any(
        seat_job(board, Aim(job, column, board.gpus[column], aligned=aligned))
        for aligned in (True, False)
        for column in columns
    )
