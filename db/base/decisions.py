"""Decisions of rounds in compressed pages, one row each, so that a round of many jobs stays small.

With one row for each decision, a decision took 0.4 KiB, and this made up most of the growth with
each round. A page holds decisions on jobs that were submitted one after another, so that a job's
reason is in one page.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.base.documents import (
    allocation_from,
    allocation_plain,
    dump_json,
    finite_or_text,
    reason_from,
    reason_plain,
)
from tessera.formulation.job.reasons import Reason
from tessera.formulation.records.rounds import DecisionRecord

PAGE_DECISIONS: Final = 256
"""Number of decisions in a page, with which a job's reason is read in about a millisecond."""

_LEVEL: Final = 6

_INSERT = sa.text("""
INSERT INTO decision_pages (cluster_id, round, page, first_job_id, document)
SELECT :cluster, :round, p.page, p.first_job_id, p.document FROM unnest(
    CAST(:first_jobs AS bigint[]), CAST(:documents AS bytea[])
) WITH ORDINALITY AS p(first_job_id, document, page)
""")

_PAGES = sa.text("""
SELECT document FROM decision_pages WHERE cluster_id = :cluster AND round = :round ORDER BY page
""")

_FIRST_JOBS = sa.text("""
SELECT p.round, p.page, p.first_job_id FROM decision_pages p
JOIN clusters c ON c.id = p.cluster_id AND c.decided_round = p.round
WHERE p.cluster_id = :cluster ORDER BY p.page
""")

_SOME_PAGES = sa.text("""
SELECT document FROM decision_pages
WHERE cluster_id = :cluster AND round = :round AND page = ANY(:pages)
""")


def write_decisions(
    connection: sa.Connection,
    cluster: int,
    number: int,
    records: Sequence[DecisionRecord],
    job_ids: Mapping[str, int],
) -> None:
    """Store a round's decisions. ``job_ids`` maps the names of existing jobs to their keys."""
    # Order the decisions by job, so that the first job of each page is enough to find one.
    keyed = sorted((job_ids.get(record.job, 0), i) for i, record in enumerate(records))
    if not keyed:
        return
    first_jobs, documents = [], []
    for start in range(0, len(keyed), PAGE_DECISIONS):
        page = keyed[start : start + PAGE_DECISIONS]
        first_jobs.append(page[0][0])
        documents.append(_pack(page, records))
    values = {"cluster": cluster, "round": number, "first_jobs": first_jobs, "documents": documents}
    connection.execute(_INSERT, values)


def read_decisions(
    connection: sa.Connection, cluster: int, number: int
) -> tuple[DecisionRecord, ...]:
    """Return a round's decisions, in the order in which they were made."""
    values = {"cluster": cluster, "round": number}
    pages = connection.execute(_PAGES, values).scalars().all()
    rows = [row for page in pages for row in unpack_page(page)]
    return tuple(_record(row) for row in sorted(rows, key=lambda row: row["ordinal"]))


def find_reasons(
    connection: sa.Connection, cluster: int, jobs: Mapping[str, int]
) -> Iterator[tuple[str, Reason | None, int]]:
    """Yield (job, reason, round) for each reason of the last round that was not refused.

    ``jobs`` maps names to keys.
    """
    pages = connection.execute(_FIRST_JOBS, {"cluster": cluster}).all()
    if not pages:
        return
    number, first_jobs = pages[0].round, [page.first_job_id for page in pages]
    places = {bisect_right(first_jobs, job) - 1 for job in jobs.values()} - {-1}
    pages_to_read = [pages[place].page for place in sorted(places)]
    values = {"cluster": cluster, "round": number, "pages": pages_to_read}
    for page in connection.execute(_SOME_PAGES, values).scalars():
        for row in unpack_page(page, jobs):
            if row["reason"] is not None:
                yield row["job"], reason_from(row["reason"]), number


def _pack(page: Sequence[tuple[int, int]], records: Sequence[DecisionRecord]) -> bytes:
    rows = [_plain(i, records[i]) for _, i in page]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return zlib.compress(dump_json(columns).encode(), _LEVEL)


def unpack_page(
    page: bytes | memoryview, jobs: Container[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the decisions of a stored page on ``jobs``, or on all if it is None, as plain values."""
    columns = json.loads(zlib.decompress(page))
    for row, job in enumerate(columns["job"]):
        if jobs is None or job in jobs:
            yield {name: values[row] for name, values in columns.items()}


def _plain(ordinal: int, record: DecisionRecord) -> dict[str, Any]:
    return {
        "ordinal": ordinal,
        "job": record.job,
        "kind": record.kind,
        "allocation": allocation_plain(record.allocation),
        "reason": reason_plain(record.reason),
        "restart_price": finite_or_text(record.restart_price),
        "skipped": record.skipped,
        "admitted": record.admitted,
        "opportunistic": record.opportunistic,
    }


def _record(row: Mapping[str, Any]) -> DecisionRecord:
    return DecisionRecord(
        job=row["job"],
        kind=row["kind"],
        allocation=allocation_from(row["allocation"]),
        reason=reason_from(row["reason"]),
        restart_price=float(row["restart_price"]),
        applied=not row["skipped"],
        skipped=row["skipped"],
        admitted=row["admitted"],
        opportunistic=row["opportunistic"],
    )
