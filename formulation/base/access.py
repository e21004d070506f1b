"""Roles, identities, and the call for which a thread works."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.formulation.base.errors import NotFound


class Role(StrEnum):
    """The trust that an identity has. Each role but ``AGENT`` includes the ones before it."""

    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"
    AGENT = "agent"


PEOPLE: Final = (Role.VIEWER, Role.USER, Role.OPERATOR, Role.ADMIN)
"""The roles that a token may have, the least first. Agents have certificates instead."""

TENANT_ROLES: Final = frozenset({Role.VIEWER, Role.USER})
"""The roles that may be bound to tenants. The others act on the whole cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The maker of a call, as the server has verified it.

    ``clusters`` and ``tenants`` are what the identity can see; None is all of them. ``key`` names
    what proved the identity (``token/ID``, ``certificate/SERIAL``, ``oidc/ISSUER``), so that its
    revocation finds it. ``expires_s`` is when the proof ends, in seconds since 1970, or infinity.
    An agent has a name, and its nodes.
    """

    subject: str
    role: Role
    key: str
    clusters: frozenset[str] | None = None
    tenants: frozenset[str] | None = None
    expires_s: float = float("inf")
    agent: str = ""
    nodes: frozenset[str] = frozenset()
    is_verified: bool = True

    def sees_cluster(self, cluster: str) -> bool:
        """Return whether the identity may know of ``cluster``."""
        return self.clusters is None or cluster in self.clusters

    def sees_tenant(self, tenant: str) -> bool:
        """Return whether the identity may know of ``tenant`` and its jobs."""
        return self.tenants is None or tenant in self.tenants

    def require_cluster(self, cluster: str) -> None:
        """Check that the identity may know of ``cluster``.

        Raises:
            NotFound: it may not. The answer is that for a cluster that does not exist.
        """
        if not self.sees_cluster(cluster):
            raise NotFound(f"clusters/{cluster}")

    def require_tenants(self, cluster: str, tenants: Collection[str]) -> None:
        """Check that the identity may know of every one of ``tenants``. Raises NotFound."""
        for tenant in tenants:
            if not self.sees_tenant(tenant):
                raise NotFound(f"clusters/{cluster}/tenants/{tenant}")

    def known_subject(self, most: int) -> str:
        """Return up to ``most`` characters of the subject, or "" if nobody was asked for it."""
        return self.subject[:most] if self.is_verified else ""


LOCAL: Final = Identity(subject="local", role=Role.ADMIN, key="local", is_verified=False)
"""Whoever calls a server that asks nobody who they are. It may do everything, as agents may."""

IDENTITY: Final = ContextVar("IDENTITY", default=LOCAL)
"""Who makes the call that the current task or thread works for."""


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether the whole of ``name`` matches. ``*`` stands for any text, and nothing else is
    special.

    The time is proportional to the lengths, whatever the pattern.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *parts, last = rest
    at, end = len(first), len(name) - len(last)
    if end < at or not name.startswith(first) or not name.endswith(last):
        return False
    for part in parts:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedCall:
    """A call that changes something, as the audit log describes it.

    ``target`` is the resource, e.g. ``clusters/main/jobs/a``; of a call with several, the first and
    how many more there are. ``peer`` is the address of the caller.
    """

    subject: str
    role: str
    proof: str
    method: str
    target: str
    peer: str
    request_id: str = ""


AUDITED: Final = ContextVar[AuditedCall | None]("AUDITED", default=None)
"""The call to audit, which the store records in the transaction of the change."""
