"""What users state of a job, as columns of ``jobs``: derived from ``JobSpec``, whose fields they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import sqlalchemy as sa

from tessera.db import tables
from tessera.formulation.records.jobs import JobSpec

STATED: Final = tuple(
    f.name for f in fields(JobSpec) if f.name not in {"name", "workload", "avoid_nodes"}
)
"""Columns of ``jobs`` that hold a field of a ``JobSpec`` of the same name."""

UPDATABLE: Final = frozenset({*STATED, "avoid_nodes"})
"""Fields of a job that may change after it was submitted; its name and its workload may not."""

SUBMITTED: Final = ("name", "workload_id", *STATED)
"""Columns of a row of ``jobs`` that is submitted, beside its cluster."""


def typed(columns: Sequence[str]) -> str:
    """Return columns of ``jobs`` with their types, as ``json_to_recordset`` takes them."""
    return ", ".join(f"{name} {tables.jobs.c[name].type}" for name in columns)


def stated_in(row: sa.RowMapping) -> dict[str, Any]:
    """Return the fields of a ``JobSpec`` that a row of ``jobs`` holds; lists as tuples."""
    values = {name: row[name] for name in STATED}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
