"""Tokens, certificates and the audit log, as messages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.access import PEOPLE, TENANT_ROLES, Identity, Role
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.access import (
    AuditFilter,
    AuditRecord,
    CertificateRecord,
    JoinTokenRecord,
    JoinTokenSpec,
    TokenRecord,
    TokenSpec,
)
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.convert.generic import to_message
from tessera.v1 import access_pb2 as pb

MAX_SCOPE: Final = 100
"""Largest number of clusters or tenants of a token, and of patterns of nodes of a join token."""

MAX_PATTERN: Final = 100
TOKEN_S: Final = 90 * 86_400.0
"""Lifetime of a token in seconds, unless its creator says otherwise."""

JOIN_TOKEN_S: Final = 3600.0
MAX_JOIN_TOKEN_S: Final = 30 * 86_400.0
"""Default and longest lifetime of a join token in seconds."""

MAX_USES: Final = 10_000


def to_token(
    field: str, message: pb.Token, token_id: str, secret_hash: bytes, now_s: float
) -> TokenSpec:
    """Return a token to create. Raises InvalidInput."""
    role = _role(f"{field}.role", message.role)
    clusters = _scope(f"{field}.clusters", message.clusters)
    tenants = _scope(f"{field}.tenants", message.tenants)
    if role in TENANT_ROLES and bool(tenants) == message.all_tenants:
        raise InvalidInput(
            f"{field}.tenants",
            f"a token with the role {role} must either name tenants or set all_tenants",
        )
    if role not in TENANT_ROLES and (tenants or message.all_tenants):
        raise InvalidInput(f"{field}.tenants", f"the role {role} sees all tenants; name none")
    if role is Role.ADMIN and clusters:
        raise InvalidInput(f"{field}.clusters", "the role admin sees all clusters; name none")
    return TokenSpec(
        id=token_id,
        name=names.require_identifier(f"{field}.name", message.name),
        secret_hash=secret_hash,
        role=role,
        clusters=clusters or None,
        tenants=tenants or None,
        expires_s=_expiry(message, f"{field}.expire_time", now_s, TOKEN_S, math.inf),
    )


def to_join_token(
    field: str, message: pb.JoinToken, cluster: str, token_id: str, secret_hash: bytes, now_s: float
) -> JoinTokenSpec:
    """Return a join token to create. Raises InvalidInput."""
    fields.require_batch_size(f"{field}.nodes", len(message.nodes), MAX_SCOPE)
    for k, pattern in enumerate(message.nodes):
        fields.require_text(f"{field}.nodes[{k}]", pattern, MAX_PATTERN, required=True)
        if pattern.replace("*", ""):
            names.require_identifier(f"{field}.nodes[{k}]", f"n{pattern.replace('*', '')}")
    return JoinTokenSpec(
        id=token_id,
        secret_hash=secret_hash,
        cluster=cluster,
        nodes=tuple(message.nodes),
        uses=fields.require_whole(f"{field}.uses", message.uses or 1, 1, MAX_USES),
        expires_s=_expiry(message, f"{field}.expire_time", now_s, JOIN_TOKEN_S, MAX_JOIN_TOKEN_S),
    )


def of_token(record: TokenRecord) -> pb.Token:
    """Return the message of a token. It holds no secret."""
    spec = record.spec
    return pb.Token(
        id=spec.id,
        name=spec.name,
        role=spec.role,
        clusters=sorted(spec.clusters or ()),
        tenants=sorted(spec.tenants or ()),
        all_tenants=spec.tenants is None and spec.role in TENANT_ROLES,
        create_time=fields.timestamp_of(record.created_s),
        created_by=record.created_by,
        expire_time=_moment(spec.expires_s),
        revoke_time=_moment(record.revoked_s),
    )


def of_join_token(record: JoinTokenRecord) -> pb.JoinToken:
    """Return the message of a join token. It holds no secret."""
    return pb.JoinToken(
        id=record.spec.id,
        nodes=record.spec.nodes,
        uses=record.spec.uses,
        used=record.used,
        create_time=fields.timestamp_of(record.created_s),
        created_by=record.created_by,
        expire_time=_moment(record.spec.expires_s),
        revoke_time=_moment(record.revoked_s),
    )


def of_certificate(record: CertificateRecord) -> pb.Certificate:
    """Return the message of an agent's certificate."""
    return to_message(record, pb.Certificate)


def of_caller(identity: Identity) -> pb.Caller:
    """Return the message of an identity."""
    return pb.Caller(
        subject=identity.subject,
        role=identity.role,
        clusters=sorted(identity.clusters or ()),
        tenants=sorted(identity.tenants or ()),
        all_clusters=identity.clusters is None,
        all_tenants=identity.tenants is None,
        expire_time=_moment(identity.expires_s),
        verified=identity.is_verified,
    )


def to_filter(request: pb.ListAuditEntriesRequest) -> AuditFilter:
    """Return the entries of the audit log that a request asks for. Raises InvalidInput."""

    def text(name: str) -> str:
        return fields.require_text(name, getattr(request, name), 300)

    def time_s(name: Literal["since", "until"], otherwise_s: float) -> float:
        if not request.HasField(name):
            return otherwise_s
        return fields.seconds_since_1970(name, getattr(request, name))

    return AuditFilter(
        subject=text("subject"),
        method=text("method"),
        target=text("target"),
        outcome=text("outcome"),
        since_s=time_s("since", -math.inf),
        until_s=time_s("until", math.inf),
    )


def of_entry(record: AuditRecord) -> pb.AuditEntry:
    """Return the message of an entry of the audit log."""
    return to_message(record, pb.AuditEntry)


def _role(field: str, text: str) -> Role:
    if text not in PEOPLE:
        raise InvalidInput(field, f"must be one of {', '.join(PEOPLE)}")
    return Role(text)


def _scope(field: str, ids: Iterable[str]) -> frozenset[str]:
    found = [names.require_identifier(f"{field}[{k}]", text) for k, text in enumerate(ids)]
    if len(found) > MAX_SCOPE:
        raise InvalidInput(field, f"must hold at most {MAX_SCOPE}")
    return frozenset(found)


def _expiry(
    message: pb.Token | pb.JoinToken, field: str, now_s: float, usual_s: float, longest_s: float
) -> float:
    if not message.HasField("expire_time"):
        return now_s + usual_s
    expires_s = fields.seconds_since_1970(field, message.expire_time)
    if not now_s < expires_s <= now_s + longest_s:
        most = f" and at most {longest_s / 86_400:g} days ahead" if math.isfinite(longest_s) else ""
        raise InvalidInput(field, f"must lie in the future{most}")
    return expires_s


def _moment(seconds: float | None) -> Timestamp | None:
    if seconds is None or math.isinf(seconds):
        return None
    return fields.timestamp_of(seconds)
