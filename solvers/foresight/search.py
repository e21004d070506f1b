"""The search of foresight: candidates are rolled forward, then changes of the best one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.formulation.foresight import OWN_ANSWER, Foresight, RolledAnswer
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Floats, Ints
from tessera.solvers.answers import is_answer, objective_of
from tessera.solvers.base import Budget
from tessera.solvers.foresight.candidates import factors, other_answers
from tessera.solvers.foresight.world import state_future, value_columns, with_every_row
from tessera.solvers.kernels.foresight import ForesightProblem, change_answer, follow_answer
from tessera.solvers.kernels.jit import as_fixed_array

FORESIGHT: Final = "foresight"
"""The name under which the number of roll-outs is recorded as work."""
FOLLOWED_POWER: Final = 0.25
"""The power of the greedy policy ``balanced:POWER`` under which an answer is rolled forward.

Other jobs also react by it to a change of the best answer."""
CHANGE_WEIGHT: Final = 2.0
"""The number of further restarts that each restart of a running job counts as.

A roll-out knows of no arrivals, after which changes are undone sooner than it says."""
LEAST_GAIN: Final = 1e-9
"""The relative gain below which two rolled answers are equal. The earlier one is then kept."""
CHANGES: Final = "changes of "
"""The beginning of the name of an answer that local changes have led to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Foreseen:
    """The answer that foresight takes, int64[jobs], and the record of what it compared."""

    choice: Ints
    record: Foresight


def look_forward(
    snapshot: Snapshot,
    policy: Policy,
    problem: Problem,
    answers: list[tuple[str, Ints]],
    allowed: Callable[[Ints], bool],
    known: Floats | None,
    budget: Budget,
) -> Foreseen | None:
    """Return the answer after which jobs end soonest, or None if no job counts.

    ``answers`` are rolled forward first, the round's own at their head, which wins ties. Then come
    those of ``other_answers``, and then changes of the best one, as long as there are roll-outs
    left and time. An answer counts only if it keeps the rows of ``problem`` and is ``allowed``, which
    the round's own always is. ``known`` are shadow prices of the last round, float64[rows].

    If the budget has recorded work of foresight, it determines the number of roll-outs, and no
    clock is asked.
    """
    future = state_future(snapshot, policy, problem)
    if not (future.counts.any() and len(answers)):
        return None
    search = _Search(
        problem=problem,
        future=future,
        allowed=allowed,
        budget=budget,
        most=policy.foresight,
    )
    for name, choice in answers:
        search.offer(name, choice)
    if not search.is_over():
        for name, choice in other_answers(problem, future, known, budget):
            search.offer(name, choice)
            if search.is_over():
                break
    search.improve()
    return search.result()


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """The answers so far, and the best of them."""

    problem: Problem
    future: ForesightProblem
    allowed: Callable[[Ints], bool]
    budget: Budget
    most: int
    seen: dict[bytes, float] = field(default_factory=dict)
    rolled: list[tuple[str, float, Ints]] = field(default_factory=list)
    best: int = 0  # index into ``rolled``

    def is_over(self) -> bool:
        """Return whether no more answers may be rolled forward."""
        self.budget.check()
        if FORESIGHT in self.budget.work:
            return len(self.seen) >= self.budget.work[FORESIGHT]
        return bool(self.seen) and (len(self.seen) >= self.most or self.budget.expired())

    def offer(self, name: str, choice: Ints) -> bool:
        """Roll an answer forward if it is new and permitted; return whether it is the best now."""
        key = choice.tobytes()
        if key in self.seen or (self.rolled and self.is_over()):
            return False
        if self.rolled and not (is_answer(self.problem, choice) and self.allowed(choice)):
            return False
        total_s = follow_answer(self.future, as_fixed_array(choice), FOLLOWED_POWER)
        changed = (self.problem.current >= 0) & (choice != self.problem.current)
        total_s += CHANGE_WEIGHT * float(
            (self.future.weight * self.future.restart_s)[changed].sum()
        )
        self.seen[key] = total_s
        is_best = not self.rolled or total_s < self.rolled[self.best][1] * (1.0 - LEAST_GAIN)
        if not name.startswith(CHANGES):
            self.rolled.append((name, total_s, choice))
            self.best = len(self.rolled) - 1 if is_best else self.best
        elif is_best:
            if not self.rolled[self.best][0].startswith(CHANGES):
                self.rolled.append((name, total_s, choice))
                self.best = len(self.rolled) - 1
            self.rolled[self.best] = (self.rolled[self.best][0], total_s, choice)
        return is_best

    def improve(self) -> None:
        """Try changes of the best answer, one job at a time, until none is left that gains."""
        now = with_every_row(self.problem, self.future)
        gain = factors(self.future, FOLLOWED_POWER)
        value = as_fixed_array(value_columns(self.future, self.problem, gain))
        jobs = np.flatnonzero(self.future.counts & (np.diff(self.problem.job_start) > 0)).tolist()
        gained = True
        while gained and not self.is_over():
            gained = False
            for job in jobs:
                gained |= self._change(now, value, job)
                if self.is_over():
                    return

    def _change(self, now: ForesightProblem, value: Floats, job: int) -> bool:
        """Try every other column of ``job``, and waiting; return whether the best answer changed."""
        name, _, start = self.rolled[self.best]
        name = name if name.startswith(CHANGES) else CHANGES + name
        gained = False
        for column in (-1, *self.problem.columns_of(job)):
            for others in (True, False):
                choice = np.array(start)
                if column != start[job] and change_answer(now, value, choice, job, column, others):
                    gained |= self.offer(name, choice)
        return gained

    def result(self) -> Foreseen:
        """Return the best answer with the record."""
        name, _, choice = self.rolled[self.best]
        weight = float(self.future.weight[self.future.counts].sum())
        scale = self.problem.scale
        answers = tuple(
            RolledAnswer(
                name=one,
                completion_s=total_s / weight,
                objective=objective_of(self.problem, own) / scale,
            )
            for one, total_s, own in self.rolled
        )
        given_up = answers[0].objective - answers[self.best].objective
        return Foreseen(
            choice=choice,
            record=Foresight(
                answers=answers, chosen=name, rollouts=len(self.seen), sacrifice=given_up
            ),
        )


__all__ = ["FORESIGHT", "OWN_ANSWER", "Foreseen", "look_forward"]
