"""Measurement of decisions against each round's optimum, without charging the policy for the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tessera.formulation.check import score_solution
from tessera.formulation.clock import SystemClock
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import state_round
from tessera.simulator.run import Decider
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tessera.solvers.schedulers.base import translate_choice

THROUGHPUT_ROUND: Final = RoundOptions(objective="throughput")
"""The round by which others are judged, whatever their own objectives are."""


class PausableClock:
    """The system's clock without the time of work that it does not count."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._stopped_s = 0.0

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin; the value never decreases."""
        return self._clock.monotonic_s() - self._stopped_s

    def without(self, work: Callable[[], float]) -> float:
        """Return the result of ``work``, without counting its time."""
        began_s = self._clock.monotonic_s()
        result = work()
        self._stopped_s += self._clock.monotonic_s() - began_s
        return result


class JudgedDecider:
    """A decider that compares some of its rounds with the decisions of the ILP.

    The ILP's time does not count as the decider's. Each entry of ``shares`` is the value of the
    decider's placement divided by that of the ILP's. Both values are normalised throughput less the
    restart cost, by the estimates that rounds see.
    """

    def __init__(
        self, decide: Callable[[Snapshot], RoundOutcome], every: int, watch: PausableClock
    ) -> None:
        """Judge each ``every``-th round. If ``every`` is 0, judge none."""
        self.shares: list[float] = []
        self._decide, self._every, self._watch = decide, every, watch
        self._best = Decider(THROUGHPUT_ROUND)
        self._rounds = 0

    def __call__(self, snapshot: Snapshot) -> RoundOutcome:
        """Return the decider's outcome, and judge it in each ``every``-th round."""
        outcome = self._decide(snapshot)
        if self._every and self._rounds % self._every == 0 and not outcome.violations:
            share = self._watch.without(lambda: self._share(snapshot, outcome))
            self.shares.append(share)
        self._rounds += 1
        return outcome

    def _share(self, snapshot: Snapshot, outcome: RoundOutcome) -> float:
        best = self._best(snapshot).placed_score
        return placement_value(snapshot, outcome) / best if best > 0 else 1.0


def placement_value(snapshot: Snapshot, outcome: RoundOutcome) -> float:
    """Return the value of what was placed, in normalised throughput less the restart cost."""
    every = state_round(snapshot, THROUGHPUT_ROUND, published=True).problem
    choice = translate_choice(outcome.problem, every, outcome.solution.choice)
    return score_solution(every, replace(outcome.solution, choice=choice), outcome.placed.placement)
