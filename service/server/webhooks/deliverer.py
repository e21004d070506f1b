"""The delivery of events to webhooks in the background, by any replica.

Each replica claims a webhook before it delivers to it, so events arrive in order and usually once. An
event may arrive again if a replica dies between a delivery and its record.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tessera.db.base.webhooks import claim_webhook, note_delivery, note_failure, release_webhook
from tessera.db.store.store import Store
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import Unavailable
from tessera.formulation.records.webhooks import ClaimedWebhook, derive_secret
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.tasks.noticed_task import NoticedTask
from tessera.service.server.webhooks.sending import Sender

log = logging.getLogger(__name__)

THREADS: Final = 4
"""Number of webhooks to which a server delivers at the same time."""

TURN_S: Final = 20.0
"""Time after which a webhook leaves its thread to others. It is shorter than the time of a claim."""

RETRY_S: Final = 5.0
"""Seconds between checks of the store when no notice arrives, as for deliveries to be tried again."""


class WebhookDeliverer(NoticedTask):
    """A task that delivers events as soon as they are stored, and tries failed deliveries again.

    ``calls`` are its threads, ``THREADS`` of them. ``key`` is the key from which secrets are derived.
    """

    def __init__(
        self, store: Store, sender: Sender, calls: Calls, clock: Clock, key: bytes
    ) -> None:
        super().__init__(
            log, "events are not delivered yet", event="webhooks_failed", retry_s=RETRY_S
        )
        self._store, self._sender, self._calls = store, sender, calls
        self._clock, self._key = clock, key

    async def work(self) -> None:
        """Deliver all events that are due. Raises what the store raises."""

        async def take_turns() -> None:
            while await self._calls.run(self.take_turn):
                pass

        await asyncio.gather(*(take_turns() for _ in range(THREADS)))

    def take_turn(self) -> bool:
        """Deliver to one webhook that has events; return whether there was one. Blocks."""
        webhook = self._store.update(claim_webhook)
        if webhook is None:
            return False
        end_s = self._clock.monotonic_s() + TURN_S
        secret = derive_secret(self._key, webhook.salt)
        for delivery in webhook.deliveries:
            if self._clock.monotonic_s() >= end_s:
                break
            try:
                self._sender.send(webhook.url, secret, delivery)
            except Unavailable as error:
                self._note_failure(webhook, str(error))
                return True
            if not self._store.update(note_delivery, webhook, delivery.number):
                return True  # another server has it now
        self._store.update(release_webhook, webhook)
        return True

    def _note_failure(self, webhook: ClaimedWebhook, error: str) -> None:
        is_dead = self._store.update(note_failure, webhook, error)
        log.log(
            logging.WARNING if is_dead else logging.INFO,
            "a webhook failed too often and is dead now"
            if is_dead
            else "a webhook failed; it is tried again",
            extra={
                "event": "webhook_failed",
                "cluster": webhook.cluster,
                "webhook": webhook.name,
                "error": error,
            },
        )
