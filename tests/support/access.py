"""Tokens, certificates and audited calls for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.db.schema.engine import Database
from tessera.formulation.base.access import AUDITED, AuditedCall, Role
from tessera.formulation.base.secrets import JOIN_PREFIX, SecretToken, hash_secret
from tessera.formulation.records.access import CertificateRecord, JoinTokenSpec, TokenSpec
from tests.support.stored_cluster import C, execute

LATER_S = 4e9
"""A time in the far future, in seconds since 1970."""

EARLIER_S = 1e9
"""A time in the past."""

SECRET = "s3cret"

_numbers = itertools.count(1)


def a_token(name: str, **overrides: Any) -> TokenSpec:
    fields: dict[str, Any] = {
        "id": f"t{next(_numbers):011d}",
        "name": name,
        "secret_hash": hash_secret(SECRET),
        "role": Role.ADMIN,
    }
    return TokenSpec(**fields | overrides)


def a_join_token(**overrides: Any) -> JoinTokenSpec:
    fields: dict[str, Any] = {
        "id": f"j{next(_numbers):011d}",
        "secret_hash": hash_secret(SECRET),
        "cluster": C,
        "nodes": ("a100-*",),
        "uses": 1,
        "expires_s": LATER_S,
    }
    return JoinTokenSpec(**fields | overrides)


def show(spec: JoinTokenSpec, secret: str = SECRET) -> SecretToken:
    """Return the join token as an agent presents it."""
    return SecretToken(JOIN_PREFIX, spec.id, hash_secret(secret))


def a_certificate(agent: str = "agent-a100-0", **overrides: Any) -> CertificateRecord:
    fields: dict[str, Any] = {
        "serial": f"a{next(_numbers):x}",
        "cluster": C,
        "agent": agent,
        "nodes": ("a100-0",),
        "issued_s": EARLIER_S,
        "expires_s": LATER_S,
        "join_token": "",
    }
    return CertificateRecord(**fields | overrides)


@contextmanager
def audit(target: str, **overrides: Any) -> Iterator[AuditedCall]:
    """Let what happens in the block be a call that is audited; yield it."""
    fields: dict[str, Any] = {
        "subject": "ana",
        "role": "operator",
        "proof": "token/x",
        "method": "Jobs.SubmitJob",
        "target": target,
        "peer": "10.0.0.1:5555",
        "request_id": "r-1",
    }
    call = AuditedCall(**fields | overrides)
    reset = AUDITED.set(call)
    try:
        yield call
    finally:
        AUDITED.reset(reset)


def add_audit_entries(database: Database, days: int, count: int = 1) -> None:
    """Add entries to the audit log that are as many days old."""
    statement = f"""
        INSERT INTO audit_log
            (at, subject, role, proof, method, target, peer, request_id, outcome, detail)
        SELECT now() - interval '{days} days', '', '', '', '', '', '', '', 'OK', ''
        FROM generate_series(1, {count})
    """
    execute(database, statement)
