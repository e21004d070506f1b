"""Tables of webhooks, and of the events that are still to be delivered to them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from tessera.db.schema.tables.columns import (
    count_column,
    flag_column,
    id_column,
    metadata,
    moment_column,
    names_column,
    reference_column,
    text_column,
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    id_column(),
    reference_column("cluster_id", "clusters.id"),
    text_column("name"),
    text_column("tenant", default=""),  # whose jobs it reports
    flag_column("all_tenants"),
    text_column("url"),
    names_column("events"),  # of ``WebhookEvent``
    sa.Column("labels", JSONB, nullable=False),  # that a job must have
    text_column("salt"),  # from which servers derive its secret with their key
    text_column("created_by"),
    moment_column("created_at"),
    count_column("delivered"),
    moment_column("delivered_at", nullable=True),  # the last time
    count_column("failures"),  # consecutive ones
    text_column("last_error", default=""),
    moment_column("retry_at", nullable=True),  # nothing is sent before this time
    moment_column("claimed_until", nullable=True),  # a server delivers to it until then
    flag_column("disabled"),  # it failed too often, and gets no events until a test succeeds
    sa.UniqueConstraint("cluster_id", "name"),
    sa.CheckConstraint("delivered >= 0 AND failures >= 0", name="counts"),
    sa.CheckConstraint("jsonb_typeof(labels) = 'object'", name="labels"),
)

webhook_events = sa.Table(
    "webhook_events",
    metadata,
    id_column(),  # increases in the order of the events of a cluster
    reference_column("webhook_id", "webhooks.id", ondelete="CASCADE"),
    moment_column("at"),
    text_column("event"),
    sa.Column("document", JSONB, nullable=False),  # the body, without what is added when it is sent
    sa.Index(None, "webhook_id", "id"),
)
"""The events that are not delivered yet, written by the transactions in which they happened."""
