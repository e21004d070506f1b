"""Webhooks: their URLs, the events and labels that they report, and their state."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.webhooks import WebhookEvent, WebhookRecord, WebhookSpec
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.generic import values_of
from tessera.service.server.convert.jobs import to_labels
from tessera.service.server.webhooks.sending import SendingOptions, check_url
from tessera.v1 import webhooks_pb2 as pb


def to_webhook(
    field: str,
    name: str,
    message: pb.Webhook,
    options: SendingOptions,
    *,
    salt: str,
    created_by: str,
) -> WebhookSpec:
    """Return the requested webhook. Its name and its output-only fields are ignored."""
    check_url(f"{field}.url", message.url, options)
    if message.all_tenants and message.tenant:
        raise InvalidInput(f"{field}.tenant", "contradicts all_tenants; leave one of them out")
    return WebhookSpec(
        name=name,
        url=message.url,
        salt=salt,
        tenant=fields.require_text(f"{field}.tenant", message.tenant, 100),
        all_tenants=message.all_tenants,
        events=_events(f"{field}.events", message.events),
        labels=to_labels(f"{field}.labels", message.labels),
        created_by=created_by,
    )


def _events(field: str, words: Sequence[str]) -> tuple[WebhookEvent, ...]:
    if len(words) > len(WebhookEvent):
        raise InvalidInput(field, f"must be at most {len(WebhookEvent)}; leave it out for all")
    known = {event.value for event in WebhookEvent}
    for i, word in enumerate(words):
        if word not in known:
            raise InvalidInput(f"{field}[{i}]", f"must be one of {', '.join(WebhookEvent)}")
    return tuple(dict.fromkeys(map(WebhookEvent, words)))


def of_webhook(record: WebhookRecord) -> pb.Webhook:
    """Return the message of a stored webhook, without its secret."""
    message = pb.Webhook(
        **values_of(record.spec, pb.Webhook, "name"),
        **values_of(record, pb.Webhook),
        name=names.webhook_name(record.cluster, record.spec.name),
    )
    if record.delivered_s is not None:
        message.delivery_time.CopyFrom(fields.timestamp_of(record.delivered_s))
    return message
