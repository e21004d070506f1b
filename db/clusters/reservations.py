"""Reservations of GPUs and nodes, and maintenance windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tessera.db.base.rows import cluster_id
from tessera.db.base.turn import Turn, request_round
from tessera.db.estimates.workloads import require_types
from tessera.formulation.base.errors import (
    AlreadyExists,
    InvalidInput,
    LimitReached,
    NotFound,
    StaleEtag,
)
from tessera.formulation.records.reservations import (
    NodeSize,
    ReservationRecord,
    ReservationSpec,
    require_room,
)

PAST_S = 60.0
"""Seconds by which a start may lie in the past, as the clocks of users and of the database differ."""

MAX_RESERVATIONS = 1000
"""Largest number of reservations of a cluster that have not ended. Each adds rows to rounds."""

_FORGET = sa.text("""
DELETE FROM reservations WHERE cluster_id = :cluster AND end_at < now() - interval '30 days'
""")
"""The deletion of reservations that ended long ago, so that their number is bounded."""

_SELECT = """
SELECT r.id, r.name, r.version, extract(epoch FROM r.start_at)::float8 AS start_s,
    extract(epoch FROM r.end_at)::float8 AS end_s, coalesce(t.name, '') AS gpu_type, r.gpus,
    r.tenant, r.label_key, r.label_value, r.maintenance, r.reason,
    extract(epoch FROM r.created_at)::float8 AS created_s,
    r.start_at <= now() AND now() < r.end_at AS active, r.end_at <= now() AS ended,
    (SELECT coalesce(json_agg(n.name ORDER BY n.name), '[]') FROM reservation_nodes x
        JOIN nodes n ON n.id = x.node_id WHERE x.reservation_id = r.id) AS nodes
FROM reservations r LEFT JOIN gpu_types t ON t.id = r.gpu_type_id
WHERE r.cluster_id = :cluster
"""

_ALL = sa.text(_SELECT + "ORDER BY r.start_at, r.name")
_NAMED = sa.text(_SELECT + "AND r.name = :name")

_NODES = sa.text("""
SELECT n.id, n.name, n.gpus, t.name AS gpu_type FROM nodes n
JOIN gpu_types t ON t.id = n.gpu_type_id WHERE n.cluster_id = :cluster
""")

_KNOWS_TENANT = sa.text("""
SELECT EXISTS (SELECT FROM tenants n WHERE n.cluster_id = :cluster AND n.name = :tenant)
    OR EXISTS (SELECT FROM jobs j WHERE j.cluster_id = :cluster AND j.tenant = :tenant)
""")

_NOW = sa.text("SELECT extract(epoch FROM now())::float8")

_INSERT = sa.text("""
INSERT INTO reservations (cluster_id, name, start_at, end_at, gpu_type_id, gpus, tenant, label_key,
    label_value, maintenance, reason)
VALUES (:cluster, :name, to_timestamp(:start_s), to_timestamp(:end_s), :gpu_type_id, :gpus, :tenant,
    :label_key, :label_value, :maintenance, :reason)
ON CONFLICT (cluster_id, name) DO NOTHING RETURNING id
""")

_INSERT_NODES = sa.text("""
INSERT INTO reservation_nodes (reservation_id, node_id)
SELECT :reservation, n.id FROM nodes n WHERE n.cluster_id = :cluster AND n.name = ANY(:nodes)
""")

_UPDATE = sa.text("""
UPDATE reservations SET start_at = to_timestamp(:start_s), end_at = to_timestamp(:end_s),
    version = version + 1
