"""Credentials of an agent: none, a certificate of the site, or one that the agent enrolled for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from tessera.client import (
    PLAIN_TEXT,
    ChannelRefused,
    ChannelSettings,
    check_files,
    open_async_channel,
)
from tessera.formulation.base.errors import InvalidInput, Unavailable
from tessera.formulation.base.release import install_hint
from tessera.service.agent.backoff import backoff_s
from tessera.service.agent.files import (
    make_private,
    point_link,
    read_json,
    read_trusted,
    remove_tree,
    write_json,
    write_text,
)
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import agents_pb2_grpc as rpc

log = logging.getLogger(__name__)

CALL_S: Final = 20.0
"""Seconds that a server may take to sign a certificate."""

RENEW_AT: Final = 2 / 3
"""Share of a certificate's lifetime after which it is renewed."""

FAILURES_BEFORE_ENROLMENT: Final = 3
"""Number of failed renewals in a row after which the agent also tries to enrol again.

Servers no longer trust its certificate, or it no longer trusts theirs, if it missed the change of an
authority.
"""

CURRENT: Final = "current"
"""Name of the link to the folder of the certificate's files, for processes that outlive renewals."""

FATAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Codes with which a server refuses an enrolment for good."""


class Credentials(Protocol):
    """The credentials that an agent shows servers."""

    async def prepare(self) -> None:
        """Make sure that there is something to show. Raises InvalidInput: there cannot be."""
        ...

    async def keep(self, renewed: Callable[[], None], asked: asyncio.Event) -> None:
        """Renew what is shown before it expires, and call ``renewed`` each time; never return.

        Whenever ``asked`` is set, it is cleared, and renewal is due at once.
        """
        ...

    def address(self, server: str) -> str:
        """Return the address at which to call ``server``."""
        ...

    def settings(self) -> ChannelSettings:
        """Return what a channel needs."""
        ...

    def lasting_settings(self) -> ChannelSettings:
        """Return what a channel of a process that outlives renewals needs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCredentials:
    """Credentials that the agent does not change: none, or files that the site renews.

    The files are read again for each connection.
    """

    channel: ChannelSettings = PLAIN_TEXT

    async def prepare(self) -> None:
        """Return at once."""

    async def keep(self, renewed: Callable[[], None], asked: asyncio.Event) -> None:
        """Call ``renewed`` whenever that is asked, because the files may be new; never return."""
        while True:
            await asked.wait()
            asked.clear()
            renewed()

    def address(self, server: str) -> str:
        """Return the server's own address."""
        return server

    def settings(self) -> ChannelSettings:
        """Return the files."""
        return self.channel

    def lasting_settings(self) -> ChannelSettings:
        """Return the files."""
        return self.channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """A certificate on disk: the folder of its files, its times, and the servers' port for it."""

    folder: str
    issued_s: float
    expires_s: float
    port: int

    def renew_at_s(self) -> float:
        """Return when the certificate is to be renewed, in seconds since 1970."""
        return self.issued_s + RENEW_AT * (self.expires_s - self.issued_s)


