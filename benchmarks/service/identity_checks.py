"""The time of finding out who calls: the server's own tokens, and those of an identity provider.

The checks run in this process, with the server's code and a real database, but without a socket.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any, Final, cast

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from tessera.db.access_store import PostgresAccessStore
from tessera.db.engine import Database
from tessera.db.store import PostgresStore
from tessera.formulation.clock import SystemClock
from tessera.service.rpc.calls import Calls
from tessera.service.security.authenticator import Authenticator
from tessera.service.security.keys import KeySet, read_keys
from tessera.service.security.oidc import ALGORITHMS, OidcSettings, TokenVerifier
from tessera.service.settings.capacity import IDENTITY_THREADS

ISSUER: Final = "https://login.example.com"
AUDIENCE: Final = "tessera"
KEY_ID: Final = "k1"
RSA_BITS: Final = 2048


class CallStub:
    """The context of a call over TCP with a token, as far as checks of identities look at it."""

    def __init__(self, token: str) -> None:
        self._metadata = (("user-agent", "bench"), ("authorization", f"Bearer {token}"))

    def peer(self) -> str:
        """Return the address of the caller."""
        return "ipv4:127.0.0.1:50000"

    def auth_context(self) -> dict[str, Iterable[bytes]]:
        """Return the properties of the connection, which has no certificate of the caller."""
        return {"transport_security_type": [b"ssl"]}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of the call."""
        return self._metadata


class ProviderStub:
    """An identity provider with one RSA key, which makes tokens without a network."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
        algorithm = jwt.get_algorithm_by_name("RS256")
        text = cast(Any, algorithm).to_jwk(self._key.public_key())
        self._public = {**json.loads(text), "kid": KEY_ID, "use": "sig", "alg": "RS256"}

    def verifier(self) -> TokenVerifier:
        """Return a verifier of the provider's tokens."""
        settings = OidcSettings(issuer=ISSUER, audience=AUDIENCE, client_id="cli")
        keys = KeySet(lambda: read_keys([self._public], ALGORITHMS), SystemClock())
        keys.start()
        return TokenVerifier(settings, keys)

    def make_token(self, number: int) -> str:
        """Return a token that differs from those with other numbers."""
        now_s = int(SystemClock().wall_s())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": f"user-{number}",
            "iat": now_s,
            "exp": now_s + 3600,
            "roles": ["user"],
            "tenants": ["vision"],
        }
        return jwt.encode(claims, self._key, "RS256", {"kid": KEY_ID})


def time_checks(database: Database, token: str, checks: int) -> dict[str, list[float]]:
    """Return the seconds of each check, by kind. ``token`` is one of the server's own.

    The kinds alternate, so that other work on the machine delays them alike. ``control`` is not a
    check: it only asks whether the database is ready, in a thread of the same kind.
    """
    return asyncio.run(_time_checks(database, token, checks))


async def _time_checks(database: Database, token: str, checks: int) -> dict[str, list[float]]:
    provider, calls = ProviderStub(), Calls(IDENTITY_THREADS, "identity")
    authenticator = Authenticator(
        PostgresAccessStore(database),
        calls.run,
        verifier=provider.verifier(),
        wall_s=SystemClock().wall_s,
    )
    store = PostgresStore(database)
    own, fresh = CallStub(token), [CallStub(provider.make_token(k)) for k in range(checks + 1)]
    store.ready()
    for first in (own, fresh[checks]):  # these wait for a connection and for the provider's keys
        await _identify(authenticator, first)
    took: dict[str, list[float]] = {}

    async def measure(kind: str, call: CallStub) -> None:
        started_s = time.perf_counter()
        await _identify(authenticator, call)
        took.setdefault(kind, []).append(time.perf_counter() - started_s)

    for k in range(checks):
        authenticator.forget("")
        await measure("static_uncached", own)
        await measure("static_cached", own)
        await measure("oidc_uncached", fresh[k])
        await measure("oidc_cached", fresh[k])
        started_s = time.perf_counter()
        await calls.run(store.ready)
        took.setdefault("control", []).append(time.perf_counter() - started_s)
    await calls.close()
    return took


async def _identify(authenticator: Authenticator, call: CallStub) -> None:
    identity = await authenticator.identify(cast(Any, call))
    if not identity.is_verified:
        raise AssertionError("the caller was not asked for a token")
