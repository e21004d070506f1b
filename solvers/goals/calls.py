"""The solver calls of one round: their shares of its time, and their recorded work."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tessera.formulation.answer.solution import RecordedAnswer, Solution
from tessera.formulation.round.problem import Problem
from tessera.solvers.base import Budget, Solver

CALLS_KEY: Final = "calls"
"""Name under which the number of calls is recorded.

It marks recorded work as that of several calls."""

OVER_PREFIX: Final = "over"
"""Prefix, before a colon and a number, of a record that the time of a goal was over.

The number is that of the question."""


class Calls:
    """The numbered solver calls of a round; the work of call k is recorded as ``k:solver``.

    Answers that a clock ended are recorded in the same way, by ``k:stage``. If the budget holds
    such a record, each call works under the limits that the same call had then. A call that was
    left out for lack of time is left out again, so a round can be repeated. The next call may
    depend on answers only, and never on a clock.
    """

    def __init__(self, budget: Budget) -> None:
        self._recorded = _by_call(budget.work) if CALLS_KEY in budget.work else None
        self._over = {key for key in budget.work if key.startswith(f"{OVER_PREFIX}:")}
        self._count = self._questions = 0
        self._work: list[tuple[str, float]] = []
        self._given = _answers_by_call(budget.recorded)
        self._answers: list[RecordedAnswer] = []
        self._failures: list[str] = []

    def solve(
        self, solver: Solver, problem: Problem, budget: Budget, hint: Solution | None = None
    ) -> Solution | None:
        """Return the solver's solution, or None if no time is left for the call."""
        self._count += 1
        if self._recorded is not None:
            if self._count not in self._recorded:
                return None
            answers = self._given.get(self._count, ())
            budget = replace(budget, work=self._recorded[self._count], recorded=answers)
        elif budget.expired():
            return None
        solution = solver.solve(problem, budget, hint)
        self._failures += solution.failures
        self._work += [(f"{self._count}:{name}", work) for name, work in solution.work]
        self._answers += [
            replace(answer, stage=f"{self._count}:{answer.stage}") for answer in solution.recorded
        ]
        return solution

    def over(self, budget: Budget) -> bool:
        """Return whether the time for a goal is over, or was when the round was recorded.

        The result is recorded, so that what a goal leaves out for lack of time is left out again.
        """
        self._questions += 1
        key = f"{OVER_PREFIX}:{self._questions}"
        over = key in self._over if self._recorded is not None else budget.expired()
        if over:
            self._work.append((key, 1.0))
        return over

    @property
    def work(self) -> tuple[tuple[str, float], ...]:
        """Return the work of all calls so far."""
        return ((CALLS_KEY, float(self._count)), *self._work)

    @property
    def recorded(self) -> tuple[RecordedAnswer, ...]:
        """Return the answers of all calls so far that a clock ended."""
        return tuple(self._answers)

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the stages of all calls so far that failed, and why, each once."""
        return tuple(dict.fromkeys(self._failures))


def _by_call(work: dict[str, float]) -> dict[int, dict[str, float]]:
    by_call: dict[int, dict[str, float]] = {}
    for key, amount in work.items():
        call, colon, name = key.partition(":")
        if colon and call.isdecimal():
            by_call.setdefault(int(call), {})[name] = amount
    return by_call


def _answers_by_call(
    recorded: tuple[RecordedAnswer, ...],
) -> dict[int, tuple[RecordedAnswer, ...]]:
    by_call: dict[int, tuple[RecordedAnswer, ...]] = {}
    for answer in recorded:
        call, colon, stage = answer.stage.partition(":")
        if colon and call.isdecimal():
            own = by_call.get(int(call), ())
            by_call[int(call)] = (*own, replace(answer, stage=stage))
    return by_call
