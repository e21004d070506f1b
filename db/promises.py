"""The results of a round for jobs, in addition to GPUs: deadlines, certificates, rejections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tessera.db.documents import certificate_plain, dump_json, reason_plain
from tessera.formulation.last_round import Legs
from tessera.formulation.reasons import Reason
from tessera.formulation.records.jobs import LegRecord
from tessera.formulation.snapshot import Snapshot

_RECORD = sa.text("""
UPDATE jobs j SET admitted = c.admitted, opportunistic = c.opportunistic,
    certificate = c.certificate, rejection = c.rejection
FROM json_to_recordset(CAST(:rows AS json)) AS c(
    id bigint, admitted boolean, opportunistic boolean, certificate jsonb, rejection jsonb
)
WHERE j.id = c.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The result of a round for a job, given by its key.

    ``rejected`` says why the job can never run. It is None if it can. ``lapsed`` says whether the round
    gives up a deadline that was promised.
    """

    job: int
    admitted: bool
    opportunistic: bool
    certificate: Sequence[LegRecord]
    round: int
    rejected: Reason | None = None
    lapsed: bool = False


def record_promises(connection: sa.Connection, promises: Sequence[Promise]) -> None:
    """Write the promises in one statement. This does not change the versions of jobs."""
    rows = [
        {
            "id": p.job,
            "admitted": p.admitted,
            "opportunistic": p.opportunistic,
            "certificate": certificate_plain(p.certificate),
            "rejection": {"round": p.round, "reason": reason_plain(p.rejected)}
            if p.rejected is not None
            else None,
        }
        for p in promises
    ]
    if rows:
        connection.execute(_RECORD, {"rows": dump_json(rows)})


def legs_by_job(snapshot: Snapshot, legs: Legs) -> dict[int, list[LegRecord]]:
    """Return the legs of each job (its index) that has any, by names, in their order."""
    found: dict[int, list[LegRecord]] = defaultdict(list)
    spans = legs.job.tolist(), legs.start_s.tolist(), legs.end_s.tolist()
    for job, start_s, end_s, cell in zip(*spans, legs.keys(), strict=True):
        found[job].append(LegRecord(start_s=start_s, end_s=end_s, cell=snapshot.cell(cell)))
    return dict(found)
