"""The GPU types and nodes that jobs may run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypedDict

import numpy as np
import sqlalchemy as sa

from tessera.db.base.rows import json_rows
from tessera.db.clusters.failed_starts import AVOIDS
from tessera.db.rounds.snapshot.keys import Keys, split_ints
from tessera.db.rounds.snapshot.runtime_needs import RUNTIME_TABLES, read_runtime_needs
from tessera.db.schema.tables import LIVE
from tessera.db.schema.tables.jobs import SELECTOR_COLUMNS
from tessera.formulation.state.permissions import (
    NO_SELECTORS,
    NO_UNMATCHED_NODES,
    AllowedGpuTypes,
    AvoidedNodes,
    Selectors,
    UnmatchedNodes,
    tabulate_selectors,
)
from tessera.formulation.state.snapshot import Jobs

_AVOIDS: Final = f"""(
    SELECT j.id, n.id, n.name
    FROM job_avoids v JOIN jobs j ON j.id = v.job_id JOIN nodes n ON n.id = v.node_id
    WHERE j.cluster_id = c.id AND j.{LIVE} UNION {AVOIDS}
) AS v(job, node, name)"""  # noqa: S608 - constants of db
"""The nodes that jobs avoid because their users want it, or after failed starts."""

_SELECTORS: Final = [f"j.{column}" for column in SELECTOR_COLUMNS]
_HAS_SELECTOR: Final = " OR ".join(f"{column} <> ''" for column in _SELECTORS)

TABLES: Final = {
    "avoided_nodes": json_rows("v.job, v.node", _AVOIDS, "v.job, v.name"),
    "allowed_gpu_types": json_rows(
        "j.id, t.id",
        "jobs j CROSS JOIN LATERAL jsonb_array_elements_text(j.allowed_gpu_types) AS a(name)"
        " JOIN gpu_types t ON t.cluster_id = j.cluster_id AND t.name = a.name"
        f" WHERE j.cluster_id = c.id AND j.{LIVE} AND j.allowed_gpu_types <> '[]'",
        "j.id, t.ordinal",
    ),
    "selections": json_rows(
        ", ".join(["j.id", *_SELECTORS]),
        f"jobs j WHERE j.cluster_id = c.id AND j.{LIVE} AND ({_HAS_SELECTOR})",
        "j.id",
    ),
} | RUNTIME_TABLES
"""Subqueries for the tables of a cluster (c)."""


class PermissionFacts(TypedDict):
    """The facts of a snapshot on permissions, with the jobs that refer to them."""

    jobs: Jobs
    avoided_nodes: AvoidedNodes
    allowed_gpu_types: AllowedGpuTypes
    selectors: Selectors
    unmatched_nodes: UnmatchedNodes


def read_permissions(row: sa.Row[Any], keys: Keys, jobs: Jobs) -> PermissionFacts:
    """Return the facts in a row that has the subqueries of ``TABLES``.

    ``jobs`` are those of the snapshot, which get their selectors.
    """
    avoiding, avoided = split_ints(row.avoided_nodes, 2)
    allowing, allowed = split_ints(row.allowed_gpu_types, 2)
    selection = _with_selectors(row, keys, jobs)
    if row.needs:
        selection = read_runtime_needs(row, keys).add_to(*selection)
    jobs, selectors, unmatched = selection
    return {
        "jobs": jobs,
        "avoided_nodes": AvoidedNodes(job=keys.jobs.of(avoiding), node=keys.nodes.of(avoided)),
        "allowed_gpu_types": AllowedGpuTypes(
            job=keys.jobs.of(allowing), gpu_type=keys.types.of(allowed)
        ),
        "selectors": selectors,
        "unmatched_nodes": unmatched,
    }


def _with_selectors(
    row: sa.Row[Any], keys: Keys, jobs: Jobs
) -> tuple[Jobs, Selectors, UnmatchedNodes]:
    """Return the jobs with their selectors, and the nodes that do not match these."""
    if not row.selections:
        return jobs, NO_SELECTORS, NO_UNMATCHED_NODES
    own, required, preferred = zip(*row.selections, strict=True)
    labels = [node[-1] for node in row.nodes]
    selectors, unmatched, stated = tabulate_selectors(required, preferred, labels)
    at, columns = keys.jobs.of(np.array(own, np.int64)), dict[str, Any]()
    for name, indices in stated.items():
        columns[name] = np.array(getattr(jobs, name))
        columns[name][at] = indices
    return replace(jobs, **columns), selectors, unmatched
