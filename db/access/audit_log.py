"""The audit log: entries are added in the transactions of changes, listed, and pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.formulation.base.access import AUDITED
from tessera.formulation.records.access import AuditFilter, AuditRecord, Refusal

MAX_TEXT: Final = 500
"""Largest number of characters of a text in an entry. The rest is cut off.

Callers who proved nothing choose some of these texts, and an index holds no long ones.
"""

_TEXTS: Final = (
    "subject",
    "role",
    "proof",
    "method",
    "target",
    "peer",
    "request_id",
    "outcome",
    "detail",
)

# The time is that of the entry, and not that of the beginning of its transaction, which may wait.
_ADD = sa.text(f"""
INSERT INTO audit_log (at, {", ".join(_TEXTS)}, count)
SELECT clock_timestamp(), r.* FROM json_to_recordset(CAST(:rows AS json)) AS
    r({", ".join(f"{name} text" for name in _TEXTS)}, count bigint)
""")  # noqa: S608 - a constant of this module

# In the collation C, "0" is the character after "/", and "!" the one after " ". A target such as
# "clusters/a/jobs/b and 2 more" is of jobs/b, too.
_LIST = sa.text(f"""
SELECT number, extract(epoch FROM at)::float8 AS time_s, {", ".join(_TEXTS)}, count
FROM audit_log
WHERE (:before = 0 OR number < :before)
    AND (:subject = '' OR subject = :subject)
    AND (:method = '' OR method = :method)
    AND (:outcome = '' OR outcome = :outcome OR (:outcome = 'refused' AND outcome <> 'OK'))
    AND (:target = '' OR target = :target
        OR (target > :target || '/' AND target < :target || '0')
        OR (target > :target || ' ' AND target < :target || '!'))
    AND (:since_s = '-Infinity' OR at >= to_timestamp(:since_s))
    AND (:until_s = 'Infinity' OR at < to_timestamp(:until_s))
ORDER BY number DESC LIMIT :limit
""")  # noqa: S608 - a constant of this module


def record_change(connection: sa.Connection) -> None:
    """Add the change of this transaction to the audit log.

    Nothing is added if no call is audited (``formulation.base.access.AUDITED``).
    """
    call = AUDITED.get()
    if call is not None:
        _add(connection, [asdict(call) | {"outcome": "OK", "detail": "", "count": 1}])


def add_refusals(connection: sa.Connection, refusals: Sequence[Refusal]) -> None:
    """Add refused calls."""
    if refusals:
        _add(connection, [asdict(refusal) for refusal in refusals])


def list_entries(
    connection: sa.Connection, chosen: AuditFilter, before: int, limit: int
) -> list[AuditRecord]:
    """Return entries with a number below ``before`` (0: all), the newest first."""
    values = {
        name: _storable(value) if isinstance(value, str) else value
        for name, value in asdict(chosen).items()
    }
    rows = connection.execute(_LIST, values | {"before": before, "limit": limit})
    return [AuditRecord(**row) for row in rows.mappings()]


def _add(connection: sa.Connection, rows: Sequence[dict[str, object]]) -> None:
    plain = [
        {name: _storable(str(row[name])) for name in _TEXTS} | {"count": row["count"]}
        for row in rows
    ]
    connection.execute(_ADD, {"rows": dump_json(plain)})


def _storable(text: str) -> str:
    """Return the text without what PostgreSQL cannot hold, and not longer than ``MAX_TEXT``."""
    return text[:MAX_TEXT].replace("\0", "\N{REPLACEMENT CHARACTER}")
