"""The reservations of a cluster that have not ended, with their nodes and the jobs they serve."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import numpy as np
import sqlalchemy as sa

from tessera.db.base.rows import json_rows
from tessera.db.rounds.snapshot.keys import KeyIndex, Keys, split_ints, split_rows
from tessera.db.schema.tables import LIVE
from tessera.formulation.state.reserved import Entitlements, Reservations, ReservedNodes

_SERVED = f"""
reservations r CROSS JOIN LATERAL (
    WITH RECURSIVE below AS (
        SELECT n.id, n.name FROM tenants n WHERE n.cluster_id = r.cluster_id AND n.name = r.tenant
        UNION SELECT n.id, n.name FROM tenants n JOIN below b ON n.parent_id = b.id
    ) SELECT array_agg(b.name) AS names FROM below b
) served JOIN jobs j ON j.cluster_id = r.cluster_id
WHERE r.cluster_id = c.id AND r.end_at > now() AND j.{LIVE} AND NOT r.maintenance
    AND CASE r.tenant WHEN '' THEN j.labels->>r.label_key = r.label_value
        ELSE j.tenant = r.tenant OR j.tenant = ANY(served.names) END
"""  # noqa: S608 - a constant of db
"""The jobs that reservations serve. Those of a tenant serve the tenants below it, too."""

TABLES: Final = {
    "reservations": json_rows(
        "r.id, r.name, extract(epoch FROM r.start_at)::float8, extract(epoch FROM r.end_at)::float8,"
        " coalesce(r.gpu_type_id, 0), r.gpus, r.maintenance",
        "reservations r WHERE r.cluster_id = c.id AND r.end_at > now()",
        "r.start_at, r.name",
    ),
    "reserved_nodes": json_rows(
        "r.id, x.node_id",
        "reservations r JOIN reservation_nodes x ON x.reservation_id = r.id"
        " JOIN nodes n ON n.id = x.node_id WHERE r.cluster_id = c.id AND r.end_at > now()",
        "r.start_at, r.name, n.name",
    ),
    "entitlements": json_rows(
        "r.id, j.id",
        _SERVED,
        "r.start_at, r.name, j.id",
    ),
}
"""Subqueries for the tables of a cluster (c)."""


class ReservationFacts(TypedDict):
    """The facts of a snapshot on reservations."""

    reservations: Reservations
    reserved_nodes: ReservedNodes
    entitlements: Entitlements


def read_reservations(row: sa.Row[Any], keys: Keys) -> ReservationFacts:
    """Return the facts in a row that has the subqueries of ``TABLES``."""
    own, names, start_s, end_s, types, gpus, maintenance = split_rows(row.reservations, 7)
    of_nodes, nodes = split_ints(row.reserved_nodes, 2)
    of_jobs, jobs = split_ints(row.entitlements, 2)
    reservations = KeyIndex(own)
    return {
        "reservations": Reservations(
            name=names,
            start_s=np.array(start_s, np.float64),
            end_s=np.array(end_s, np.float64),
            gpu_type=keys.types.of(np.array(types, np.int64)),
            gpus=np.array(gpus, np.int64),
            maintenance=np.array(maintenance, np.bool_),
        ),
        "reserved_nodes": ReservedNodes(
            reservation=reservations.of(of_nodes), node=keys.nodes.of(nodes)
        ),
        "entitlements": Entitlements(reservation=reservations.of(of_jobs), job=keys.jobs.of(jobs)),
    }