class EnrolledCredentials:
    """Credentials that the agent gets with a join token, keeps on disk and renews.

    ``directory`` is the agent's own: ``identity.json`` names the folder with ``key.pem``,
    ``certificate.pem`` and ``authorities.pem``. Each renewal makes a new key and a new folder, to
    which the link ``current`` then leads.
    ``join_token`` returns the join token's text when it is needed, or "" without one.
    """

    def __init__(
        self,
        *,
        directory: Path,
        servers: Sequence[str],
        authorities: str,
        join_token: Callable[[], str],
        cluster: str,
        agent: str,
        nodes: Sequence[str],
        wall_s: Callable[[], float],
    ) -> None:
        if find_spec("cryptography") is None:
            raise InvalidInput(
                "--join-token-file",
                f"needs the package cryptography; install it with: {install_hint('secure')}",
            )
        self._directory, self._servers = directory, servers
        self._authorities, self._join_token = authorities, join_token
        self._cluster, self._agent, self._nodes = cluster, agent, tuple(nodes)
        self._wall_s = wall_s
        self._held: Enrolled | None = None

    async def prepare(self) -> None:
        """Load the certificate, or enrol for one. Waits for a server that answers.

        Raises:
            InvalidInput: there is no join token, or a server refuses it.
        """
        make_private(str(self._directory))
        self._held = self._load()
        if self._held is None or self._held.expires_s <= self._wall_s():
            await self._enrol()

    async def keep(self, renewed: Callable[[], None], asked: asyncio.Event) -> None:
        """Renew the certificate after two thirds of its lifetime, or when that is asked.

        Once it expired, or cannot be renewed, the agent enrols again if it has a join token.
        """
        attempt = 0
        while True:
            wait_s = self._require().renew_at_s() - self._wall_s()
            if wait_s > 0 and not attempt and not asked.is_set():
                await _wait_until_asked(asked, min(wait_s, 3600.0))
                continue
            asked.clear()
            try:
                await self._replace(attempt)
            except (grpc.aio.AioRpcError, Unavailable, InvalidInput, OSError, ValueError) as error:
                attempt += 1
                log.log(
                    logging.WARNING if attempt % 10 == 1 else logging.DEBUG,
                    "cannot renew the certificate yet",
                    extra={
                        "event": "renewal_failed",
                        "left_s": self._require().expires_s - self._wall_s(),
                        "error": failure_text(error),
                    },
                )
                await _wait_until_asked(asked, backoff_s(self._agent, attempt, 1))
            else:
                attempt = 0
                renewed()

    async def _replace(self, attempt: int) -> None:
        """Renew the certificate, or enrol again if it has expired or cannot be renewed."""
        server = self._servers[attempt % len(self._servers)]
        if self._require().expires_s <= self._wall_s():
            await self._enrol()
        elif attempt >= FAILURES_BEFORE_ENROLMENT and (token := self._join_token()):
            try:
                await self._renew(server)
            except (grpc.aio.AioRpcError, ChannelRefused):
                await self._enrol_at(server, token)
        else:
            await self._renew(server)

    def address(self, server: str) -> str:
        """Return the server's address with the port that asks for certificates."""
        host = server.rpartition(":")[0] or server
        return f"{host}:{self._require().port}"

    def settings(self) -> ChannelSettings:
        """Return the certificate's files."""
        return _settings_in(self._directory / self._require().folder)

    def lasting_settings(self) -> ChannelSettings:
        """Return the files under names that each renewal gives to the new ones."""
        return _settings_in(self._directory / CURRENT)

    def _require(self) -> Enrolled:
        if self._held is None:
            raise AssertionError("prepare() was not called")
        return self._held

    def _load(self) -> Enrolled | None:
        """Return the certificate on disk if it is that of this agent and its nodes, or None."""
        try:
            stored: dict[str, Any] | None = read_json(str(self._directory / "identity.json"))
        except (OSError, ValueError):
            return None
        if not stored or stored.get("for") != self._whose():
            return None
        try:
            held = Enrolled(**stored["held"])
        except (KeyError, TypeError):
            return None
        return held if _are_usable(_settings_in(self._directory / held.folder)) else None

    def _whose(self) -> dict[str, Any]:
        return {"cluster": self._cluster, "agent": self._agent, "nodes": sorted(self._nodes)}

    async def _enrol(self) -> None:
        """Enrol at whichever server answers.

        Raises:
            InvalidInput: there is no join token, a server refuses it, or --ca is wrong.
        """
        token = self._join_token()
        if not token:
            raise InvalidInput(
                "--join-token-file",
                "must name a file with a join token, because this agent has no valid certificate for its"
                " nodes; make a join token with `tessera join-token create`",
            )
        attempt = 0
        while True:
            server = self._servers[attempt % len(self._servers)]
            try:
                await self._enrol_at(server, token)
            except ChannelRefused as error:
                raise InvalidInput("--ca", str(error)) from error
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in FATAL_CODES:
                    raise InvalidInput(
                        "--join-token-file",
                        f"{server} refused to enrol this agent: {error.details()}",
                    ) from error
                attempt += 1
                log.warning(
                    "cannot enrol yet",
                    extra={
                        "event": "enrolment_failed",
                        "server": server,
                        "error": failure_text(error),
                    },
                )
                await asyncio.sleep(backoff_s(self._agent, attempt, len(self._servers)))
            else:
                log.info("enrolled", extra={"event": "enrolled", "server": server})
                return

    async def _enrol_at(self, server: str, token: str) -> None:
        made = _make_key(self._agent)
        settings = ChannelSettings(authorities=self._authorities)
        async with open_async_channel(server, settings) as channel:
            answer = await rpc.AgentsStub(channel).Enrol(
                pb.EnrolRequest(
                    parent=f"clusters/{self._cluster}",
                    agent_id=self._agent,
                    nodes=self._nodes,
                    join_token=token,
                    signing_request=made.signing_request,
                ),
                timeout=CALL_S,
            )
        self._store(made.key, answer.certificate, answer.authorities, answer.port)

    async def _renew(self, server: str) -> None:
        held, made = self._require(), _make_key(self._agent)
        async with open_async_channel(self.address(server), self.settings()) as channel:
            answer = await rpc.AgentsStub(channel).RenewCertificate(
                pb.RenewCertificateRequest(signing_request=made.signing_request), timeout=CALL_S
            )
        self._store(made.key, answer.certificate, answer.authorities, held.port)
        log.info(
            "renewed the certificate", extra={"event": "certificate_renewed", "agent": self._agent}
        )

    def _store(self, key: str, certificate: str, authorities: str, port: int) -> None:
        """Write the files, then the name of their folder, then remove the earlier folder."""
        facts, before = _certificate_facts(certificate), self._held
        folder = self._directory / f"identity-{facts.serial}"
        make_private(str(folder))
        for name, text in (
            ("key.pem", key),
            ("certificate.pem", certificate),
            ("authorities.pem", authorities),
        ):
            write_text(str(folder / name), text, durable=True)
        held = Enrolled(
            folder=folder.name, issued_s=self._wall_s(), expires_s=facts.expires_s, port=port
        )
        write_json(
            str(self._directory / "identity.json"), {"for": self._whose(), "held": asdict(held)}
        )
        point_link(str(self._directory / CURRENT), folder.name)
        self._held = held
        if before is not None and before.folder != held.folder:
            with contextlib.suppress(OSError):
                remove_tree(str(self._directory / before.folder))


