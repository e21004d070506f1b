"""Webhooks and the events that are delivered to them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tessera.formulation.webhooks import ClaimedWebhook, WebhookRecord, WebhookSpec


class WebhookWriter(Protocol):
    """Changes of webhooks in one transaction."""

    def add_webhook(self, cluster: str, spec: WebhookSpec) -> WebhookRecord:
        """Store a webhook. Raises NotFound (the cluster), AlreadyExists, LimitReached."""
        ...

    def delete_webhook(self, cluster: str, name: str, tenants: Collection[str] | None) -> None:
        """Delete a webhook with its events.

        Callers bound to ``tenants`` see only those of them; None sees all. Raises NotFound.
        """
        ...

    def revive_webhook(self, cluster: str, name: str) -> None:
        """Let a webhook that failed get its events at once, if there is one."""
        ...


class WebhookStore(Protocol):
    """The store of webhooks, of which any server may claim some to deliver to.

    Callers bound to ``tenants`` see only the webhooks of these; None sees all.
    """

    def get_webhook(
        self, cluster: str, name: str, tenants: Collection[str] | None
    ) -> WebhookRecord:
        """Return a webhook. Raises NotFound."""
        ...

    def list_webhooks(
        self, cluster: str, after: str, limit: int, tenants: Collection[str] | None
    ) -> list[WebhookRecord]:
        """Return up to ``limit`` webhooks after a name, by name."""
        ...

    def claim_webhook(self) -> ClaimedWebhook | None:
        """Return a webhook that has events to deliver now, which no other server has; None if none has."""
        ...

    def note_delivery(self, webhook: ClaimedWebhook, number: int) -> bool:
        """Remove a delivered event; return whether the webhook is still claimed by the caller."""
        ...

    def note_failure(self, webhook: ClaimedWebhook, error: str) -> bool:
        """Note that the oldest event was not delivered; return whether the webhook is dead now."""
        ...

    def release_webhook(self, webhook: ClaimedWebhook) -> None:
        """Leave a claimed webhook to any server."""
        ...
