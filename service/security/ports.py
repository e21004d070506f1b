"""The store of identities and of the audit log, as a protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tessera.formulation.records.access import (
    AuditFilter,
    AuditRecord,
    CertificateRecord,
    JoinTokenRecord,
    JoinTokenSpec,
    Refusal,
    TokenRecord,
    TokenSpec,
)
from tessera.formulation.secrets import SecretToken


class AccessStore(Protocol):
    """The place where tokens, certificates and the audit log are kept.

    Every method is one transaction, and safe to call from any thread. A change is recorded in the
    audit log in its own transaction if ``formulation.access.AUDITED`` is set. Revocations notify
    the channel ``tessera_access`` with the key of what was revoked (``token/ID``,
    ``certificate/SERIAL``).
    """

    def create_token(self, spec: TokenSpec, created_by: str) -> TokenRecord:
        """Store a token.

        Raises:
            AlreadyExists: a token of this name is not revoked. LimitReached.
        """
        ...

    def find_token(self, token_id: str) -> TokenRecord | None:
        """Return a token, revoked and expired ones included, or None."""
        ...

    def list_tokens(self, *, with_ended: bool) -> list[TokenRecord]:
        """Return tokens by name, without those that are revoked or expired unless asked."""
        ...

    def revoke_token(self, name: str) -> TokenRecord:
        """Revoke the token with this id, or else with this name.

        Raises NotFound: none that is not revoked.
        """
        ...

    def create_join_token(self, spec: JoinTokenSpec, created_by: str) -> JoinTokenRecord:
        """Store a join token. Raises NotFound: the cluster. LimitReached."""
        ...

    def list_join_tokens(self, cluster: str, *, with_ended: bool) -> list[JoinTokenRecord]:
        """Return join tokens, the newest first. Raises NotFound: the cluster."""
        ...

    def revoke_join_token(self, cluster: str, token_id: str) -> JoinTokenRecord:
        """Revoke a join token, which may be revoked already.

        Raises NotFound: the cluster, or the token.
        """
        ...

    def enrol(self, token: SecretToken, certificate: CertificateRecord) -> None:
        """Use a join token once, and store the certificate that was signed for it.

        Raises:
            NotAuthenticated: no such token, another secret, or it is used up, revoked, expired, or
                of another cluster. The message says which only if the secret is right.
            PermissionDenied: the token does not allow a node.
        """
        ...

    def add_certificate(self, certificate: CertificateRecord, replaces: str) -> None:
        """Store the certificate that was signed for the agent whose serial number is ``replaces``.

        Raises:
            NotAuthenticated: that one is revoked, not known, or another agent's.
            PermissionDenied: that one does not allow a node.
            LimitReached: the agent has many certificates that have not expired.
        """
        ...

    def list_certificates(self, cluster: str) -> list[CertificateRecord]:
        """Return the certificates that have not expired, by agent. Raises NotFound: the cluster."""
        ...

    def revoke_agent(self, cluster: str, agent: str) -> list[str]:
        """Revoke all certificates of an agent; return their serial numbers.

        Raises:
            NotFound: the cluster, or no certificate of the agent that is valid.
        """
        ...

    def revoked_certificates(self, serials: Collection[str]) -> set[str]:
        """Return those of ``serials`` that are revoked. Unknown ones are not."""
        ...

    def add_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Add refused calls to the audit log. Long texts are cut off."""
        ...

    def list_audit(self, chosen: AuditFilter, before: int, limit: int) -> list[AuditRecord]:
        """Return entries with a number below ``before`` (0: all), the newest first."""
        ...
