"""The store of webhooks on PostgreSQL. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection

from tessera.db import migrate, webhooks
from tessera.db.engine import Database
from tessera.formulation.webhooks import ClaimedWebhook, WebhookRecord


class PostgresWebhookStore:
    """The store of ``tessera.service.ports.webhooks.WebhookStore`` on PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = migrate.MigratedDatabase(database.engine)

    def get_webhook(
        self, cluster: str, name: str, tenants: Collection[str] | None
    ) -> WebhookRecord:
        """Return a webhook."""
        with self._database.read() as connection:
            return webhooks.get_webhook(connection, cluster, name, tenants)

    def list_webhooks(
        self, cluster: str, after: str, limit: int, tenants: Collection[str] | None
    ) -> list[WebhookRecord]:
        """Return webhooks by name."""
        with self._database.read() as connection:
            return webhooks.list_webhooks(connection, cluster, after, limit, tenants)

    def claim_webhook(self) -> ClaimedWebhook | None:
        """Claim a webhook that has events to deliver."""
        return self._database.write(webhooks.claim_webhook)

    def note_delivery(self, webhook: ClaimedWebhook, number: int) -> bool:
        """Remove a delivered event."""
        return self._database.write(lambda c: webhooks.note_delivery(c, webhook, number))

    def note_failure(self, webhook: ClaimedWebhook, error: str) -> bool:
        """Note that the oldest event was not delivered."""
        return self._database.write(lambda c: webhooks.note_failure(c, webhook, error))

    def release_webhook(self, webhook: ClaimedWebhook) -> None:
        """Leave a claimed webhook to any server."""
        self._database.write(lambda c: webhooks.release_webhook(c, webhook))
