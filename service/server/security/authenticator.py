"""The check of a caller's certificate or token."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import grpc.aio

from tessera.db.access.enrolment import find_revoked
from tessera.db.access.tokens import find_token
from tessera.db.store.store import Store
from tessera.formulation.base.access import LOCAL, Identity, Role
from tessera.formulation.base.errors import InvalidInput, NotAuthenticated, Unavailable
from tessera.formulation.base.secrets import USER_PREFIX, SecretToken, parse_token
from tessera.formulation.records.access import TokenRecord
from tessera.service.server.security.authority import AgentIdentity, read_agent_identity
from tessera.service.server.security.limits import CallRate
from tessera.service.server.tasks.lanes import client_of

V = TypeVar("V")

FRESH_S: Final = 10.0
"""Seconds for which a token or certificate that was looked up is not looked up again. Revocations
are notified, so this matters only while notices are lost.
"""

REMEMBERED: Final = 10_000
"""Number of tokens and certificates that are remembered."""

FAILURES_PER_MINUTE: Final = 600
"""Largest number of unknown tokens from one host that are looked up in a minute. A token that was
known before is always looked up.
"""

Run = Callable[..., Awaitable[Any]]
"""A function that calls another one in a thread, like ``Calls.run``."""


class Verifier(Protocol):
    """A check of the tokens of an identity provider."""

    def find_verified(self, text: str, now_s: float) -> Identity | None:
        """Return whose token this is if it was verified a moment ago, without blocking."""
        ...

    def verify(self, text: str, now_s: float) -> Identity:
        """Return whose token this is. Raises NotAuthenticated, PermissionDenied, Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class _Looked:
    """The result of a lookup, and its time."""

    found: Any
    at_s: float


