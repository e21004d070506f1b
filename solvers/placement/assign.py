"""Placement of a solution: big gangs first, each where it fits best.

It also decides what to do if no blocks are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from tessera.formulation.answer.check import score_solution
from tessera.formulation.answer.placement import Gang, Placement
from tessera.formulation.answer.solution import Solution
from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.texts import Text
from tessera.formulation.round.problem import Problem
from tessera.formulation.state.last_round import NO_PLANNED_NODES, NO_PLANNED_STARTS
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.placement.board import Board
from tessera.solvers.placement.promises import displace_jobs, fall_back
from tessera.solvers.placement.results import (
    PlacementResult,
    describe_shortage,
    explain_change,
    make_result,
)
from tessera.solvers.placement.search import TrialEffort, best_change

START_TRIALS: Final = 100
"""Trials that it counts as to look for GPUs of others for a job that only starts."""
MAX_TRIALS: Final = 500
"""Sets of moves tried in a round: a tenth of a second. The periodic pass may try more."""

PackedShares: TypeAlias = tuple[tuple[int, int], ...]
"""The nodes that a gang is to have, and the number of its GPUs on each."""


def place(
    snapshot: Snapshot,
    problem: Problem,
    solution: Solution,
    *,
    deadline_expired: Callable[[], bool],
    now: Mapping[int, Gang] | None = None,
    chosen_only: bool = False,
    packed: Mapping[int, PackedShares] = MappingProxyType({}),
) -> PlacementResult:
    """Give each chosen job its GPUs.

    If its Cell finds no place, a job gets its next best Cell or waits. An alternative, which is a
    narrower shape or another degree on as many GPUs, is taken where it is worth more than moving
    other jobs. The result is never worth less than without alternatives.

    ``packed`` has the nodes that jobs are to have, if their GPUs there can be had in blocks; such a
    job does not stay where it is. All others are placed after them.

    ``now`` is the result of ``current_gangs``, if that is known already. With ``chosen_only``, no
    job gets another Cell. Once ``deadline_expired``, no more moves are searched, but all jobs are
    still placed. A must-run job is left without GPUs only if no way is found; the checker then
    refuses the round.
    """
    if not solution.has_answer:
        return PlacementResult(solution=solution, placement=Placement())
    chosen = np.flatnonzero(solution.choice >= 0)
    wanted = dict(zip(chosen.tolist(), solution.choice[chosen].tolist(), strict=True))
    only = wanted if chosen_only else None
    board = Board(snapshot, problem, now, only)
    results = [_place(board, solution, wanted, deadline_expired, packed)]
    if board.took_alternative:
        plain = Board(snapshot, problem, board.gangs, only, fastest_only=True)
        results.append(_place(plain, solution, wanted, deadline_expired, packed))
    starts = snapshot.planned_starts
    stays_out = problem.must_run & (results[0].solution.choice < 0)
    if stays_out.any() and len(starts):
        due_board = Board(snapshot, problem, board.gangs, only, by_plan=True)
        slots = {**packed, **_planned_shares(due_board, wanted)}
        results.append(_place(due_board, solution, wanted, deadline_expired, slots))
        stays_out &= results[-1].solution.choice < 0
        stays_out[starts.job] = False
        if stays_out.any():
            # Promises of other kinds come before planned starts.
            free = replace(
                snapshot, planned_starts=NO_PLANNED_STARTS, planned_nodes=NO_PLANNED_NODES
            )
            free_board = Board(free, problem, board.gangs, only)
            results.append(_place(free_board, solution, wanted, deadline_expired, packed))
    return max(results, key=lambda one: _worth(problem, one))  # of equals, the first


def _planned_shares(board: Board, columns: dict[int, int]) -> dict[int, PackedShares]:
    """Return the nodes of the starts that are due, of jobs that are to have as many GPUs as planned."""
    snapshot = board.snapshot
    starts, shares = snapshot.planned_starts, snapshot.planned_nodes.by_start()
    due = np.flatnonzero(starts.start_s <= snapshot.now_s + SAME_S).tolist()
    return {
        job: tuple(shares[start])
        for start, job in zip(due, starts.job[due].tolist(), strict=True)
        if job in columns
        and job not in board.present
        and board.gpus[columns[job]] == sum(gpus for _, gpus in shares[start])
    }


def _worth(problem: Problem, result: PlacementResult) -> tuple[int, float]:
    """Return a sort key: the promised jobs that run, then the value of all."""
    runs = int(np.count_nonzero(problem.must_run & (result.solution.choice >= 0)))
    return runs, score_solution(problem, result.solution, result.placement)


def _place(
    board: Board,
    solution: Solution,
    wanted: dict[int, int],
    deadline_expired: Callable[[], bool],
    packed: Mapping[int, PackedShares],
) -> PlacementResult:
    stays = {job: column for job, column in wanted.items() if job not in packed}
    pending = board.keep_all(stays)
    for job in sorted(packed, key=lambda job: (-board.gpus[wanted[job]], job)):
        if not board.put_on(job, wanted[job], packed[job]):
            pending.append(job)
    failed = _place_directly(board, pending, wanted)
    effort = TrialEffort(deadline_expired, MAX_TRIALS)
    return make_result(board, solution, wanted, _settle(board, failed, wanted, effort))


def _place_directly(board: Board, pending: list[int], wanted: dict[int, int]) -> list[int]:
    """Seat jobs at their columns' shapes; return those that do not fit.

    Jobs that may run only on some nodes come before the others, and big gangs before small ones.
    Jobs that only change their plan keep their GPUs. Those that change their shape come next. They
    keep their GPUs if there is no better place, and are then among those returned, too.
    """

    def order(job: int) -> tuple[bool, bool, int, bool, int, int]:
        column = wanted[job]
        return (
            not board.has_gpus_of(job, column),
            not board.avoided(job, column),
            -board.gpus[column],
            not board.must_run[job],
            -board.value[column],
            job,
        )

    failed = []
    # Replans first, before other jobs take their GPUs.
    replanned = {job for job in pending if board.is_replan(job, wanted[job])}
    replanned = {job for job in sorted(replanned) if board.keep(job, wanted[job])}
    for job in sorted(replanned.symmetric_difference(pending), key=order):
        column = wanted[job]
        # The job may not move, but its present nodes lack something now.
        stays = board.pinned(job, column)
        spots = None if stays else board.find(job, column, board.nodes[column])
        if spots is not None:
            board.put(job, column, spots)
            continue
        failed.append(job)
        present = board.current[job]
        if board.has_gpus_of(job, column) and present in board.columns_of(job):
            board.keep(job, present)
    return failed


def _settle(
    board: Board, failed: list[int], wanted: dict[int, int], effort: TrialEffort
) -> dict[int, Text]:
    """Give each job that did not fit its most valuable alternative. Return why each did not fit.

    Must-run jobs come first, then the others by value, and at last those that kept their GPUs. A
    job takes nothing that later jobs were chosen to have, unless it must run. Jobs that lose their
    GPUs to a must-run job return to the queue.
    """

    def order(job: int) -> tuple[bool, bool, int, int]:
        return (job in board.seats, not board.must_run[job], -board.value[wanted[job]], job)

    reasons: dict[int, Text] = {}
    queue = sorted(failed, key=order)
    while queue:
        job = queue.pop(0)
        promised = board.must_run[job] and job not in board.seats
        reasons.setdefault(job, describe_shortage(board, wanted[job]))
        later = [wanted[other] for other in queue if other not in board.seats]
        board.rows.keep_back([] if promised else later)
        columns = board.columns_of(job)
        change = best_change(board, job, columns, wanted[job], effort, required=promised)
        if change is None and promised:
            if job in board.present:
                change = displace_jobs(board, job) or fall_back(board, job, wanted)
            elif board.displaces_for_starts and effort.spend(START_TRIALS):
                change = displace_jobs(board, job)
                if change is None and board.snapshot.jobs.admitted[job]:
                    change = fall_back(board, job, wanted)
        if change is None:
            continue
        explain_change(board, change, job, wanted, reasons)
        board.reseat(change.seats)
        bumped = {other for other, seat in change.seats.items() if seat is None}
        queue = sorted(bumped.union(queue), key=order)
    board.rows.keep_back([])
    for job in _give_back(board, wanted):
        reasons.setdefault(job, describe_shortage(board, wanted[job]))
    return reasons


def _give_back(board: Board, columns: dict[int, int]) -> list[int]:
    """Take seats away that only starts which found no GPUs had made room for. Return whose they were.

    A planned start that found none counts against its rows again. Others then may have taken too much.
    """
    losers = []
    while any(board.rows.overdraft()):
        optional = [
            job
            for job, (column, _) in board.seats.items()
            if job not in board.present and not board.must_run[job] and board.rows.overdraws(column)
        ]
        if not optional:
            break
        job = min(optional, key=lambda job: (board.value[columns[job]], job))
        board.lift(job)
        losers.append(job)
    return losers
