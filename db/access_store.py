"""The store of ``tessera.service.security.ports`` on PostgreSQL. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import sqlalchemy as sa

from tessera.db import audit_log, enrolment, migrate, tokens
from tessera.db.engine import Database
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

T = TypeVar("T")


class PostgresAccessStore:
    """The store of ``tessera.service.security.ports.AccessStore`` on PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = migrate.MigratedDatabase(database.engine)

    def _change(self, work: Callable[[sa.Connection], T]) -> T:
        """Run ``work`` in a transaction that also adds the change to the audit log."""

        def transaction(connection: sa.Connection) -> T:
            result = work(connection)
            audit_log.record_change(connection)
            return result

        return self._database.write(transaction)

    def create_token(self, spec: TokenSpec, created_by: str) -> TokenRecord:
        """Store a token."""
        return self._change(lambda c: tokens.create_token(c, spec, created_by))

    def find_token(self, token_id: str) -> TokenRecord | None:
        """Return a token, revoked and expired ones included, or None."""
        with self._database.read() as connection:
            return tokens.find_token(connection, token_id)

    def list_tokens(self, *, with_ended: bool) -> list[TokenRecord]:
        """Return tokens by name."""
        with self._database.read() as connection:
            return tokens.list_tokens(connection, with_ended=with_ended)

    def revoke_token(self, name: str) -> TokenRecord:
        """Revoke the token with this name or id."""
        return self._change(lambda c: tokens.revoke_token(c, name))

    def create_join_token(self, spec: JoinTokenSpec, created_by: str) -> JoinTokenRecord:
        """Store a join token."""
        return self._change(lambda c: enrolment.create_join_token(c, spec, created_by))

    def list_join_tokens(self, cluster: str, *, with_ended: bool) -> list[JoinTokenRecord]:
        """Return join tokens, the newest first."""
        with self._database.read() as connection:
            return enrolment.list_join_tokens(connection, cluster, with_ended=with_ended)

    def revoke_join_token(self, cluster: str, token_id: str) -> JoinTokenRecord:
        """Revoke a join token."""
        return self._change(lambda c: enrolment.revoke_join_token(c, cluster, token_id))

    def enrol(self, token: SecretToken, certificate: CertificateRecord) -> None:
        """Use a join token once, and store the certificate that was signed for it."""
        self._change(lambda c: enrolment.enrol(c, token, certificate))

    def add_certificate(self, certificate: CertificateRecord, replaces: str) -> None:
        """Store the certificate that an agent gets instead of an earlier one."""
        self._change(lambda c: enrolment.add_certificate(c, certificate, replaces))

    def list_certificates(self, cluster: str) -> list[CertificateRecord]:
        """Return the certificates that have not expired, by agent."""
        with self._database.read() as connection:
            return enrolment.list_certificates(connection, cluster)

    def revoke_agent(self, cluster: str, agent: str) -> list[str]:
        """Revoke all certificates of an agent; return their serial numbers."""
        return self._change(lambda c: enrolment.revoke_agent(c, cluster, agent))

    def revoked_certificates(self, serials: Collection[str]) -> set[str]:
        """Return those of ``serials`` that are revoked."""
        with self._database.read() as connection:
            return enrolment.find_revoked(connection, list(serials))

    def add_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Add refused calls to the audit log."""
        self._database.write(lambda c: audit_log.add_refusals(c, refusals))

    def list_audit(self, chosen: AuditFilter, before: int, limit: int) -> list[AuditRecord]:
        """Return entries of the audit log, the newest first."""
        with self._database.read() as connection:
            return audit_log.list_entries(connection, chosen, before, limit)