class RecentLookups:
    """Results of lookups that are still fresh, a bounded number of them."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._kept: OrderedDict[str, _Looked] = OrderedDict()
        self._forgotten = 0  # the number of calls of forget()

    def find(self, key: str) -> tuple[bool, Any]:
        """Return whether there is a fresh result for ``key``, and the result."""
        looked = self._kept.get(key)
        if looked is None or self._monotonic_s() - looked.at_s > FRESH_S:
            return False, None
        return True, looked.found

    def find_earlier(self, key: str) -> Any:
        """Return the last result for ``key``, fresh or not. None without one."""
        looked = self._kept.get(key)
        return None if looked is None else looked.found

    async def look_up(self, key: str, look: Callable[[], Awaitable[V]]) -> V:
        """Return what ``look`` returns, and remember it.

        A revocation that is noticed meanwhile may be later than what was read, so it is read again.
        """
        while True:
            began = self._forgotten
            found = await look()
            if began == self._forgotten:
                self.keep(key, found)
                return found

    def keep(self, key: str, found: object) -> None:
        """Remember a result."""
        self._kept[key] = _Looked(found, self._monotonic_s())
        self._kept.move_to_end(key)
        while len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)

    def forget(self, key: str) -> None:
        """Forget the result for ``key``, or every result if it is ""."""
        self._forgotten += 1
        if key:
            self._kept.pop(key, None)
        else:
            self._kept.clear()


class Authenticator:
    """The check of who makes a call.

    A server that asks nobody who they are has no ``store``: every caller is ``LOCAL`` there. If it
    ``trusts_sockets``, so are callers on Unix sockets: only the server's user can reach them. ``run``
    runs blocking work in a thread. It belongs to the event loop's thread.
    """

    def __init__(
        self,
        store: Store | None,
        run: Run,
        *,
        verifier: Verifier | None = None,
        trusts_sockets: bool = False,
        wall_s: Callable[[], float],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run, self._verifier, self._wall_s = store, run, verifier, wall_s
        self._trusts_sockets = trusts_sockets
        self._recent = RecentLookups(monotonic_s)
        self._certificates: OrderedDict[bytes, AgentIdentity] = OrderedDict()
        self._failures = CallRate(FAILURES_PER_MINUTE, "unknown tokens", monotonic_s)

    async def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        """Return who makes the call.

        Raises:
            NotAuthenticated: nothing proves who the caller is.
            TooBusy: the caller's host sends too many unknown tokens.
            Unavailable: the store or the identity provider cannot be asked.
        """
        peer = context.peer()
        if self._store is None or (self._trusts_sockets and peer.startswith("unix")):
            return LOCAL
        text = _bearer(context.invocation_metadata() or ())
        if pem := _certificate(context.auth_context()):
            if text:
                raise NotAuthenticated("the call has a certificate and a token; send one of them")
            return await self._of_certificate(self._store, pem)
        if not text:
            raise NotAuthenticated("the call has no token")
        if text.startswith(USER_PREFIX):
            return await self._of_token(self._store, text, client_of(peer))
        if self._verifier is None:
            raise NotAuthenticated(
                "the token is not one of this server, and it has no identity provider"
            )
        if (known := self._verifier.find_verified(text, self._wall_s())) is not None:
            return known
        found: Identity = await self._run(self._verifier.verify, text, self._wall_s())
        return found

    def forget(self, key: str) -> None:
        """Look ``key`` up again at its next use; every key if it is ""."""
        self._recent.forget(key)

    async def revoked(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys whose token or certificate is revoked."""
        if self._store is None:
            return []
        serials = {k.partition("/")[2]: k for k in keys if k.startswith("certificate/")}
        gone = [serials[s] for s in await self._run(self._store.read, find_revoked, [*serials])]
        for key in keys:
            kind, _, token_id = key.partition("/")
            if kind == "token":
                record = await self._run(self._store.read, find_token, token_id)
                if record is None or not record.is_valid(self._wall_s()):
                    gone.append(key)
        return gone

    async def _of_token(self, store: Store, text: str, host: str) -> Identity:
        try:
            token = parse_token("token", text, USER_PREFIX)
        except InvalidInput:
            raise NotAuthenticated("the token is cut short or damaged") from None
        record = await self._find(store, token, host)
        if record is None or not token.matches(record.spec.secret_hash):
            raise NotAuthenticated("no such token")
        if record.revoked_s is not None:
            raise NotAuthenticated(f"the token {record.spec.name} was revoked")
        if not record.is_valid(self._wall_s()):
            raise NotAuthenticated(f"the token {record.spec.name} has expired")
        spec = record.spec
        return Identity(
            subject=spec.name,
            role=spec.role,
            key=f"token/{spec.id}",
            clusters=spec.clusters,
            tenants=spec.tenants,
            expires_s=spec.expires_s,
        )

    async def _find(self, store: Store, token: SecretToken, host: str) -> TokenRecord | None:
        key = f"token/{token.id}"
        known, record = self._recent.find(key)
        found: TokenRecord | None = record
        if known:
            return found
        look = partial(self._run, store.read, find_token, token.id)
        earlier = self._recent.find_earlier(key)
        if earlier is not None and token.matches(earlier.spec.secret_hash):
            return await self._recent.look_up(key, look)
        # It counts as unknown until it is found, so that few are looked up at the same time.
        self._failures.take(host)
        try:
            found = await self._recent.look_up(key, look)
        except Unavailable:
            self._failures.put_back(host)
            raise
        if found is not None and token.matches(found.spec.secret_hash):
            self._failures.put_back(host)
        return found

    async def _of_certificate(self, store: Store, pem: bytes) -> Identity:
        certificate = self._read(pem)
        key = f"certificate/{certificate.serial}"
        known, is_revoked = self._recent.find(key)
        if not known:
            serials = [certificate.serial]
            look = partial(self._run, store.read, find_revoked, serials)
            is_revoked = bool(await self._recent.look_up(key, look))
        if is_revoked:
            raise NotAuthenticated(
                f"the certificate of agent {certificate.agent} was revoked; enrol it again with a join"
                " token, or remove it from this node"
            )
        if certificate.expires_s <= self._wall_s():
            raise NotAuthenticated(
                f"the certificate of agent {certificate.agent} has expired; enrol it again with a join"
                " token"
            )
        return Identity(
            subject=f"agents/{certificate.agent}",
            role=Role.AGENT,
            key=key,
            clusters=frozenset({certificate.cluster}),
            expires_s=certificate.expires_s,
            agent=certificate.agent,
            nodes=certificate.nodes,
        )

    def _read(self, pem: bytes) -> AgentIdentity:
        """Return what a certificate says, which is read once for all calls with it."""
        digest = hashlib.sha256(pem).digest()
        if digest not in self._certificates:
            self._certificates[digest] = read_agent_identity(pem)
            while len(self._certificates) > REMEMBERED:
                self._certificates.popitem(last=False)
        return self._certificates[digest]


def _certificate(auth: Mapping[str, Iterable[bytes]]) -> bytes:
    """Return the caller's certificate (PEM), or b"" if it has none."""
    return next(iter(auth.get("x509_pem_cert", ())), b"")


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the token in ``authorization: Bearer TOKEN``, or "".

    Raises:
        NotAuthenticated: there are several, or the header is something else.
    """
    headers = [value for key, value in metadata if key == "authorization"]
    if not headers:
        return ""
    if len(headers) > 1:
        raise NotAuthenticated("the call has several authorization headers; send one")
    scheme, _, text = str(headers[0]).partition(" ")
    if scheme.lower() != "bearer" or not text:
        raise NotAuthenticated("the authorization header must be `Bearer` and a token")
    return text.strip()