WHERE cluster_id = :cluster AND name = :name
""")

_DELETE = sa.text("""
DELETE FROM reservations WHERE cluster_id = :cluster AND name = ANY(:names) RETURNING name
""")


def list_reservations(connection: sa.Connection, cluster: str) -> list[ReservationRecord]:
    """Return the reservations by start, those that have ended, too. Raises NotFound (the cluster)."""
    return _stored(connection, cluster_id(connection, cluster))


def get_reservation(connection: sa.Connection, cluster: str, name: str) -> ReservationRecord:
    """Return a reservation. Raises NotFound (the cluster, the reservation)."""
    return _named(connection, cluster_id(connection, cluster), cluster, name)


def create_reservation(
    connection: sa.Connection, cluster: str, spec: ReservationSpec
) -> ReservationRecord:
    """Create a reservation, and request a round, which heeds it.

    Raises:
        NotFound: the cluster. AlreadyExists: the name.
        InvalidInput: unknown nodes, type or tenant; a window in the past; or more GPUs than others
            leave.
        LimitReached: too many reservations.
    """
    turn = Turn.take(connection, cluster)
    key = turn.cluster
    _require_future(connection, spec, moved=True)
    if (
        spec.tenant
        and not connection.execute(_KNOWS_TENANT, {"cluster": key, "tenant": spec.tenant}).scalar()
    ):
        raise InvalidInput(
            "tenant",
            f"no tenant {spec.tenant} has settings or jobs; `tessera tenants apply` makes one",
        )
    types = require_types(connection, key, {spec.gpu_type} - {""})
    _require_room(turn, spec)
    values = {
        "cluster": key,
        "name": spec.name,
        "start_s": spec.start_s,
        "end_s": spec.end_s,
        "gpu_type_id": types[spec.gpu_type].id if spec.gpu_type else None,
        "gpus": spec.gpus,
        "tenant": spec.tenant,
        "label_key": spec.label_key,
        "label_value": spec.label_value,
        "maintenance": spec.maintenance,
        "reason": spec.reason,
    }
    reservation = connection.execute(_INSERT, values).scalar()
    if reservation is None:
        raise AlreadyExists(f"clusters/{turn.name}/reservations/{spec.name}")
    connection.execute(_FORGET, {"cluster": key})
    nodes = {"reservation": reservation, "cluster": key, "nodes": list(spec.nodes)}
    connection.execute(_INSERT_NODES, nodes)
    request_round(connection, key)
    return _named(connection, key, turn.name, spec.name)


def update_reservation(
    connection: sa.Connection,
    cluster: str,
    name: str,
    start_s: float | None,
    end_s: float | None,
    version: int | None,
) -> ReservationRecord:
    """Change the times of a reservation. A time that is None stays.

    Raises:
        NotFound: the cluster, or the reservation.
        StaleEtag: it has another version.
        InvalidInput: as for ``create_reservation``.
    """
    turn = Turn.take(connection, cluster)
    stored = _named(connection, turn.cluster, turn.name, name)
    if version not in (None, stored.version):
        raise StaleEtag(f"clusters/{turn.name}/reservations/{name}")
    spec = replace(
        stored.spec,
        start_s=stored.spec.start_s if start_s is None else start_s,
        end_s=stored.spec.end_s if end_s is None else end_s,
    )
    _require_future(connection, spec, moved=spec.start_s != stored.spec.start_s)
    _require_room(turn, spec)
    values = {"cluster": turn.cluster, "name": name, "start_s": spec.start_s, "end_s": spec.end_s}
    connection.execute(_UPDATE, values)
    request_round(connection, turn.cluster)
    return _named(connection, turn.cluster, turn.name, name)


def delete_reservations(
    connection: sa.Connection, cluster: str, names: Sequence[str], *, allow_missing: bool = False
) -> None:
    """Delete reservations, all or none.

    Raises NotFound: the cluster, or a reservation unless ``allow_missing``.
    """
    turn = Turn.take(connection, cluster)
    values = {"cluster": turn.cluster, "names": list(names)}
    gone = connection.execute(_DELETE, values).scalars().all()
    missing = set(names) - set(gone)
    if missing and not allow_missing:
        raise NotFound(f"clusters/{turn.name}/reservations/{min(missing)}")
    if gone:
        request_round(connection, turn.cluster)


def _require_future(connection: sa.Connection, spec: ReservationSpec, *, moved: bool) -> None:
    """Check that the window is not over, and that a start that was ``moved`` is not in the past."""
    now_s = float(connection.execute(_NOW).scalar_one())
    if spec.end_s <= now_s:
        raise InvalidInput("end_time", f"{spec.name} would end in the past")
    if moved and spec.start_s < now_s - PAST_S:
        raise InvalidInput(
            "start_time", f"{spec.name} would begin in the past; leave the start out to begin now"
        )


def _require_room(turn: Turn, spec: ReservationSpec) -> None:
    """Refuse what others leave no room for, and one more reservation than there may be."""
    rows = turn.connection.execute(_NODES, {"cluster": turn.cluster})
    nodes = {row.name: NodeSize(gpu_type=row.gpu_type, gpus=row.gpus) for row in rows}
    current = [record.spec for record in _stored(turn.connection, turn.cluster) if not record.ended]
    if len(current) >= MAX_RESERVATIONS and all(stored.name != spec.name for stored in current):
        raise LimitReached(
            f"cluster {turn.name} has {len(current)} reservations, which is the limit; delete some"
        )
    require_room(spec, current, nodes)


def _stored(connection: sa.Connection, cluster: int) -> list[ReservationRecord]:
    return [_record(row) for row in connection.execute(_ALL, {"cluster": cluster})]


def _named(connection: sa.Connection, key: int, cluster: str, name: str) -> ReservationRecord:
    row = connection.execute(_NAMED, {"cluster": key, "name": name}).one_or_none()
    if row is None:
        raise NotFound(f"clusters/{cluster}/reservations/{name}")
    return _record(row)


def _record(row: sa.Row[Any]) -> ReservationRecord:
    return ReservationRecord(
        spec=ReservationSpec(
            name=row.name,
            start_s=row.start_s,
            end_s=row.end_s,
            gpu_type=row.gpu_type,
            gpus=row.gpus,
            nodes=tuple(row.nodes),
            tenant=row.tenant,
            label_key=row.label_key,
            label_value=row.label_value,
            maintenance=row.maintenance,
            reason=row.reason,
        ),
        version=row.version,
        created_s=row.created_s,
        active=row.active,
        ended=row.ended,
    )
