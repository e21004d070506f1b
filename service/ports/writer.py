"""All changes that may be made in one transaction, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tessera.formulation.records.store import Request
from tessera.service.ports.clusters import ClusterWriter
from tessera.service.ports.estimates import EstimateWriter
from tessera.service.ports.jobs import JobWriter
from tessera.service.ports.networks import NetworkWriter
from tessera.service.ports.policies import PolicyWriter
from tessera.service.ports.reservations import ReservationWriter
from tessera.service.ports.tenants import TenantWriter
from tessera.service.ports.webhooks import WebhookWriter


class Writer(
    ClusterWriter,
    TenantWriter,
    JobWriter,
    PolicyWriter,
    ReservationWriter,
    EstimateWriter,
    NetworkWriter,
    WebhookWriter,
    Protocol,
):
    """A set of changes inside one transaction of ``Transactions.write``."""


class Transactions(Protocol):
    """The part of a store that changes it."""

    def write(
        self,
        request: Request | None,
        work: Callable[[Writer], bytes],
        *,
        validate_only: bool = False,
    ) -> bytes:
        """Run ``work`` in one transaction and return the bytes that it returns.

        With a request id those bytes are stored: if the same request is repeated, they are returned
        and ``work`` does not run. With ``validate_only`` everything is checked and rolled back.

        Raises:
            RequestIdReused: the id was used with another method or body.
        """
        ...
