"""A round in progress: its input, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from tessera.formulation.answer.placement import Gang, current_gangs
from tessera.formulation.answer.solution import Solution
from tessera.formulation.round.admission import Admission
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import Statement
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.goals import build_surrogate


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """A round that is being decided; each step returns it with the step's results added.

    ``gangs`` has the current gang of each job that has one. ``hint`` is greedy's solution of
    ``surrogate``, or None before greedy has run. ``waived`` has the jobs whose promises the
    statement leaves out, because not all could be kept. ``widened`` has the GPU types on which the
    statement has wider shapes as columns, and perhaps packing rows.
    """

    snapshot: Snapshot
    policy: Policy
    budget: Budget
    gangs: Mapping[int, Gang]
    statement: Statement
    admission: Admission | None = None
    hint: Solution | None = None
    waived: frozenset[int] = frozenset()
    widened: frozenset[int] = frozenset()

    @classmethod
    def begin(
        cls,
        snapshot: Snapshot,
        policy: Policy,
        budget: Budget,
        statement: Statement,
        admission: Admission | None = None,
    ) -> Self:
        """Return the round with its first statement."""
        return cls(
            snapshot=snapshot,
            policy=policy,
            budget=budget,
            gangs=current_gangs(snapshot),
            statement=statement,
            admission=admission,
        )

    @cached_property
    def surrogate(self) -> Problem:
        """Return the one problem that stands for all goals of the statement."""
        return build_surrogate(self.statement)

    @property
    def greedy(self) -> Solution:
        """Return greedy's solution of the surrogate, once there is one."""
        if self.hint is None:
            raise AssertionError("greedy has not run yet")
        return self.hint

    def restated(self, statement: Statement) -> Self:
        """Return the round with another statement; the solution of the former one is kept."""
        return self if statement is self.statement else replace(self, statement=statement)
