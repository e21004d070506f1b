"""Identities from the tokens of an OpenID Connect provider (JSON Web Tokens, RFC 7519)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import jwt

from tessera.formulation.base.access import PEOPLE, TENANT_ROLES, Identity, Role
from tessera.formulation.base.clock import Clock
from tessera.formulation.base.errors import InvalidInput, NotAuthenticated, PermissionDenied
from tessera.service.server.security.keys import KeySet, load_keys
from tessera.service.server.security.provider import ProviderConnection, is_secure

ALGORITHMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "RS256": "RSA",
        "RS384": "RSA",
        "RS512": "RSA",
        "PS256": "RSA",
        "ES256": "EC P-256",
        "ES384": "EC P-384",
        "EdDSA": "OKP Ed25519",
    }
)
"""The algorithms that are accepted, each with its type of key.

``none`` and the HMAC algorithms are missing: with them, a public key would do as a secret.
"""

MAX_TOKEN_BYTES: Final = 8 << 10
"""Largest size of a token. gRPC's headers could not hold a larger one."""

MAX_SUBJECT_LENGTH: Final = 255
"""Longest subject (OpenID Connect Core, section 2)."""

MAX_SKEW_S: Final = 600.0
"""Largest difference of clocks that can be allowed."""

CACHE_S: Final = 60.0
"""Time in seconds for which a verified token is not verified again."""

MAX_CACHED_TOKENS: Final = 10_000
"""Number of verified tokens that are remembered."""

_TYPES: Final = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
"""Values of a token's header ``typ``. Tokens of other types prove other things."""

