"""The verification of a stored round: its certificates against its objectives and bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.formulation.records.rounds import RoundRecord
from tessera.service.server.ports.rounds import Rounds
from tessera.solvers.base import unlimited_time
from tessera.solvers.rounds.options import make_budget, recorded_options
from tessera.solvers.rounds.proofs import GoalCheck, check_round


def verify_round(
    store: Rounds, cluster: str, number: int, cancelled: Callable[[], bool]
) -> tuple[RoundRecord, tuple[GoalCheck, ...]]:
    """Return a stored round, and the check of the certificate of each of its goals. Blocks.

    Raises:
        NotFound: the cluster or the round. NotAllowed: its snapshot is no longer kept.
        DeadlineTooShort: the call was cancelled.
    """
    record, proof = store.get_round(cluster, number), store.round_proof(cluster, number)
    snapshot = store.round_snapshot(cluster, number)
    options = recorded_options(record.summary.options)
    again = replace(options, work=record.summary.work, recorded=proof.recorded)
    budget = make_budget(again, unlimited_time, cancelled=cancelled)
    return record, check_round(record, options, snapshot, proof, budget)


def encode_document(round_name: str, record: RoundRecord, checks: Sequence[GoalCheck]) -> bytes:
    """Return the JSON of the document of a round's certificates; b"" if no goal has one."""
    goals = [check.document for check in checks if check.document is not None]
    if not goals:
        return b""
    document: dict[str, Any] = {
        "round": round_name,
        "snapshot": record.summary.snapshot_digest,
        "not_certified": [
            {"name": check.result.name, "proved_by": check.result.proved_by}
            for check in checks
            if check.document is None or not check.result.certified
        ],
        "goals": goals,
    }
    return json.dumps(document, separators=(",", ":")).encode()