def _settings_in(folder: Path) -> ChannelSettings:
    return ChannelSettings(
        authorities=str(folder / "authorities.pem"),
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
    )


def _are_usable(settings: ChannelSettings) -> bool:
    """Return whether the files are there and whole. A power failure may leave half of them."""
    try:
        check_files(settings)
    except ChannelRefused:
        return False
    return True


async def _wait_until_asked(asked: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await asked.wait()


def failure_text(error: BaseException) -> str:
    """Return an error of a call in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "the server was silent for too long"


def read_join_token(path: Path | None, text: str) -> Callable[[], str]:
    """Return a function that returns the join token: that of the file, or else ``text``.

    The file is read when the token is needed, so it may appear later. Its content is never in a
    message. Raises InvalidInput when called: the file can be read by other users.
    """

    def read() -> str:
        if path is None:
            return text
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mode & 0o007:
                raise InvalidInput(
                    "--join-token-file",
                    f"other users can read {path}; run chmod 600 {path}, and make a new join token",
                )
            return read_trusted(path).strip()
        return ""

    return read


def _make_key(agent: str) -> Any:
    return import_module("tessera.service.agent.keys").make_key(agent)


def _certificate_facts(certificate: str) -> Any:
    return import_module("tessera.service.agent.keys").read_facts(certificate)
