"""The keys with which an identity provider signs, fetched in the background and kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import NotAuthenticated, TesseraError, Unavailable
from tessera.service.server.security.provider import ProviderConnection, is_secure

log = logging.getLogger(__name__)

REFRESH_S: Final = 3600.0
"""Age in seconds from which the keys are fetched again while they are in use."""

KEEP_S: Final = 24 * 3600.0
"""Age in seconds until which the keys are used if the provider cannot be reached."""

FETCH_INTERVAL_S: Final = 10.0
"""Shortest time in seconds between two fetches, whatever the tokens ask for."""

WAIT_S: Final = 12.0
"""Longest time in seconds that a caller waits for a fetch: a little more than its two requests."""

ABANDON_S: Final = 60.0
"""Time in seconds after which a fetch that has not ended no longer prevents another one."""

MAX_WAITERS: Final = 4
"""Number of callers that wait for a fetch at the same time. The others are refused for now."""

MAX_KEYS: Final = 100
"""Number of keys of a provider that are read. Providers have fewer than ten."""

RSA_BITS: Final = (2048, 8192)
"""Smallest and largest RSA key. Smaller ones are weak, and larger ones are slow to check."""

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key of the provider, with the algorithms for which it may be used."""

    id: str  # "" if the provider gives it none
    key: PublicKey
    algorithms: frozenset[str]


@dataclass(slots=True)
class _Fetch:
    """A fetch that is in progress, or has ended."""

    started_s: float
    ended: threading.Event = field(default_factory=threading.Event)
    error: TesseraError | None = None


