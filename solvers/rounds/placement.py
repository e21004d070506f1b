"""From an answer to GPUs: the solver's or greedy's, whichever is worth more once placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from tessera.formulation.check import score
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import CHANGES_ROW, Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.formulation.statement import Statement
from tessera.formulation.tables import Ints
from tessera.solvers.base import Budget
from tessera.solvers.goals import Solved, surrogate
from tessera.solvers.placement import Placed, defragment, place
from tessera.solvers.rounds.promises import promised_before

NEVER: Final = 2**63 - 1
"""Number of a round that is never reached."""


def place_answers(
    snapshot: Snapshot, policy: Policy, statement: Statement, solved: Solved, greedy: Solution,
    budget: Budget, now: Mapping[int, Gang],
) -> tuple[Statement, Placed]:  # fmt: skip
    """Return the better of two answers placed, and the statement that it answers.

    ``now`` is ``current_gangs``.
    Where a launched or admitted job finds no blocks under a cap on changes, the cap is doubled until it
    does: promises go before it (35). If no cap helps, it stays.
    """
    best: tuple[int, Statement, Placed] | None = None
    for stated in _with_rising_cap(statement):
        budget.check()
        problem = surrogate(stated)
        placed = _better(
            snapshot, problem, (solved.on(problem), greedy), budget, now,
            partial(solved.standing, stated),
        )  # fmt: skip
        placed = defragmented(snapshot, problem, policy, placed, budget, now)
        broken = _promises_broken(snapshot, problem, placed)
        if best is None or broken < best[0]:
            best = broken, stated, placed
        if not broken:
            break
    if best is None:
        raise AssertionError("the statement itself comes first")
    return best[1], best[2]


def defragmented(
    snapshot: Snapshot, problem: Problem, policy: Policy, placed: Placed, budget: Budget,
    now: Mapping[int, Gang], *, chosen_only: bool = False,
) -> Placed:  # fmt: skip
    """Return ``placed`` with fragmentation mended, in the rounds that look for it."""
    every = policy.defragment_every_rounds
    if not every or snapshot.round_number % every:
        return placed
    return defragment(
        snapshot, problem, placed, deadline_expired=budget.cancelled, now=now,
        chosen_only=chosen_only,
    )  # fmt: skip


def next_defragmented(snapshot: Snapshot, policy: Policy) -> int:
    """Return the number of the next round that looks for fragmentation."""
    every = policy.defragment_every_rounds
    return (snapshot.round_number // every + 1) * every if every else NEVER


def _with_rising_cap(statement: Statement) -> Iterator[Statement]:
    """Yield the statement, then the same with twice the changes, until nothing more could change."""
    yield statement
    problem = statement.problem
    names = [row.name for row in problem.rows]
    if CHANGES_ROW not in names:
        return
    at = names.index(CHANGES_ROW)
    most, cap = int(np.count_nonzero(problem.current >= 0)), problem.rows[at].capacity
    while cap < most:
        cap = min(most, max(1, 2 * cap))
        rows = list(problem.rows)
        rows[at] = replace(rows[at], capacity=cap)
        yield replace(statement, problem=replace(problem, rows=tuple(rows)))


def _promises_broken(snapshot: Snapshot, problem: Problem, placed: Placed) -> int:
    owed = problem.must_run & promised_before(snapshot)
    return int(np.count_nonzero(owed & (placed.solution.choice < 0)))


def _better(
    snapshot: Snapshot, problem: Problem, answers: tuple[Solution, Solution], budget: Budget,
    now: Mapping[int, Gang], standing: Callable[[Ints], tuple[float, ...]],
) -> Placed:  # fmt: skip
    """Return the first answer placed, or the second (greedy's) where that is worth more once placed.

    With several goals ``standing`` compares choices by them; the score decides between equals.
    """

    def worth(placed: Placed) -> tuple[float, ...]:
        mine = score(problem, placed.solution, placed.placement)
        return *standing(placed.solution.choice), mine

    solution, greedy = answers
    placed = place(snapshot, problem, solution, deadline_expired=budget.cancelled, now=now)
    *stands, mine = worth(placed)
    if (*stands, mine * problem.scale) < (*standing(greedy.choice), greedy.objective):
        other = place(snapshot, problem, greedy, deadline_expired=budget.cancelled, now=now)
        placed = max((placed, other), key=worth)  # on equal scores the solver's
    return placed
