"""The columns of ``jobs`` that users state, derived from the fields of ``JobSpec``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import sqlalchemy as sa

from tessera.db.schema.tables.jobs import jobs
from tessera.formulation.job.launch import launch_from_plain
from tessera.formulation.job.techniques import Technique
from tessera.formulation.records.jobs import JobSpec

STATED_COLUMNS: Final = tuple(
    f.name
    for f in fields(JobSpec)
    if f.name
    not in {
        "name",
        "workload",
        "avoid_nodes",
        "plan",
        "submitted_plan",
        "launch",
        "after",
        "array",
    }
)
"""The columns of ``jobs`` that hold a field of a ``JobSpec`` of the same name."""

UPDATABLE_COLUMNS: Final = frozenset({*STATED_COLUMNS, "avoid_nodes"} - {"techniques"})
"""Fields of a job that may change after its submission. Its name, workload and techniques may not."""

UNTIL_EXIT: Final = "coalesce((j.launch->>'until_exit')::boolean, false)"
"""SQL for whether the program of a job (j) decides when the job is done."""

LAUNCH_COLUMNS: Final = ("runtime", "launch")
"""The columns of ``jobs`` that hold the launch: the runtime, never empty, and all else as JSON."""

SUBMITTED_COLUMNS: Final = (
    "name",
    "workload_id",
    "plan_id",
    "submitted_plan_id",
    "array_id",
    "array_index",
    *LAUNCH_COLUMNS,
    *STATED_COLUMNS,
)
"""The columns of a submitted row of ``jobs``, in addition to its cluster."""


def typed_columns(columns: Sequence[str]) -> str:
    """Return columns of ``jobs`` with their types, in the form that ``json_to_recordset`` needs."""
    return ", ".join(f"{name} {jobs.c[name].type}" for name in columns)


def stated_in(row: sa.RowMapping) -> dict[str, Any]:
    """Return the fields of a ``JobSpec`` in a row of ``jobs``, with lists as tuples."""
    values = {name: row[name] for name in STATED_COLUMNS}
    stated = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    stated["techniques"] = tuple(map(Technique, values["techniques"]))
    return stated | {"launch": launch_from_plain(row["launch"] | {"runtime": row["runtime"]})}


def launch_values(spec: JobSpec) -> dict[str, Any]:
    """Return the values of ``LAUNCH_COLUMNS``."""
    launch = spec.launch.to_plain()
    launch.pop("runtime", None)
    return {"runtime": spec.runtime, "launch": launch}
