"""Room for jobs that must run: others lose their GPUs, least value first, before a promise is broken."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.placement.board import Board, Seat
from solvers.placement.search import (
    Aim,
    Change,
    attempt,
    displacing_cost,
    reseat_victim,
    seat,
    sitters,
    victim_order,
    victim_sets,
)


def displace(board: Board, job: int) -> Change | None:
    """Return the change that seats the must-run ``job`` at the least loss of other jobs' value.

    Jobs that are not promised may be left waiting. The sets of victims that are tried are the cheap ones
    of each column and, if none of these will do, all such jobs at once.
    """
    best: Change | None = None
    for column in sorted(board.problem.columns_of(job), key=lambda c: (-board.value[c], c)):
        if best is not None and best.gain >= board.value[column]:
            break
        for aim, victims in _takings(board, job, column):
            change = attempt(board, aim, victims)
            if change is not None and (best is None or change.gain > best.gain):
                best = change
    if best is not None:
        return best
    everyone = tuple(sorted(other for other in board.seats if not board.must_run[other]))
    for aligned in (True, False):
        for column in sorted(board.problem.columns_of(job), key=lambda c: (-board.value[c], c)):
            aim = Aim(job, column, board.gpus[column], aligned=aligned, displacing=True)
            change = attempt(board, aim, everyone)
            if change is not None:
                return change
    return None


def _takings(board: Board, job: int, column: int) -> Iterator[tuple[Aim, tuple[int, ...]]]:
    most = board.gpus[column]
    if column == board.current[job]:
        yield Aim(job, column, most, displacing=True, in_place=True), sitters(board, job)
    cost = displacing_cost(board, job, column)
    for victims in victim_sets(board, column, most, cost):
        yield Aim(job, column, most, displacing=True), victims


def fall_back(board: Board, job: int, wanted: dict[int, int]) -> Change | None:
    """Return the change in which every promised job that can stay as it is does, and ``job`` runs.

    The last resort: those promised jobs own disjoint GPUs already, so only jobs that lost theirs need
    room; all others are seated in what is left, or wait.
    """
    promised = [other for other in sorted(wanted) if board.must_run[other]]
    before: dict[int, Seat | None] = {
        other: board.seats.get(other) for other in sorted({job, *promised, *board.seats})
    }
    for other in before:
        board.lift(other)
    homeless = [other for other in promised if not _stays(board, other)]
    homeless.sort(key=lambda other: (-board.gpus[wanted[other]], other))
    change = None
    if all(_seated_somehow(board, other) for other in homeless):
        rest = [other for other in before if not board.must_run[other]]
        for other in sorted(rest, key=lambda o: victim_order(board, o, before[o])):
            reseat_victim(board, other, before[other], displacing=True)
        after = {other: board.seats.get(other) for other in before}
        change = Change(0.0, after)
    board.reseat(before)
    return change


def _stays(board: Board, job: int) -> bool:
    column = board.current[job]
    return column >= 0 and board.affords(column) and board.keep(job, column)


def _seated_somehow(board: Board, job: int) -> bool:
    columns = sorted(board.problem.columns_of(job), key=lambda c: (-board.value[c], c))
    return any(
        seat(board, Aim(job, column, board.gpus[column], aligned=aligned))
        for aligned in (True, False)
        for column in columns
    )
