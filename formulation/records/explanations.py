"""The explanation of a job as it is sent, with the rounds that it is about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tessera.formulation.answer.explanations.records import Explanation
from tessera.formulation.records.jobs import JobRecord, PlannedStartRecord
from tessera.formulation.records.rounds import JobRound


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExplanation:
    """The explanation of a job, with the round that it is about and the job's earlier rounds.

    ``number`` is 0 if a round on the present state was decided for it. ``kind`` is the round's
    decision; it is "" if the job has ended. ``explanation`` is None if nothing more is known.
    ``note`` says why steps may be missing; it is "" if none is. ``start_by_s`` and ``planned_start``
    are the stored job's, unless the explanation is of a round that the caller has named.
    """

    number: int
    created_s: float
    kind: str
    explanation: Explanation | None
    history: Sequence[JobRound]
    note: str = ""
    start_by_s: float = math.inf
    planned_start: PlannedStartRecord | None = None

    def with_starts_of(self, record: JobRecord) -> JobExplanation:
        """Return the explanation with the promised and the planned start of the stored job."""
        return replace(self, start_by_s=record.start_by_s, planned_start=record.planned_start)


def group_rounds(history: Sequence[JobRound]) -> list[list[JobRound]]:
    """Return rounds (newest first) as spans of the same decision, for the same reason, on one Cell."""
    return [list(span) for _, span in groupby(history, key=lambda r: (r.kind, r.code, r.cell))]
