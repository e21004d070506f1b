"""Reservations of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tessera.formulation.records.reservations import ReservationRecord, ReservationSpec


class ReservationWriter(Protocol):
    """Changes of reservations in one transaction.

    If a version is None, it matches any stored version.
    """

    def create_reservation(self, cluster: str, spec: ReservationSpec) -> ReservationRecord:
        """Create a reservation, and request a round.

        Raises:
            NotFound: the cluster.
            AlreadyExists: the name.
            InvalidInput: an unknown node, GPU type or tenant; a window in the past; or more GPUs
                than other reservations leave.
            LimitReached: too many reservations.
        """
        ...

    def update_reservation(
        self,
        cluster: str,
        name: str,
        start_s: float | None,
        end_s: float | None,
        version: int | None,
    ) -> ReservationRecord:
        """Change the times of a reservation. A time that is None stays.

        Raises:
            NotFound: the cluster, or the reservation.
            StaleEtag: another ``version`` is stored.
            InvalidInput: as for ``create_reservation``.
        """
        ...

    def delete_reservations(
        self, cluster: str, names: Sequence[str], *, allow_missing: bool = False
    ) -> None:
        """Delete reservations, all or none.

        Raises:
            NotFound: the cluster, or a reservation unless ``allow_missing``.
        """
        ...


class ReservationStore(Protocol):
    """The part of a store that keeps reservations."""

    def list_reservations(self, cluster: str) -> list[ReservationRecord]:
        """Return the reservations by start, those that have ended, too. Raises NotFound (the cluster)."""
        ...

    def get_reservation(self, cluster: str, name: str) -> ReservationRecord:
        """Return a reservation. Raises NotFound (the cluster, the reservation)."""
        ...
