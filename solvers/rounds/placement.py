"""The step from a solution to GPUs: the solver's or greedy's, whichever has more value when placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np

from tessera.formulation.answer.check import score_solution
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem, RowKind
from tessera.formulation.round.statement import Statement
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.goals import SolvedGoals
from tessera.solvers.placement import PackedShares, PlacementResult, defragment, place
from tessera.solvers.rounds.promises import had_promise, witness_of
from tessera.solvers.rounds.work import RoundWork

NO_ROUND: Final = 2**63 - 1
"""Number of a round that is never reached."""


def place_answers(
    work: RoundWork,
    solved: SolvedGoals,
    packed: Mapping[int, PackedShares] = MappingProxyType({}),
) -> tuple[RoundWork, PlacementResult]:
    """Return the better of the solver's and greedy's placed solutions, and the round it solves.

    ``packed`` has the nodes that jobs of the solver's solution are to have.

    If a launched or admitted job finds no blocks under a cap on changes, the cap is doubled until
    it does, since promises take precedence (35). If no cap helps, the cap stays.
    """
    best: tuple[int, RoundWork, PlacementResult] | None = None
    for stated in map(work.restated, _with_rising_cap(work.statement)):
        work.budget.check()
        placed = defragment_placement(stated, stated.surrogate, _better(stated, solved, packed))
        broken = _promises_broken(work.snapshot, stated.surrogate, placed)
        if best is None or broken < best[0]:
            best = broken, stated, placed
        if not broken:
            break
    if best is None:
        raise AssertionError("the statement itself comes first")
    return best[1], best[2]


def defragment_placement(
    work: RoundWork, problem: Problem, placed: PlacementResult, *, chosen_only: bool = False
) -> PlacementResult:
    """Return ``placed``, which solves ``problem``; in rounds that defragment, after that pass."""
    every = work.policy.defragment_every_rounds
    if not every or work.snapshot.round_number % every:
        return placed
    return defragment(
        work.snapshot,
        problem,
        placed,
        deadline_expired=work.budget.cancelled,
        now=work.gangs,
        chosen_only=chosen_only,
    )


def next_defragmentation(snapshot: Snapshot, policy: Policy) -> int:
    """Return the number of the next round that looks for fragmentation."""
    every = policy.defragment_every_rounds
    return (snapshot.round_number // every + 1) * every if every else NO_ROUND


def _with_rising_cap(statement: Statement) -> Iterator[Statement]:
    """Yield the statement, then the same with a doubled cap, until all jobs could change."""
    yield statement
    problem = statement.problem
    kinds = [row.kind for row in problem.rows]
    if RowKind.CHANGES not in kinds:
        return
    at = kinds.index(RowKind.CHANGES)
    most, cap = int(np.count_nonzero(problem.current >= 0)), problem.rows[at].capacity
    while cap < most:
        cap = min(most, max(1, 2 * cap))
        rows = list(problem.rows)
        rows[at] = replace(rows[at], capacity=cap)
        yield replace(statement, problem=replace(problem, rows=tuple(rows)))


def _promises_broken(snapshot: Snapshot, problem: Problem, placed: PlacementResult) -> int:
    promised = problem.must_run & had_promise(snapshot)
    return int(np.count_nonzero(promised & (placed.solution.choice < 0)))


def _better(
    work: RoundWork, solved: SolvedGoals, packed: Mapping[int, PackedShares]
) -> PlacementResult:
    """Return the solver's solution placed, or greedy's if that has more value once placed.

    With several goals, choices are compared by these; the score decides between equals. If a job that
    must run finds no GPUs, the answer that the rules know is tried, for which starts were planned.
    """
    problem, solution, greedy = work.surrogate, solved.on(work.surrogate), work.greedy
    standing = partial(solved.standing, work.statement)
    place_one = partial(
        place, work.snapshot, problem, deadline_expired=work.budget.cancelled, now=work.gangs
    )

    def value(placed: PlacementResult) -> tuple[float, ...]:
        placed_score = score_solution(problem, placed.solution, placed.placement)
        return *standing(placed.solution.choice), placed_score

    placed = place_one(solution, packed=packed)
    *stands, placed_score = value(placed)
    if (*stands, placed_score * problem.scale) < (*standing(greedy.choice), greedy.objective):
        placed = max((placed, place_one(greedy)), key=value)  # among equal scores, the solver's
    sure = witness_of(work.statement, problem)
    if sure is None or not _count_losers(problem, placed):
        return placed
    return min((placed, place_one(sure)), key=partial(_count_losers, problem))


def _count_losers(problem: Problem, result: PlacementResult) -> int:
    """Return how many jobs that must run found no GPUs."""
    return int(np.count_nonzero(problem.must_run & (result.solution.choice < 0)))