_UNCHECKED: Final[Any] = {
    name: False
    for name in (
        "verify_exp",
        "verify_nbf",
        "verify_iat",
        "verify_aud",
        "verify_iss",
        "verify_sub",
        "verify_jti",
    )
}
"""Options of PyJWT without its checks of claims. Ours use the caller's clock, and say what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """The identity provider, and what its tokens mean here.

    Claims are names, or paths with dots such as ``realm_access.roles``. ``role_names`` maps values
    of the roles claim to our roles. If it is empty, the values are our roles. ``default_role`` is
    for callers without a role; with "" they are refused. Without a ``tenants_claim``, everyone sees
    all tenants, and without a ``clusters_claim``, all clusters. ``keys_url`` is discovered if it is
    "". ``authorities`` is a file of certificates (PEM) for the provider, "" for those of this
    machine.
    """

    issuer: str
    audience: str
    client_id: str
    scopes: str = "openid profile"
    roles_claim: str = "roles"
    tenants_claim: str = "tenants"
    clusters_claim: str = ""
    role_names: Mapping[str, str] = field(default_factory=dict)
    default_role: str = ""
    keys_url: str = ""
    skew_s: float = 60.0
    authorities: str = ""

    def __post_init__(self) -> None:
        """Refuse settings that have no meaning, or would trust the network. Raises InvalidInput."""
        for name in ("issuer", "audience", "client_id", "roles_claim"):
            if not getattr(self, name).strip():
                raise InvalidInput(f"oidc_{name}", "must not be empty")
        for name, url in (("issuer", self.issuer), ("keys_url", self.keys_url)):
            if url and not is_secure(url):
                raise InvalidInput(
                    f"oidc_{name}",
                    "must begin with https://; http:// is allowed on this machine only",
                )
        if not 0 <= self.skew_s <= MAX_SKEW_S:
            raise InvalidInput("oidc_skew_s", f"must be 0 to {MAX_SKEW_S:g} seconds")
        people = ", ".join(PEOPLE)
        if self.default_role and self.default_role not in PEOPLE:
            raise InvalidInput("oidc_default_role", f'must be "" or one of {people}')
        if not all(role in PEOPLE for role in self.role_names.values()):
            raise InvalidInput("oidc_role_names", f"each value must be one of {people}")


class TokenVerifier:
    """A check of tokens of one provider. It is safe to use from any thread."""

    def __init__(self, settings: OidcSettings, keys: KeySet) -> None:
        self._settings, self._keys = settings, keys
        self._cache = _VerifiedTokens()

    def find_verified(self, text: str, now_s: float) -> Identity | None:
        """Return whose token this is if it was verified a moment ago, without blocking."""
        if len(text) > MAX_TOKEN_BYTES:
            return None
        return self._cache.find(_digest(text), now_s, self._keys.version)

    def verify(self, text: str, now_s: float) -> Identity:
        """Return whose token this is. It may block while a key is fetched.

        ``now_s`` is in seconds since 1970. The identity ends when the token has expired, with the
        allowed difference of clocks added.

        Raises:
            NotAuthenticated: the token proves nothing. The message does not repeat it.
            PermissionDenied: the token is valid and has no role here.
            Unavailable: the provider cannot be reached, and the token's key is not known.
        """
        if len(text) > MAX_TOKEN_BYTES:
            raise NotAuthenticated(
                f"the token is longer than {MAX_TOKEN_BYTES:,} bytes; ask the administrator of the identity"
                " provider for tokens with fewer claims"
            )
        digest, version = _digest(text), self._keys.version
        if (identity := self._cache.find(digest, now_s, version)) is not None:
            return identity
        claims = self._read_claims(text)
        expires_s = self._check_times(claims, now_s)
        self._check_audience(claims)
        identity = self._identify(claims, expires_s)
        until_s = min(expires_s, now_s + CACHE_S)
        self._cache.add(digest, _VerifiedToken(identity, now_s, until_s, version))
        return identity

    def _read_claims(self, text: str) -> dict[str, Any]:
        """Return the claims of a token of our issuer that is signed with one of its keys."""
        header, unverified = _parse(text)
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise NotAuthenticated(
                f"the token is not signed with one of {', '.join(ALGORITHMS)}; no other algorithm is accepted"
            )
        if str(header.get("typ", "")).lower() not in _TYPES or not isinstance(key_id, str):
            raise NotAuthenticated("this token is not for calls; log in with `tessera login`")
        # Tokens of others must not cause a fetch of keys, so the issuer is compared first.
        if unverified.get("iss") != self._settings.issuer:
            raise NotAuthenticated(
                f"the token is not from {self._settings.issuer}, which this server trusts; log in with"
                " `tessera login`"
            )
        key = self._keys.find_key(key_id, algorithm)
        try:
            return jwt.decode(text, key.key, algorithms=[algorithm], options=_UNCHECKED)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise NotAuthenticated(
                "the token's signature is wrong; log in again with `tessera login`"
            ) from None

    def _check_times(self, claims: Mapping[str, Any], now_s: float) -> float:
        """Return when the token ends. Raises NotAuthenticated: it has, or it has not begun."""
        skew_s = self._settings.skew_s
        expires_s = _read_time(claims, "exp")
        if expires_s is None:
            raise NotAuthenticated(
                "the token never expires (it has no `exp`); such tokens are refused"
            )
        if now_s >= expires_s + skew_s:
            raise NotAuthenticated(
                f"the token expired {_span(now_s - expires_s)} ago by the clock of this server; log in again"
                " with `tessera login`. If the token is new, the clocks of the server and of the"
                " identity provider disagree"
            )
        for claim, event in (("nbf", "becomes valid"), ("iat", "was issued")):
            begins_s = _read_time(claims, claim)
            if begins_s is not None and begins_s > now_s + skew_s:
                ahead = _span(begins_s - now_s)
                raise NotAuthenticated(
                    f"by the clock of this server, the token {event} {ahead} in the future; try again"
                    f" later. If the token is new, the server's clock is {ahead} behind that of the"
                    " identity provider, and its administrator must set it"
                )
        return expires_s + skew_s

    def _check_audience(self, claims: Mapping[str, Any]) -> None:
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if self._settings.audience not in audiences:
            raise NotAuthenticated(
                f"the token is not for {self._settings.audience} (its audience); log in with"
                " `tessera login`"
            )

    def _identify(self, claims: Mapping[str, Any], expires_s: float) -> Identity:
        """Return who the caller is, from claims that are verified."""
        settings = self._settings
        subject = claims.get("sub")
        if not isinstance(subject, str) or not _is_subject(subject):
            raise NotAuthenticated(
                f"the token needs a subject (`sub`) of 1 to {MAX_SUBJECT_LENGTH} printable characters"
            )
        role = self._find_role(claims)
        tenants = clusters = None
        if settings.tenants_claim and role in TENANT_ROLES:
            tenants = frozenset(_read_texts(claims, settings.tenants_claim))
        if settings.clusters_claim:
            clusters = frozenset(_read_texts(claims, settings.clusters_claim))
        return Identity(
            subject=subject,
            role=role,
            key=f"oidc/{settings.issuer}",
            clusters=clusters,
            tenants=tenants,
            expires_s=expires_s,
        )

    def _find_role(self, claims: Mapping[str, Any]) -> Role:
        """Return the caller's highest role. Raises PermissionDenied: it has none."""
        settings = self._settings
        values = _read_texts(claims, settings.roles_claim)
        names = (
            {settings.role_names.get(v, "") for v in values} if settings.role_names else {*values}
        )
        role = next((role for role in reversed(PEOPLE) if role in names), settings.default_role)
        if not role:
            raise PermissionDenied(
                f"the token's claim {settings.roles_claim} has no role of this server; ask the"
                " administrator of the identity provider for one, then log in again"
            )
        return Role(role)


