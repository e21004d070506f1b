"""Decided rounds with their records and proofs, and the check of these."""

from __future__ import annotations

import math
from dataclasses import replace

from tessera.formulation.codec import digest
from tessera.formulation.proofs import RoundProof
from tessera.formulation.records.rounds import RoundRecord, decision_record
from tessera.formulation.snapshot import Snapshot
from tessera.service.round_summary import summarise_round
from tessera.solvers.base import Budget, Solver
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.rounds.proofs import GoalCheck, check_round
from tests.support.proving import ProvingSolver, certify_prices

FREE = Budget(remaining_s=lambda: math.inf)
"""A budget without any limit."""


def a_proven_round(
    snapshot: Snapshot, options: RoundOptions, solver: Solver | None = None
) -> tuple[RoundRecord, RoundProof]:
    """Return the record and the proof of a round on ``snapshot``, by prices if no solver is given."""
    outcome = plan_round(snapshot, options, solver or ProvingSolver(certify_prices), FREE)
    assert not outcome.violations
    summary = summarise_round(snapshot, outcome, options, {}, digest(snapshot))
    decisions = tuple(decision_record(snapshot, d) for d in outcome.decisions)
    return RoundRecord(summary=summary, decisions=decisions), outcome.proof


def check(
    record: RoundRecord, options: RoundOptions, snapshot: Snapshot, proof: RoundProof
) -> tuple[GoalCheck, ...]:
    """Return the check of each goal of a round that was decided on ``snapshot``."""
    budget = replace(FREE, work=dict(record.summary.work), recorded=proof.recorded)
    return check_round(record, options, snapshot, proof, budget)
