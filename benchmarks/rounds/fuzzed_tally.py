"""The tally of a fuzz run: its faults, and the bounds that anyone can check."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

from tessera.benchmarks.rounds.fuzzed_proofs import ProofVerdict, judge_proof
from tessera.formulation.problem import Problem
from tessera.formulation.solution import Solution

logger = logging.getLogger(__name__)

FAULTS: Final = (
    "violations",
    "wrong_bounds",
    "wrong_proofs",
    "crashes",
    "below_greedy",
    "not_repeated",
    "refused_certificates",
    "believed_lies",
)
COUNTS: Final = ("unjudged", "optimal", "feasible", "infeasible", "unknown")

UNCHECKED: Final = "bound by "
"""Prefix of the tally's keys for bounds without a certificate; what proved them follows."""


class FuzzTally:
    """The counts of some cases, and the list of the faulty ones."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.faulty: list[dict[str, int | str]] = []

    def report(self, what: str, number: int, faults: list[str]) -> None:
        """Count the faults of a case."""
        self.count.update(faults)
        for fault in faults:
            logger.error(
                "a case is faulty",
                extra={"event": "case_faulty", "kind": what, "case": number, "fault": fault},
            )
            self.faulty.append({"case": number, "what": what, "fault": fault})

    def result(self, overrun_s: float = 0.0) -> dict[str, Any]:
        """Return the tally as JSON has it."""
        return {"tally": dict(self.count), "faulty": self.faulty, "overrun_s": overrun_s}

    def judge_proof(self, problem: Problem, number: int, solution: Solution) -> None:
        """Count the verdict on the proof of a solution's bound, and what proved it otherwise."""
        verdict = judge_proof(problem, solution)
        self.count[verdict] += 1
        if verdict is ProofVerdict.WITHOUT:
            self.count[UNCHECKED + (solution.proved_by or "nothing that is named")] += 1
        elif verdict is ProofVerdict.REFUSED:
            self.report("certificate", number, ["refused_certificates"])


def checkable_share(tally: Counter[str]) -> dict[str, float]:
    """Return the share of the bounds that can be checked. It is absent without any bound."""
    checked = tally[ProofVerdict.CHECKED]
    bounds = checked + tally[ProofVerdict.WITHOUT] + tally[ProofVerdict.REFUSED]
    return {"checkable_share": checked / bounds} if bounds else {}


def unchecked_rows(tally: Counter[str]) -> list[dict[str, int | str]]:
    """Return a row for what proved bounds without a certificate, with the number of these."""
    return [
        {"what": key, "count": tally[key]} for key in sorted(tally) if key.startswith(UNCHECKED)
    ]
