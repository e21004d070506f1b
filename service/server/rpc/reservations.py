"""The calls of tessera.v1.Clusters on reservations and maintenance windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from google.protobuf.empty_pb2 import Empty

from tessera.db.clusters.reservations import (
    create_reservation,
    delete_reservations,
    get_reservation,
    list_reservations,
    update_reservation,
)
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.access import IDENTITY
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import reservations as convert
from tessera.service.server.rpc.paging import page_of
from tessera.v1 import reservations_pb2 as pb

MAX_RESERVATIONS: Final = 1000
"""Largest number of reservations in one call."""


class ReservationCalls:
    """The calls on reservations, from the store. They block."""

    def __init__(self, store: Store, wall_s: Callable[[], float]) -> None:
        self._store, self._wall_s = store, wall_s

    def create(self, request: pb.CreateReservationRequest) -> pb.Reservation:
        """Create a reservation."""
        cluster = names.parse_cluster("parent", request.parent)
        spec = convert.to_reservation("reservation", cluster, request.reservation, self._wall_s())
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            record = create_reservation(connection, cluster, spec)
            return convert.of_reservation(cluster, record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Reservation.FromString(kept)

    def get(self, request: pb.GetReservationRequest) -> pb.Reservation:
        """Return a reservation."""
        cluster, name = names.parse_reservation("name", request.name)
        record = self._store.read(get_reservation, cluster, name)
        return convert.of_reservation(cluster, record, IDENTITY.get())

    def list(self, request: pb.ListReservationsRequest) -> pb.ListReservationsResponse:
        """Return a page of reservations, by id."""
        cluster = names.parse_cluster("parent", request.parent)
        page = page_of(request, request.page_size, request.page_token, most=MAX_RESERVATIONS)
        stored = sorted(self._store.read(list_reservations, cluster), key=lambda r: r.spec.name)
        start = bisect_right(stored, page.cursor, key=lambda r: r.spec.name)
        shown, more = stored[start : start + page.size], len(stored) > start + page.size
        return pb.ListReservationsResponse(
            reservations=[convert.of_reservation(cluster, r, IDENTITY.get()) for r in shown],
            next_page_token=page.token(shown[-1].spec.name if more else ""),
        )

    def update(self, request: pb.UpdateReservationRequest) -> pb.Reservation:
        """Change the times of a reservation."""
        cluster, name = names.parse_reservation("name", request.name)
        start_s, end_s = (
            fields.seconds_since_1970(field, getattr(request, field))
            if request.HasField(field)
            else None
            for field in ("start_time", "end_time")
        )
        version = fields.version_of(request.etag)
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            record = update_reservation(connection, cluster, name, start_s, end_s, version)
            return convert.of_reservation(cluster, record).SerializeToString()

        kept = self._store.write(key, work, validate_only=request.validate_only)
        return pb.Reservation.FromString(kept)

    def delete(self, request: pb.DeleteReservationsRequest) -> Empty:
        """Delete reservations, all or none."""
        cluster = names.parse_cluster("parent", request.parent)
        fields.require_batch_size("names", len(request.names), MAX_RESERVATIONS)
        reservations = []
        for i, name in enumerate(request.names):
            parent, reservation = names.parse_reservation(f"names[{i}]", name)
            names.require_parent(f"names[{i}]", parent, cluster)
            reservations.append(reservation)
        fields.require_distinct((f"names[{i}]", name) for i, name in enumerate(reservations))
        key = fields.request_key(request, request.request_id)

        def work(connection: Connection) -> bytes:
            delete_reservations(
                connection, cluster, reservations, allow_missing=request.allow_missing
            )
            return b""

        self._store.write(key, work, validate_only=request.validate_only)
        return Empty()
