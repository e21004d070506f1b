"""How near the decisions of any policy come to each round's optimum, at no time of the policy's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.formulation.check import score
from tessera.formulation.clock import SystemClock
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import state
from tessera.simulator.run import Decider
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import Outcome
from tessera.solvers.schedulers.base import carried


class Watch:
    """The system's clock, less the time in which it was stopped."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._stopped_s = 0.0

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary origin; never goes back."""
        return self._clock.monotonic_s() - self._stopped_s

    def without(self, work: Callable[[], float]) -> float:
        """Return what ``work`` returns; its time does not count."""
        began_s = self._clock.monotonic_s()
        found = work()
        self._stopped_s += self._clock.monotonic_s() - began_s
        return found


class Judged:
    """A decider of which some rounds are decided by the ILP as well, at no time of its own.

    ``shares`` has what the decider's placement is worth over what the ILP's is, in normalised throughput
    less the price of restarts, by the estimates that rounds are told.
    """

    def __init__(self, decide: Callable[[Snapshot], Outcome], every: int, watch: Watch) -> None:
        """``every``: so many rounds lie between two that are judged; 0: none is."""
        self.shares: list[float] = []
        self._decide, self._every, self._watch = decide, every, watch
        self._best = Decider(RoundOptions())
        self._rounds = 0

    def __call__(self, snapshot: Snapshot) -> Outcome:
        """Return what the decider decides."""
        outcome = self._decide(snapshot)
        if self._every and self._rounds % self._every == 0 and not outcome.violations:
            share = self._watch.without(lambda: self._share(snapshot, outcome))
            self.shares.append(share)
        self._rounds += 1
        return outcome

    def _share(self, snapshot: Snapshot, outcome: Outcome) -> float:
        best = self._best(snapshot).placed_score
        return placed_worth(snapshot, outcome) / best if best > 0 else 1.0


def placed_worth(snapshot: Snapshot, outcome: Outcome) -> float:
    """Return what was placed, in normalised throughput less the price of restarts."""
    every = state(snapshot, RoundOptions(), published=True).problem
    choice = carried(outcome.problem, every, outcome.solution.choice)
    return score(every, replace(outcome.solution, choice=choice), outcome.placed.placement)
