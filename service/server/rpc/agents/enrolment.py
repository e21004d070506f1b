"""Enrolment: the first certificate of an agent, for its join token, and the ones after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.db.access.enrolment import add_certificate, enrol
from tessera.db.store.store import Store
from tessera.formulation.base.access import AUDITED, IDENTITY, Identity
from tessera.formulation.base.errors import InvalidInput, NotAllowed, PermissionDenied, Unavailable
from tessera.formulation.base.secrets import JOIN_PREFIX, parse_token
from tessera.formulation.records.access import CertificateRecord
from tessera.service import fields
from tessera.service.server.convert import names
from tessera.service.server.security.authority import (
    MAX_NODES,
    AgentIdentity,
    sign_agent_certificate,
)
from tessera.service.server.security.key_files import read_authority
from tessera.service.server.security.limits import CallRate
from tessera.service.server.tasks.calls import Calls
from tessera.service.server.tasks.lanes import CALLER
from tessera.v1 import agents_pb2 as pb

ENROLMENTS_PER_MINUTE: Final = 1_200
"""Largest number of enrolments from one host in a minute. Each takes a transaction and a signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentSettings:
    """The authority that signs certificates of agents, and the port where agents use them."""

    ca_certificate: Path
    ca_key: Path
    hours: float
    port: Callable[[], int]


class Enrolment:
    """The signing of agents' certificates, in the threads of ``calls``.

    Without ``settings`` this server signs none. It belongs to the event loop's thread.
    """

    def __init__(
        self,
        store: Store | None,
        settings: EnrolmentSettings | None,
        calls: Calls,
        wall_s: Callable[[], float],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._settings, self._calls, self._wall_s = store, settings, calls, wall_s
        self._rate = CallRate(ENROLMENTS_PER_MINUTE, "enrolments", monotonic_s)

    async def enrol(self, request: pb.EnrolRequest) -> pb.EnrolResponse:
        """Use the join token, and sign the agent's first certificate.

        Raises:
            NotAuthenticated: the join token proves nothing.
            PermissionDenied: it does not allow a node.
            NotAllowed: this server signs no certificates. Unavailable: it cannot at present.
            TooBusy: the caller's host enrols too often.
        """
        self._rate.take(CALLER.get().client)
        store, settings = self._parts()
        return await self._calls.run(self._enrol, store, settings, request)

    async def renew(self, request: pb.RenewCertificateRequest) -> pb.RenewCertificateResponse:
        """Sign another certificate for the agent that calls.

        Raises:
            PermissionDenied: the caller is no agent with a certificate.
            NotAuthenticated: its certificate is revoked. NotAllowed: this server signs none.
        """
        store, settings = self._parts()
        identity = IDENTITY.get()
        if not identity.agent:
            raise PermissionDenied("only an agent that calls with its certificate can renew it")
        return await self._calls.run(self._renew, store, settings, request, identity)

    def _parts(self) -> tuple[Store, EnrolmentSettings]:
        if self._settings is None or self._store is None:
            raise NotAllowed(
                "this server signs no certificates: it needs TLS and the key of an authority (its settings"
                " ca_certificate and ca_key, or tls_directory)"
            )
        return self._store, self._settings

    def _enrol(
        self, store: Store, settings: EnrolmentSettings, request: pb.EnrolRequest
    ) -> pb.EnrolResponse:
        cluster = names.parse_cluster("parent", request.parent)
        token = parse_token("join_token", request.join_token, JOIN_PREFIX)
        fields.require_batch_size("nodes", len(request.nodes), MAX_NODES)
        agent = names.require_identifier("agent_id", request.agent_id)
        if (call := AUDITED.get()) is not None:
            AUDITED.set(
                replace(
                    call,
                    subject=f"join token {token.id}",
                    proof=f"join-token/{token.id}",
                    target=f"{names.cluster_name(cluster)}/agents/{agent}",
                )
            )
        text, authorities, identity = self._sign(
            settings, request.signing_request, cluster, agent, tuple(request.nodes)
        )
        store.change(enrol, token, _record(identity, self._wall_s(), token.id))
        return pb.EnrolResponse(certificate=text, authorities=authorities, port=settings.port())

    def _renew(
        self,
        store: Store,
        settings: EnrolmentSettings,
        request: pb.RenewCertificateRequest,
        identity: Identity,
    ) -> pb.RenewCertificateResponse:
        (cluster,) = identity.clusters or frozenset({""})
        text, authorities, renewed = self._sign(
            settings, request.signing_request, cluster, identity.agent, tuple(identity.nodes)
        )
        serial = identity.key.partition("/")[2]
        store.change(add_certificate, _record(renewed, self._wall_s(), ""), serial)
        return pb.RenewCertificateResponse(certificate=text, authorities=authorities)

    def _sign(
        self,
        settings: EnrolmentSettings,
        signing_request: str,
        cluster: str,
        agent: str,
        nodes: tuple[str, ...],
    ) -> tuple[str, str, AgentIdentity]:
        """Return the certificate, the authorities to trust (PEM), and what the certificate states.

        Raises:
            Unavailable: the files of the authority are wrong, e.g. because they are being replaced.
        """
        now_s = self._wall_s()
        try:
            authority, trusted = read_authority(settings.ca_certificate, settings.ca_key, now_s)
        except InvalidInput as error:  # not the agent's fault, so it must try again
            raise Unavailable(f"this server cannot sign certificates now: {error}") from error
        text, identity = sign_agent_certificate(
            authority,
            signing_request,
            cluster=cluster,
            agent=agent,
            nodes=nodes,
            now_s=now_s,
            hours=settings.hours,
        )
        return text, trusted.decode(), identity


def _record(identity: AgentIdentity, now_s: float, join_token: str) -> CertificateRecord:
    return CertificateRecord(
        serial=identity.serial,
        cluster=identity.cluster,
        agent=identity.agent,
        nodes=tuple(sorted(identity.nodes)),
        issued_s=now_s,
        expires_s=identity.expires_s,
        join_token=join_token,
    )
