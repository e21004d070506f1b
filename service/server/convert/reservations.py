"""Reservations and maintenance windows."""

from __future__ import annotations

from typing import Final

from tessera.formulation.base import limits
from tessera.formulation.base.access import Identity
from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.v1 import reservations_pb2 as pb

MAX_REASON: Final = 300
MAX_LABEL_KEY: Final = 63
MAX_LABEL_VALUE: Final = 255
"""Largest numbers of characters in the reason of a reservation, and in a label's key and value."""

MAX_NODES: Final = 10_000
"""Largest number of nodes of a reservation."""


def to_reservation(
    field: str, cluster: str, message: pb.Reservation, now_s: float
) -> ReservationSpec:
    """Return the reservation, which must belong to ``cluster``. Without a start it begins now."""
    m = message
    if m.nodes:
        fields.require_batch_size(f"{field}.nodes", len(m.nodes), MAX_NODES)
    parent, name = names.parse_reservation(f"{field}.name", m.name)
    names.require_parent(f"{field}.name", parent, cluster)
    return ReservationSpec(
        name=name,
        start_s=fields.seconds_since_1970(f"{field}.start_time", m.start_time)
        if m.HasField("start_time")
        else now_s,
        end_s=fields.seconds_since_1970(f"{field}.end_time", m.end_time),
        gpu_type=names.require_gpu_type(f"{field}.gpu_type", m.gpu_type) if m.gpu_type else "",
        gpus=fields.require_whole(f"{field}.gpus", m.gpus, 0, limits.MAX_QUOTA),
        nodes=tuple(
            names.require_identifier(f"{field}.nodes[{i}]", n) for i, n in enumerate(m.nodes)
        ),
        tenant=names.require_identifier(f"{field}.tenant", m.tenant) if m.tenant else "",
        label_key=fields.require_text(f"{field}.label_key", m.label_key, MAX_LABEL_KEY),
        label_value=fields.require_text(f"{field}.label_value", m.label_value, MAX_LABEL_VALUE),
        maintenance=m.maintenance,
        reason=fields.require_text(f"{field}.reason", m.reason, MAX_REASON),
    )


def of_reservation(
    cluster: str, record: ReservationRecord, identity: Identity | None = None
) -> pb.Reservation:
    """Return the message of a stored reservation.

    An ``identity`` that may not see the tenant that it serves sees neither that nor the reason. One
    that sees only some tenants sees no label and no reason.
    """
    spec = record.spec
    sees = identity is None or identity.tenants is None or spec.maintenance
    if identity is not None and spec.tenant:
        sees = sees or identity.sees_tenant(spec.tenant)
    state = pb.Reservation.PLANNED
    if record.ended:
        state = pb.Reservation.ENDED
    elif record.active:
        state = pb.Reservation.ACTIVE
    return pb.Reservation(
        name=names.reservation_name(cluster, spec.name),
        start_time=fields.timestamp_of(spec.start_s),
        end_time=fields.timestamp_of(spec.end_s),
        gpu_type=spec.gpu_type,
        gpus=spec.gpus,
        nodes=spec.nodes,
        tenant=spec.tenant if sees else "",
        label_key=spec.label_key if sees else "",
        label_value=spec.label_value if sees else "",
        maintenance=spec.maintenance,
        reason=spec.reason if sees else "",
        state=state,
        etag=fields.etag_of(record.version),
        create_time=fields.timestamp_of(record.created_s),
    )
