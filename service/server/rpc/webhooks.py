"""tessera.v1.Webhooks: the webhooks of tenants."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from tessera.db.base.webhooks import (
    add_webhook,
    delete_webhook,
    get_webhook,
    list_webhooks,
    revive_webhook,
)
from tessera.db.store.reads import get_cluster
from tessera.db.store.store import Connection, Store
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import NotAllowed, Unavailable
from tessera.formulation.records.webhooks import TEST_EVENT, Delivery, derive_secret
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert import webhooks as convert
from tessera.service.server.rpc.paging import page_of
from tessera.service.server.tasks.lanes import FairCalls, SizedCalls
from tessera.service.server.webhooks.sending import Sender
from tessera.v1 import webhooks_pb2 as pb
from tessera.v1 import webhooks_pb2_grpc

SALT_BYTES: Final = 16

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookParts:
    """The means by which a server sends to webhooks.

    ``key`` is None if its operator has not set one.
    """

    sender: Sender
    key: bytes | None


class WebhooksServicer(webhooks_pb2_grpc.WebhooksServicer):
    """The servicer of webhooks. ``sends`` are the threads of tests, which wait for other servers."""

    def __init__(
        self, store: Store, parts: WebhookParts, calls: SizedCalls, sends: FairCalls
    ) -> None:
        self._store, self._parts, self._calls, self._sends = store, parts, calls, sends

    async def CreateWebhook(
        self, request: pb.CreateWebhookRequest, context: _Context
    ) -> pb.Webhook:
        """Create a webhook."""
        return await self._calls.run(self._create, request)

    async def ListWebhooks(
        self, request: pb.ListWebhooksRequest, context: _Context
    ) -> pb.ListWebhooksResponse:
        """Return a page of webhooks by name."""
        return await self._calls.run(self._list, request)

    async def DeleteWebhook(
        self, request: pb.DeleteWebhookRequest, context: _Context
    ) -> pb.DeleteWebhookResponse:
        """Delete a webhook."""
        return await self._calls.run(self._delete, request)

    async def TestWebhook(
        self, request: pb.TestWebhookRequest, context: _Context
    ) -> pb.TestWebhookResponse:
        """Send a test event."""
        return await self._sends.run(self._test, request)

    def _create(self, request: pb.CreateWebhookRequest) -> pb.Webhook:
        cluster = names.parse_cluster("parent", request.parent)
        name = names.require_identifier("webhook_id", request.webhook_id)
        key, options = self._key(), self._parts.sender.options
        identity, webhook = IDENTITY.get(), pb.Webhook()
        webhook.CopyFrom(request.webhook)
        own = sorted(identity.tenants or ())
        if len(own) == 1 and not (webhook.tenant or webhook.all_tenants):
            webhook.tenant = own[0]  # as in a submission
        spec = convert.to_webhook(
            "webhook",
            name,
            webhook,
            options,
            salt=secrets.token_hex(SALT_BYTES),
            created_by=identity.subject,
        )

        if spec.all_tenants and identity.tenants is not None:
            raise NotAllowed("your identity is bound to tenants; name one of them as the tenant")
        identity.require_tenants(cluster, [] if spec.all_tenants else [spec.tenant])

        def work(connection: Connection) -> bytes:
            record = add_webhook(connection, cluster, spec)
            return convert.of_webhook(record).SerializeToString()

        asked = fields.request_key(request, request.request_id)
        kept = self._store.write(asked, work, validate_only=request.validate_only)
        message = pb.Webhook.FromString(kept)
        if not request.validate_only:  # the secret itself is stored nowhere
            stored = self._store.read(get_webhook, cluster, name, identity.tenants)
            message.secret = derive_secret(key, stored.spec.salt)
        return message

    def _list(self, request: pb.ListWebhooksRequest) -> pb.ListWebhooksResponse:
        cluster = names.parse_cluster("parent", request.parent)
        self._store.read(get_cluster, cluster)
        page = page_of(request, request.page_size, request.page_token, most=1000)
        tenants = IDENTITY.get().tenants
        found = self._store.read(list_webhooks, cluster, page.cursor, page.size + 1, tenants)
        shown = found[: page.size]
        return pb.ListWebhooksResponse(
            webhooks=map(convert.of_webhook, shown),
            next_page_token=page.token(shown[-1].spec.name if len(found) > page.size else ""),
        )

    def _delete(self, request: pb.DeleteWebhookRequest) -> pb.DeleteWebhookResponse:
        cluster, name = names.parse_webhook("name", request.name)
        tenants = IDENTITY.get().tenants

        def work(connection: Connection) -> bytes:
            delete_webhook(connection, cluster, name, tenants)
            return b""

        asked = fields.request_key(request, request.request_id)
        self._store.write(asked, work, validate_only=request.validate_only)
        return pb.DeleteWebhookResponse()

    def _test(self, request: pb.TestWebhookRequest) -> pb.TestWebhookResponse:
        cluster, name = names.parse_webhook("name", request.name)
        webhook = self._store.read(get_webhook, cluster, name, IDENTITY.get().tenants)
        secret = derive_secret(self._key(), webhook.spec.salt)
        facts = {"cluster": cluster, "webhook": name}
        try:
            delivery = Delivery(number=0, event=TEST_EVENT, facts=facts)
            self._parts.sender.send(webhook.spec.url, secret, delivery)
        except Unavailable as error:
            return pb.TestWebhookResponse(error=str(error))
        self._store.change(revive_webhook, cluster, name)
        return pb.TestWebhookResponse(delivered=True)

    def _key(self) -> bytes:
        """Return the server's key. Raises NotAllowed."""
        if self._parts.key is None:
            raise NotAllowed(
                "this server sends nothing to webhooks; its operator must set webhook_key_file"
            )
        return self._parts.key
