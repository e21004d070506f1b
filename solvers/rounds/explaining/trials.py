"""Rounds on changed snapshots, which show whether a step would help a job. Time limits their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tessera.formulation.answer.decisions import Decision, DecisionKind
from tessera.formulation.answer.explanations.applying import apply_changes
from tessera.formulation.answer.explanations.changes import Change
from tessera.formulation.answer.explanations.records import Claim
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome

RATE_TOLERANCE = 1e-9
"""Relative tolerance of a rate, for rounding."""

PlanRound: TypeAlias = Callable[[Snapshot, RoundOptions], RoundOutcome]
"""Decide a round. It raises DeadlineTooShort if there is no time left for it."""

Changes: TypeAlias = tuple[Change, ...]
Ladder: TypeAlias = Sequence[Changes]
"""Steps of one kind, from the least to the most effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The decision that a step shall lead to: ``claim``, and the rate that the job had before."""

    claim: Claim
    rate: float = 0.0

    def is_met(self, decision: Decision) -> bool:
        """Return whether the decision is what is wished for."""
        if self.claim is Claim.STAYS:
            return decision.kind is DecisionKind.KEEP
        return decision.gang is not None and decision.rate >= self.rate * (1 - RATE_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """The outcome of a round after ``changes``."""

    changes: Changes
    outcome: RoundOutcome
    decision: Decision  # on the job

    @property
    def code(self) -> ReasonCode | None:
        """Return the code of the reason why the job does not run, or None if it runs."""
        waits = self.decision.gang is None
        return self.decision.reason.code if waits and self.decision.reason else None


@dataclass(kw_only=True, eq=False)
class Trials:
    """The trials of changes for ``job`` on the snapshot of a round.

    ``options`` are those of the round, without its recorded work: a changed round has other work.
    """

    snapshot: Snapshot
    options: RoundOptions
    job: int
    plan: PlanRound
    made: dict[Changes, Trial | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Leave out what decides no allocation: recorded work, and paths on the network."""
        self.options = replace(self.options, work=(), recorded=())
        self.snapshot = replace(self.snapshot, topology=None)

    def make(self, changes: Changes) -> Trial | None:
        """Return the trial of ``changes``. It is None if they are not possible, or refused.

        Raises:
            DeadlineTooShort: no time is left.
        """
        if changes not in self.made:
            self.made[changes] = self._make(changes)
        return self.made[changes]

    def _make(self, changes: Changes) -> Trial | None:
        try:
            snapshot, options = apply_changes(self.snapshot, self.options, self.job, changes)
            outcome = self.plan(snapshot, options)
        except InvalidInput:  # e.g. a policy that does not allow this value
            return None
        if outcome.violations:
            return None
        return Trial(changes=changes, outcome=outcome, decision=outcome.decisions[self.job])

    def find_least(self, ladder: Ladder, is_met: Callable[[Trial], bool]) -> Trial | None:
        """Return the trial of the first step of ``ladder`` that meets the wish, by bisection.

        It is None if the last step, which has the most effect, does not meet it. A step before the
        one that is returned may do so, too, if the effect does not grow along the ladder.
        """
        best = self._meets(ladder[-1], is_met) if ladder else None
        if best is None:
            return None
        low, high = 0, len(ladder) - 1
        while low < high:
            middle = (low + high) // 2
            trial = self._meets(ladder[middle], is_met)
            if trial is None:
                low = middle + 1
            else:
                best, high = trial, middle
        return best

    def _meets(self, changes: Changes, is_met: Callable[[Trial], bool]) -> Trial | None:
        trial = self.make(changes)
        return trial if trial is not None and is_met(trial) else None