class KeySet:
    """The signing keys of an identity provider.

    Fetches run in threads of their own. A caller waits for one only if its key is unknown. It is
    safe to use from any thread.
    """

    def __init__(self, load: Callable[[], list[SigningKey]], clock: Clock) -> None:
        self._load, self._clock = load, clock
        self._lock = threading.Lock()
        self._keys: tuple[SigningKey, ...] = ()
        self._loaded_s = -float("inf")
        self._fetch: _Fetch | None = None
        self._waiters = 0
        self._unreachable = False
        self.version = 0
        """A number that rises when the keys change, so that what was verified with old ones ends."""

    def start(self) -> None:
        """Begin to fetch the keys, so that the first caller need not wait for them."""
        with self._lock:
            self._begin_fetch(self._clock.monotonic_s())

    def find_key(self, key_id: str, algorithm: str) -> SigningKey:
        """Return the key with this id for this algorithm. It may block while the key is unknown.

        Without an id, the provider must have only one key for the algorithm.

        Raises:
            NotAuthenticated: the provider has no such key.
            Unavailable: the provider cannot be reached, and the key is not known.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            key = self._known_key(key_id, algorithm, now_s)
            fetch = self._fetch
            if key is None or now_s - self._loaded_s > REFRESH_S:
                fetch = self._begin_fetch(now_s)
            if key is not None:
                return key
            if fetch is not None and not fetch.ended.is_set():
                if self._waiters >= MAX_WAITERS:
                    raise Unavailable(
                        "the keys of the identity provider are being fetched; try again in some seconds"
                    )
                self._waiters += 1
            else:
                self._refuse_unknown(fetch)
        try:
            fetch.ended.wait(WAIT_S)
        finally:
            with self._lock:
                self._waiters -= 1
        with self._lock:
            key = self._known_key(key_id, algorithm, self._clock.monotonic_s())
            if key is None:
                self._refuse_unknown(fetch)
            return key

    def _known_key(self, key_id: str, algorithm: str, now_s: float) -> SigningKey | None:
        """Return the key if it is known and not too old. The lock is held."""
        if now_s - self._loaded_s > KEEP_S:
            return None
        keys = [key for key in self._keys if algorithm in key.algorithms]
        if not key_id:
            return keys[0] if len(keys) == 1 else None
        return next((key for key in keys if key.id == key_id), None)

    def _begin_fetch(self, now_s: float) -> _Fetch | None:
        """Begin a fetch unless one is in progress or was a moment ago; return it or that one."""
        last = self._fetch
        if last is not None:
            age_s = now_s - last.started_s
            if age_s < (FETCH_INTERVAL_S if last.ended.is_set() else ABANDON_S):
                return last
        self._fetch = fetch = _Fetch(now_s)
        threading.Thread(target=self._run, args=(fetch,), name="oidc-keys", daemon=True).start()
        return fetch

    def _run(self, fetch: _Fetch) -> None:
        """Fetch the keys, and keep the old ones if that fails."""
        try:
            keys = tuple(self._load())
        except TesseraError as error:
            self._end_fetch(fetch, None, error)
        except Exception as error:
            log.exception(
                "cannot fetch the keys of the identity provider", extra={"event": "oidc_failed"}
            )
            self._end_fetch(fetch, None, Unavailable(f"an error occurred ({type(error).__name__})"))
        else:
            self._end_fetch(fetch, keys, None)

    def _end_fetch(
        self, fetch: _Fetch, keys: tuple[SigningKey, ...] | None, error: TesseraError | None
    ) -> None:
        with self._lock:
            fetch.error = error
            if fetch is self._fetch:  # else it was abandoned, and its answer is old
                if keys is not None:
                    self._replace_keys(keys)
                self._log_reachability(error)
            fetch.ended.set()

    def _replace_keys(self, keys: tuple[SigningKey, ...]) -> None:
        old, new = _identify(self._keys), _identify(keys)
        if old != new:
            self.version += 1
            if old:
                log.info(
                    "the identity provider has changed its signing keys",
                    extra={
                        "event": "oidc_keys_rotated",
                        "added": len(new - old),
                        "withdrawn": len(old - new),
                    },
                )
        self._keys, self._loaded_s = keys, self._clock.monotonic_s()

    def _log_reachability(self, error: TesseraError | None) -> None:
        """Log when the provider becomes unreachable or reachable, once each."""
        if error is not None and not self._unreachable:
            log.warning(
                "the signing keys of the identity provider cannot be fetched; known keys are used for"
                " up to 24 h",
                extra={"event": "oidc_unreachable", "error": error},
            )
        elif error is None and self._unreachable:
            log.info("the identity provider answers again", extra={"event": "oidc_reachable"})
        self._unreachable = error is not None

    def _refuse_unknown(self, fetch: _Fetch | None) -> NoReturn:
        """Refuse a token whose key is unknown after a fetch."""
        if fetch is None or not fetch.ended.is_set():
            raise Unavailable("the identity provider does not answer; try again in some seconds")
        if fetch.error is not None:
            raise Unavailable(
                "the token cannot be checked, because the identity provider's keys are unknown:"
                f" {fetch.error}"
            )
        raise NotAuthenticated(
            "the token is signed with a key that the identity provider did not have some seconds ago; try"
            f" again in {FETCH_INTERVAL_S:g} s, or log in again with `tessera login`"
        )


def load_keys(
    connection: ProviderConnection, issuer: str, keys_url: str, algorithms: Mapping[str, str]
) -> list[SigningKey]:
    """Return the provider's keys.

    If ``keys_url`` is "", it is discovered. ``algorithms`` maps each allowed algorithm to its type
    of key.

    Raises:
        Unavailable: the provider cannot be reached, or has no key that can be used.
    """
    if not keys_url:
        keys_url = connection.discover(issuer).text("jwks_uri")
        if not is_secure(keys_url) or keys_url.partition(":")[0] != issuer.partition(":")[0]:
            raise Unavailable(
                f"the identity provider at {issuer} names no address of its keys that is as safe as"
                " its own"
            )
    answer = connection.get(keys_url)
    entries = answer.document.get("keys")
    if answer.status != 200 or not isinstance(entries, list):
        raise Unavailable(f"{keys_url} answered {answer.status} without a set of keys")
    keys = read_keys(entries, algorithms)
    if not keys:
        raise Unavailable(f"{keys_url} has no key with which tokens may be signed")
    return keys


def read_keys(entries: Iterable[Any], algorithms: Mapping[str, str]) -> list[SigningKey]:
    """Return the keys of a JSON Web Key Set that may be used. The others are left out."""
    keys = []
    for entry in list(entries)[:MAX_KEYS]:
        if isinstance(entry, dict) and (key := _read_key(entry, algorithms)) is not None:
            keys.append(key)
    return keys


def _read_key(entry: dict[str, Any], algorithms: Mapping[str, str]) -> SigningKey | None:
    """Return a key, or None if it is not public, not for signatures, or weak."""
    usual = {name for name, kind in algorithms.items() if kind == _kind_of(entry)}
    allowed = usual & {entry["alg"]} if isinstance(entry.get("alg"), str) else usual
    operations = entry.get("key_ops")
    is_for_signatures = entry.get("use", "sig") == "sig" and (
        not isinstance(operations, list) or "verify" in operations
    )
    if not allowed or not is_for_signatures:
        return None
    public = {name: value for name, value in entry.items() if name not in _PRIVATE}
    try:
        key = jwt.PyJWK.from_dict(public, algorithm=min(allowed)).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if not isinstance(key, PublicKey) or _is_weak(key):
        return None
    key_id = entry.get("kid", "")
    return SigningKey(key_id if isinstance(key_id, str) else "", key, frozenset(allowed))


_PRIVATE: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})
"""The secret parts of a key. A provider that publishes them has other problems."""


def _kind_of(entry: dict[str, Any]) -> str:
    """Return the type of a key with its curve, e.g. ``RSA`` or ``EC P-256``."""
    return " ".join(str(entry[name]) for name in ("kty", "crv") if name in entry)


def _is_weak(key: PublicKey) -> bool:
    return isinstance(key, RSAPublicKey) and not RSA_BITS[0] <= key.key_size <= RSA_BITS[1]


def _identify(keys: Iterable[SigningKey]) -> set[tuple[str, bytes]]:
    """Return the ids of keys with what tells keys of one id apart."""
    return {(key.id, _raw(key.key)) for key in keys}


def _raw(key: PublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
