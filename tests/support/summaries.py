"""Summaries of rounds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tessera.formulation.records.rounds import RoundSummary
from tessera.solvers.rounds.plan import RoundOptions


def recorded_options(options: RoundOptions) -> dict[str, Any]:
    """Return options in the form that a round records."""
    fields = asdict(options)
    del fields["work"], fields["recorded"]
    return fields


def a_summary(**changes: Any) -> RoundSummary:
    values: dict[str, Any] = {
        "cluster": "c",
        "number": 1,
        "epoch": 1,
        "created_s": 1.0,
        "options": recorded_options(RoundOptions()),
        "status": "optimal",
        "outcome": "committed",
        "objective": 5.0,
        "bound": 5.0,
        "gap": 0.0,
        "placed_score": 5.0,
        "greedy_objective": 4.0,
        "verified": True,
        "violations": (),
        "snapshot_digest": "",
        "solver": "greedy",
        "work": (),
        "goals": (),
        "prices": {},
        "used_gpus": {},
        "seconds": {},
        "running": 1,
        "waiting": 0,
        "started": 1,
        "suspended": 0,
        "changed": 0,
        "samples_per_s": 1.0,
        "unit": "jobs",
        "versions": (),
    }
    return RoundSummary(**values | changes)
