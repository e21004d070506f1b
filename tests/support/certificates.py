"""Authorities, certificates and servers with TLS."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tessera.client import ChannelSettings
from tessera.formulation.base.clock import SystemClock
from tessera.service.server.security.authority import (
    KeyedCertificate,
    create_authority,
    issue_server_certificate,
    sign_agent_certificate,
)
from tessera.service.server.security.key_files import (
    parse_certificates,
    parse_key,
    read_file,
    require_pair,
    write_private,
    write_public,
)
from tessera.service.server.security.serving import CertificateFiles, ServingCertificate

DAY_S = 86_400.0
HOSTS = ("localhost", "127.0.0.1")
LOG = logging.getLogger("tests.certificates")


def read_pair(certificate_path: Path, key_path: Path) -> KeyedCertificate:
    """Return the first certificate of a file, with the key of another one, which belongs to it.

    Raises:
        InvalidInput: a file is wrong, or the key belongs to another certificate.
    """
    certificates = parse_certificates(certificate_path, read_file(certificate_path))
    key = parse_key(key_path, read_file(key_path, private=True))
    require_pair(certificates[0], certificate_path, key, key_path)
    return KeyedCertificate(certificates[0], key)


def signing_request(key: Any = None) -> str:
    """Return a certificate signing request (PEM), by a new key unless one is given."""
    chosen = key or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    algorithm = hashes.SHA256() if hasattr(chosen, "key_size") else None  # None for Ed25519
    return builder.sign(chosen, algorithm).public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True)
class Site:
    """A directory with an authority, and with the files of a server and of agents."""

    folder: Path
    authority: KeyedCertificate
    now_s: float

    @property
    def authorities(self) -> str:
        return str(self.folder / "ca.pem")

    def files(self, *, mutual: bool = False) -> CertificateFiles:
        return CertificateFiles(
            certificate=self.folder / "server.pem",
            key=self.folder / "server.key",
            client_authorities=self.folder / "ca.pem" if mutual else None,
        )

    def renew_server(
        self,
        *,
        authority: KeyedCertificate | None = None,
        hosts: Sequence[str] = HOSTS,
        now_s: float | None = None,
        days: int = 90,
    ) -> KeyedCertificate:
        """Write another certificate of the server."""
        server = issue_server_certificate(
            authority or self.authority, hosts, self.now_s if now_s is None else now_s, days
        )
        write_private(self.folder / "server.key", server.key_pem())
        write_public(self.folder / "server.pem", server.certificate_pem())
        return server

    def agent(
        self,
        name: str = "agent",
        *,
        authority: KeyedCertificate | None = None,
        cluster: str = "main",
        agent: str = "agent-1",
        nodes: Sequence[str] = ("n0",),
        now_s: float | None = None,
        hours: float = 24.0,
    ) -> ChannelSettings:
        """Write a certificate of an agent, and return the settings of its channel."""
        key = ec.generate_private_key(ec.SECP256R1())
        signer = authority or self.authority
        pem, _ = sign_agent_certificate(
            signer,
            signing_request(key),
            cluster=cluster,
            agent=agent,
            nodes=nodes,
            now_s=self.now_s if now_s is None else now_s,
            hours=hours,
        )
        paths = (self.folder / f"{name}.pem", self.folder / f"{name}.key")
        write_public(paths[0], pem.encode())
        write_private(paths[1], KeyedCertificate(signer.certificate, key).key_pem())
        return ChannelSettings(authorities=self.authorities, certificate=paths[0], key=paths[1])


def make_site(folder: Path, now_s: float | None = None) -> Site:
    """Make a site whose certificates are valid from ``now_s`` on, usually the system's time."""
    start_s = SystemClock().wall_s() if now_s is None else now_s
    authority = create_authority(start_s - 100 * DAY_S)
    write_private(folder / "ca.key", authority.key_pem())
    write_public(folder / "ca.pem", authority.certificate_pem())
    site = Site(folder, authority, start_s)
    site.renew_server()
    return site


@dataclass(frozen=True)
class EchoPorts:
    """The addresses of a server's ports."""

    tls: str
    mutual: str
    plain: str


async def _answer(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("authorization", "")).encode()


async def _answers(
    requests: Any, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield await _answer(request, context)


async def _answer_all(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return b" ".join([answer async for answer in _answers(requests, context)])


async def _answer_twice(
    request: bytes, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[bytes]:
    for _ in range(2):
        yield await _answer(request, context)


HANDLERS: dict[str, Any] = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(_answer),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(_answer_twice),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(_answer_all),
    "StreamStream": grpc.stream_stream_rpc_method_handler(_answers),
}
"""Methods that answer with the caller's authorization."""


@asynccontextmanager
async def echo_server(
    site: Site, wall_s: Callable[[], float] | None = None
) -> AsyncIterator[EchoPorts]:
    """Run a server with a port for users, one for agents, and one without TLS."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", HANDLERS),))
    clock = wall_s or SystemClock().wall_s
    ports = [
        server.add_secure_port(
            "127.0.0.1:0",
            ServingCertificate(site.files(mutual=mutual), clock, LOG).credentials(),
        )
        for mutual in (False, True)
    ]
    ports.append(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    try:
        yield EchoPorts(*(f"127.0.0.1:{port}" for port in ports))
    finally:
        await server.stop(None)