def make_verifier(settings: OidcSettings, clock: Clock) -> TokenVerifier:
    """Return a verifier that fetches the provider's keys. Raises InvalidInput: no such file."""
    connection = ProviderConnection(settings.authorities)
    keys = KeySet(
        lambda: load_keys(connection, settings.issuer, settings.keys_url, ALGORITHMS), clock
    )
    keys.start()
    return TokenVerifier(settings, keys)


@dataclass(frozen=True, slots=True)
class _VerifiedToken:
    """A token that was verified at ``from_s`` with the keys of ``version``."""

    identity: Identity
    from_s: float
    until_s: float
    version: int


class _VerifiedTokens:
    """The tokens that were verified last, by their SHA-256. The oldest ones make room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[bytes, _VerifiedToken] = {}

    def find(self, digest: bytes, now_s: float, version: int) -> Identity | None:
        """Return whose token this is, or None if it must be verified."""
        token = self._tokens.get(digest)
        # A clock that was set back must not make tokens last longer.
        if token is None or token.version != version or not token.from_s <= now_s < token.until_s:
            return None
        return token.identity

    def add(self, digest: bytes, token: _VerifiedToken) -> None:
        """Remember a token."""
        with self._lock:
            self._tokens.pop(digest, None)
            while len(self._tokens) >= MAX_CACHED_TOKENS:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[digest] = token


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _parse(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the claims of a token, which prove nothing yet."""
    try:
        parts = jwt.decode_complete(text, options={"verify_signature": False} | _UNCHECKED)
        header, claims = parts["header"], parts["payload"]
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        header = claims = None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise NotAuthenticated(
            "this is neither a token of Tessera nor a JSON web token; log in with `tessera login`"
        )
    return header, claims


def _read_time(claims: Mapping[str, Any], name: str) -> float | None:
    """Return a time of a token in seconds since 1970, or None if it has none."""
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e12:  # also refuses NaN, and integers beyond any float
        raise NotAuthenticated(f"the token's `{name}` is not a time in seconds since 1970")
    return float(value)


def _read_texts(claims: Mapping[str, Any], path: str) -> list[str]:
    """Return the texts of a claim: of a list its texts, and of one text this one."""
    value: Any = claims.get(path)
    if value is None:  # a name with dots goes first, because URLs are names of claims, too
        value = claims
        for step in path.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return [value]
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _is_subject(text: str) -> bool:
    return 0 < len(text) <= MAX_SUBJECT_LENGTH and text.isprintable() and bool(text.strip())


def _span(seconds: float) -> str:
    """Return a length of time, e.g. ``45 s`` or ``12 min``."""
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
