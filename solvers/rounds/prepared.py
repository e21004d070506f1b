"""The snapshot as a round solves it, and the way back for the round's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tessera.formulation.answer.decisions import Decision
from tessera.formulation.answer.pace import to_real_pace, to_training_pace
from tessera.formulation.answer.unknown_rates import assume_rates, without_assumed_rates
from tessera.formulation.state.replans import charge_unsaved_training
from tessera.formulation.state.reservations import with_reservations
from tessera.formulation.state.runnable_plans import offer_runnable_plans
from tessera.formulation.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSnapshot:
    """A snapshot with assumed rates, plans that can run, and the full cost of restarts.

    Its times are at the pace of the clock, and reservations have their nodes. ``source`` is the
    snapshot that it was made of.
    """

    source: Snapshot
    snapshot: Snapshot

    def restore(self, decisions: Iterable[Decision]) -> tuple[Decision, ...]:
        """Return decisions on ``snapshot`` as decisions on ``source``."""
        decisions = to_training_pace(decisions, self.source.clock_factor)
        return without_assumed_rates(self.source, decisions)


def prepare_snapshot(source: Snapshot) -> PreparedSnapshot:
    """Return the snapshot as a round solves it."""
    runnable = offer_runnable_plans(assume_rates(source))
    snapshot = with_reservations(charge_unsaved_training(to_real_pace(runnable)))
    return PreparedSnapshot(source=source, snapshot=snapshot)
