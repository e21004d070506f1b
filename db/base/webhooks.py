"""Webhooks, and the outbox of the events that are still to be delivered to them.

The transaction in which something happens to a job also writes the event for each webhook that
reports it. Changes of jobs are exclusive (``tessera.db.base.turn``), so the outbox has the order in which
they happened.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import sqlalchemy as sa

from tessera.db.base.documents import dump_json
from tessera.db.base.rows import enter_cluster
from tessera.formulation.base.errors import AlreadyExists, LimitReached, NotFound
from tessera.formulation.records.webhooks import (
    EVENT_OF,
    MAX_FAILURES,
    MAX_WEBHOOKS,
    ClaimedWebhook,
    Delivery,
    WebhookEvent,
    WebhookRecord,
    WebhookSpec,
    retry_after_s,
)

WEBHOOKS_CHANNEL: Final = "tessera_webhooks"
"""Channel that receives a notice when there are events to deliver."""

CLAIM_S: Final = 120.0
"""Seconds for which a server has a webhook to itself. If it dies, another goes on after them."""

EVENTS_PER_CLAIM: Final = 50

MAX_ERROR_CHARS: Final = 300

_EVENTS = ", ".join(f"('{event}', '{name}')" for event, name in EVENT_OF.items())

# A round's reasons may name jobs of other tenants. What a job's own program reported may not.
_WRITE = """
INSERT INTO webhook_events (webhook_id, at, event, document)
SELECT w.id, h.at, h.reported, jsonb_build_object(
    'cluster', c.name, 'job', j.name, 'tenant', j.tenant, 'labels', j.labels, 'state', h.state,
    'generation', j.generation, 'gpu_type', t.name, 'gpus', j.cell_gpus,
    'time', to_char(h.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
    'error', CASE WHEN h.reported IN ('crashed', 'failed') THEN h.detail #>> '{}' ELSE '' END)
FROM happened h JOIN jobs j ON j.id = h.job_id JOIN clusters c ON c.id = j.cluster_id
LEFT JOIN gpu_types t ON t.id = j.cell_type_id
JOIN webhooks w ON w.cluster_id = j.cluster_id AND NOT w.disabled
    AND (w.all_tenants OR w.tenant = j.tenant) AND j.labels @> w.labels
    AND (w.events = '{}' OR h.reported = ANY(w.events))
ORDER BY h.number, w.id
"""

RECORD_EVENTS = sa.text(f"""
WITH recorded AS (
    INSERT INTO job_history (job_id, at, event, state, detail)
    SELECT c.id, clock_timestamp(), c.event, c.state, c.detail
    FROM json_to_recordset(CAST(:rows AS json)) AS c(id bigint, event text, state text, detail jsonb)
    RETURNING id, job_id, at, event, state, detail
), happened AS (
    SELECT r.id AS number, r.job_id, r.at, r.state, r.detail, e.reported
    FROM recorded r JOIN (VALUES {_EVENTS}) AS e(event, reported) ON e.event = r.event
)
{_WRITE}
""")  # noqa: S608 - constants of formulation
"""The statement that adds to histories, and to the outboxes of webhooks."""

_RECORD_LAPSED = sa.text(f"""
WITH happened AS (
    SELECT j.id AS number, j.id AS job_id, clock_timestamp() AS at, j.state, jsonb '""' AS detail,
        '{WebhookEvent.DEADLINE_LAPSED}' COLLATE "C" AS reported
    FROM jobs j WHERE j.id = ANY(:jobs)
)
{_WRITE}
""")  # noqa: S608 - a constant of formulation

_NOTIFY = sa.text(f"SELECT pg_notify('{WEBHOOKS_CHANNEL}', '')")

_ADD = sa.text("""
INSERT INTO webhooks (cluster_id, name, tenant, all_tenants, url, events, labels, salt, created_by)
VALUES (:cluster, :name, :tenant, :all_tenants, :url, :events, CAST(:labels AS jsonb), :salt,
    :created_by)
ON CONFLICT DO NOTHING
""")

_COUNT = sa.text("""
SELECT count(*) FROM webhooks
WHERE cluster_id = :cluster AND tenant = :tenant AND all_tenants = :all_tenants
""")

_DELETE = sa.text("DELETE FROM webhooks WHERE cluster_id = :cluster AND name = :name")

_LIST = """
SELECT w.*, c.name AS cluster, extract(epoch FROM w.created_at)::float8 AS created_s,
    extract(epoch FROM w.delivered_at)::float8 AS delivered_s,
    extract(epoch FROM w.retry_at)::float8 AS retry_s,
    (SELECT count(*) FROM webhook_events e WHERE e.webhook_id = w.id) AS pending
FROM webhooks w JOIN clusters c ON c.id = w.cluster_id
"""

_LIST_AFTER = sa.text(
    _LIST + "WHERE c.name = :cluster AND w.name > :after AND (CAST(:tenants AS text[]) IS NULL"
    " OR (NOT w.all_tenants AND w.tenant = ANY(CAST(:tenants AS text[])))) ORDER BY w.name LIMIT :limit"
)

_GET = sa.text(_LIST + "WHERE c.name = :cluster AND w.name = :name")

_CLAIM = sa.text("""
UPDATE webhooks w SET claimed_until = clock_timestamp() + make_interval(secs => :claim_s)
FROM clusters c WHERE c.id = w.cluster_id AND w.id = (
    SELECT v.id FROM webhooks v
    WHERE NOT v.disabled AND coalesce(v.retry_at, '-infinity') <= clock_timestamp()
        AND coalesce(v.claimed_until, '-infinity') < clock_timestamp()
        AND EXISTS (SELECT FROM webhook_events e WHERE e.webhook_id = v.id)
    ORDER BY v.delivered_at NULLS FIRST, v.id LIMIT 1 FOR UPDATE SKIP LOCKED
)
RETURNING w.id, c.name AS cluster, w.name, w.url, w.salt, w.failures, w.claimed_until::text AS claim
""")

_OLDEST = sa.text("""
SELECT id, event, document FROM webhook_events WHERE webhook_id = :webhook ORDER BY id LIMIT :limit
""")

_DELIVERED = sa.text("""
WITH gone AS (DELETE FROM webhook_events WHERE id = :event RETURNING webhook_id)
UPDATE webhooks w SET delivered = w.delivered + 1, delivered_at = clock_timestamp(), failures = 0,
    last_error = '', retry_at = NULL
FROM gone g WHERE w.id = g.webhook_id
RETURNING w.claimed_until::text = :claim
""")

_FAILED = sa.text("""
UPDATE webhooks SET failures = failures + 1, last_error = :error, disabled = failures + 1 >= :most,
    retry_at = clock_timestamp() + make_interval(secs => :retry_s), claimed_until = NULL
WHERE id = :webhook AND claimed_until::text = :claim RETURNING disabled
""")

_RELEASE = sa.text("""
UPDATE webhooks SET claimed_until = NULL WHERE id = :webhook AND claimed_until::text = :claim
""")

_REVIVE = sa.text("""
UPDATE webhooks w SET disabled = false, failures = 0, last_error = '', retry_at = NULL
FROM clusters c WHERE c.id = w.cluster_id AND c.name = :cluster AND w.name = :name
""")


def notify_deliverers(connection: sa.Connection) -> None:
    """Notify servers after the commit that there are events to deliver."""
    connection.execute(_NOTIFY)


def record_lapsed_deadlines(connection: sa.Connection, jobs: Sequence[int]) -> None:
    """Write the events of ``jobs`` (keys) whose promised deadlines can no longer be met."""
    if jobs and connection.execute(_RECORD_LAPSED, {"jobs": list(jobs)}).rowcount:
        notify_deliverers(connection)


def add_webhook(connection: sa.Connection, cluster: str, spec: WebhookSpec) -> WebhookRecord:
    """Store a webhook.

    Raises:
        NotFound: the cluster. AlreadyExists: the webhook.
        LimitReached: the tenant would have too many.
    """
    key = enter_cluster(connection, cluster)
    values = {
        "cluster": key,
        "name": spec.name,
        "tenant": spec.tenant,
        "all_tenants": spec.all_tenants,
        "url": spec.url,
        "events": list(spec.events),
        "labels": dump_json(dict(spec.labels)),
        "salt": spec.salt,
        "created_by": spec.created_by,
    }
    if not connection.execute(_ADD, values).rowcount:
        raise AlreadyExists(f"clusters/{cluster}/webhooks/{spec.name}")
    if connection.execute(_COUNT, values).scalar_one() > MAX_WEBHOOKS:
        whose = "all tenants" if spec.all_tenants else f"tenant {spec.tenant!r}"
        raise LimitReached(f"there may be {MAX_WEBHOOKS} webhooks for {whose}; delete one of them")
    return get_webhook(connection, cluster, spec.name)


def delete_webhook(
    connection: sa.Connection, cluster: str, name: str, tenants: Collection[str] | None
) -> None:
    """Delete a webhook that callers bound to ``tenants`` (None: all) see. Raises NotFound."""
    get_webhook(connection, cluster, name, tenants)
    connection.execute(_DELETE, {"cluster": enter_cluster(connection, cluster), "name": name})


def get_webhook(
    connection: sa.Connection, cluster: str, name: str, tenants: Collection[str] | None = None
) -> WebhookRecord:
    """Return a webhook that callers bound to ``tenants`` (None: all) see. Raises NotFound."""
    row = connection.execute(_GET, {"cluster": cluster, "name": name}).mappings().one_or_none()
    sees = row is not None and (
        tenants is None or (not row["all_tenants"] and row["tenant"] in tenants)
    )
    if row is None or not sees:
        raise NotFound(f"clusters/{cluster}/webhooks/{name}")
    return _record(row)


def list_webhooks(
    connection: sa.Connection, cluster: str, after: str, limit: int, tenants: Collection[str] | None
) -> list[WebhookRecord]:
    """Return the webhooks after a name, by name. ``tenants`` is as in ``get_webhook``."""
    values = {
        "cluster": cluster,
        "after": after,
        "limit": limit,
        "tenants": None if tenants is None else sorted(tenants),
    }
    return [_record(row) for row in connection.execute(_LIST_AFTER, values).mappings()]


def _record(row: sa.RowMapping) -> WebhookRecord:
    return WebhookRecord(
        cluster=row["cluster"],
        spec=WebhookSpec(
            name=row["name"],
            url=row["url"],
            salt=row["salt"],
            tenant=row["tenant"],
            all_tenants=row["all_tenants"],
            events=tuple(map(WebhookEvent, row["events"])),
            labels=row["labels"],
            created_by=row["created_by"],
        ),
        created_s=row["created_s"],
        delivered=row["delivered"],
        delivered_s=row["delivered_s"],
        pending=row["pending"],
        failures=row["failures"],
        last_error=row["last_error"],
        retry_s=row["retry_s"],
        disabled=row["disabled"],
    )


def claim_webhook(connection: sa.Connection) -> ClaimedWebhook | None:
    """Claim a webhook that has events to deliver now, and return it, or None without one."""
    row = connection.execute(_CLAIM, {"claim_s": CLAIM_S}).one_or_none()
    if row is None:
        return None
    events = connection.execute(_OLDEST, {"webhook": row.id, "limit": EVENTS_PER_CLAIM})
    return ClaimedWebhook(
        key=row.id,
        claim=row.claim,
        cluster=row.cluster,
        name=row.name,
        url=row.url,
        salt=row.salt,
        failures=row.failures,
        deliveries=tuple(
            Delivery(number=number, event=event, facts=document)
            for number, event, document in events
        ),
    )


def note_delivery(connection: sa.Connection, webhook: ClaimedWebhook, number: int) -> bool:
    """Remove a delivered event; return whether the claim still holds, so that the next may follow."""
    values = {"event": number, "claim": webhook.claim}
    return bool(connection.execute(_DELIVERED, values).scalar())


def note_failure(connection: sa.Connection, webhook: ClaimedWebhook, error: str) -> bool:
    """Note that the oldest event was not delivered; return whether the webhook is disabled now."""
    values = {
        "webhook": webhook.key,
        "claim": webhook.claim,
        "error": error[:MAX_ERROR_CHARS],
        "most": MAX_FAILURES,
        "retry_s": retry_after_s(webhook.failures + 1),
    }
    return bool(connection.execute(_FAILED, values).scalar())


def release_webhook(connection: sa.Connection, webhook: ClaimedWebhook) -> None:
    """Leave a claimed webhook to any server."""
    connection.execute(_RELEASE, {"webhook": webhook.key, "claim": webhook.claim})


def revive_webhook(connection: sa.Connection, cluster: str, name: str) -> None:
    """Let a webhook get events again, at once."""
    if connection.execute(_REVIVE, {"cluster": cluster, "name": name}).rowcount:
        notify_deliverers(connection)
