"""Stored records of identities: tokens, join tokens, certificates, and the audit log."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.formulation.base.access import AuditedCall, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """A token of a user. Only a hash of its secret is kept.

    ``clusters`` and ``tenants`` are None for all of them. Times are seconds since 1970.
    """

    id: str  # public, part of the token's text
    name: str  # who uses it; unique among tokens that are not revoked
    secret_hash: bytes  # SHA-256
    role: Role
    clusters: frozenset[str] | None = None
    tenants: frozenset[str] | None = None
    expires_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token as it is stored."""

    spec: TokenSpec
    created_s: float
    created_by: str
    revoked_s: float | None = None

    def is_valid(self, now_s: float) -> bool:
        """Return whether the token proves anything at ``now_s``."""
        return self.revoked_s is None and now_s < self.spec.expires_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenSpec:
    """A token with which agents of a cluster enrol.

    ``nodes`` are names or patterns with ``*`` of the nodes that they may speak for. The token is
    good for ``uses`` enrolments.
    """

    id: str
    secret_hash: bytes  # SHA-256
    cluster: str
    nodes: tuple[str, ...]
    uses: int
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenRecord:
    """A join token as it is stored."""

    spec: JoinTokenSpec
    used: int
    created_s: float
    created_by: str
    revoked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRecord:
    """A certificate of an agent that the server has signed.

    ``serial`` is the certificate's serial number in lower-case hex without leading zeros.
    """

    serial: str
    cluster: str
    agent: str
    nodes: tuple[str, ...]
    issued_s: float
    expires_s: float
    join_token: str  # id of the join token with which the agent enrolled
    revoked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(AuditedCall):
    """An entry of the audit log: who did what to what, from where, and how it ended.

    ``outcome`` is OK, or the gRPC code of a refusal. ``count`` refusals that were alike and close in
    time make one entry.
    """

    number: int  # rises with each entry
    time_s: float
    outcome: str
    detail: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """A choice of entries of the audit log. "" and infinities do not restrict.

    The outcome "refused" is every one but OK.
    """

    subject: str = ""
    method: str = ""
    target: str = ""  # this resource, and everything below it
    outcome: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(AuditedCall):
    """A refused call, or ``count`` of them that were alike, to be added to the audit log."""

    outcome: str
    detail: str
    count: int
