"""Webhooks: URLs that are sent what happens to jobs, and the form in which they are sent it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tessera.formulation.base.secrets import HOOK_PREFIX, hide_secrets
from tessera.formulation.job.lifecycle import JobEvent

MAX_FAILURES: Final = 10
"""Consecutive failures after which a webhook is disabled: about three hours after the first one."""

FIRST_RETRY_S: Final = 15.0
"""Seconds until a delivery is tried again. Each further failure doubles them."""

MAX_RETRY_S: Final = 3600.0

MAX_WEBHOOKS: Final = 50
"""The largest number of webhooks of a tenant, or for all tenants, in a cluster."""

SIGNATURE_HEADER: Final = "Tessera-Signature"
_VERSION: Final = 1
"""The version of the body. Further fields may be added without another one."""


class WebhookEvent(StrEnum):
    """An event that webhooks report."""

    STARTED = "started"
    MOVED = "moved"  # it goes on with other GPUs, or with another execution plan
    SUSPENDED = "suspended"
    NODE_LOST = "node_lost"  # a node that ran part of it is gone; it is queued again
    CRASHED = "crashed"  # it failed, and is tried again
    FAILED = "failed"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    DEADLINE_LAPSED = "deadline_lapsed"  # its promised deadline can no longer be met


EVENT_OF: Final[dict[JobEvent, WebhookEvent]] = {
    JobEvent.START: WebhookEvent.STARTED,
    JobEvent.MOVE: WebhookEvent.MOVED,
    JobEvent.SUSPEND: WebhookEvent.SUSPENDED,
    JobEvent.LOST: WebhookEvent.NODE_LOST,
    JobEvent.CRASH: WebhookEvent.CRASHED,
    JobEvent.FAIL: WebhookEvent.FAILED,
    JobEvent.FINISH: WebhookEvent.FINISHED,
    JobEvent.CANCEL: WebhookEvent.CANCELLED,
    JobEvent.REJECT: WebhookEvent.REJECTED,
}
"""The events of jobs that webhooks report."""

TEST_EVENT: Final = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSpec:
    """A webhook as requested.

    ``salt`` is random. Servers derive the secret from it with a key of theirs, which no database has.
    """

    name: str
    url: str
    salt: str = field(repr=False)
    tenant: str = ""
    all_tenants: bool = False
    events: tuple[WebhookEvent, ...] = ()  # () for all
    labels: Mapping[str, str] = field(default_factory=dict)
    created_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """A webhook as stored. Times are in seconds since 1970."""

    cluster: str
    spec: WebhookSpec
    created_s: float
    delivered: int = 0
    delivered_s: float | None = None
    pending: int = 0
    failures: int = 0  # consecutive ones
    last_error: str = ""
    retry_s: float | None = None
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An event to send: its number and the facts of its body."""

    number: int
    event: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedWebhook:
    """A webhook that a server has claimed, with its oldest events in order.

    ``claim`` proves that no other server has claimed it since.
    """

    key: int
    claim: str
    cluster: str
    name: str
    url: str
    salt: str = field(repr=False)
    failures: int
    deliveries: tuple[Delivery, ...]


def retry_after_s(failures: int) -> float:
    """Return the seconds until a delivery is tried again after ``failures`` (at least 1)."""
    return min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 32))


def derive_secret(key: bytes, salt: str) -> str:
    """Return the secret of the webhook with ``salt`` (HMAC-SHA256 in URL-safe base64)."""
    digest = hmac.digest(key, f"tessera webhook {salt}".encode(), hashlib.sha256)
    return f"{HOOK_PREFIX}_{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def write_body(delivery: Delivery) -> bytes:
    """Return the JSON of an event: ASCII, without control characters and without HTML.

    Texts of the job's program may have secrets in them, which are hidden.
    """
    facts = {
        name: hide_secrets(value) if isinstance(value, str) else value
        for name, value in delivery.facts.items()
    }
    plain = {"version": _VERSION, "id": delivery.number, "event": delivery.event, **facts}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("ascii")


def sign_body(secret: str, body: bytes, at_s: float) -> str:
    """Return the value of ``SIGNATURE_HEADER``: the time, and the HMAC-SHA256 of time and body in hex."""
    moment = str(int(at_s))
    digest = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256)
    return f"t={moment},v1={digest.hexdigest()}"
