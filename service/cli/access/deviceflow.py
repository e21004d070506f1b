"""Logins at an identity provider with a code that the user confirms elsewhere (RFC 8628)."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tessera.formulation.base.clock import Clock, SystemClock
from tessera.formulation.base.errors import InvalidInput, TesseraError, Unavailable
from tessera.formulation.base.secrets import hide_secrets
from tessera.service.server.security.provider import ProviderAnswer, ProviderConnection, is_secure

DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"

USUAL_INTERVAL_S: Final = 5.0
"""Seconds between two polls if the provider names no interval (RFC 8628, section 3.2)."""

SLOWER_S: Final = 5.0
"""Seconds by which ``slow_down`` makes the interval longer (RFC 8628, section 3.5)."""

MAX_INTERVAL_S: Final = 60.0

USUAL_LIFETIME_S: Final = 300.0
"""Lifetime in seconds of a token whose lifetime the provider does not name."""

MAX_FAILURES: Final = 5
"""Number of polls in succession that may fail before the login does."""

MAX_SHOWN_CHARS: Final = 200
"""Longest text of a provider that is shown."""


class LoginRefused(TesseraError):
    """The identity provider, or its user, refused a login. The message says what to do."""

    reason = "LOGIN_REFUSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAccount:
    """The identity provider as a server describes it."""

    issuer: str
    audience: str
    client_id: str
    scopes: str = "openid profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCode:
    """A login that waits for its user. Its ``repr`` shows no secret."""

    user_code: str
    url: str
    full_url: str  # with the code in it, or ""
    device_code: str = field(repr=False)
    interval_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderTokens:
    """The tokens of a login. Its ``repr`` shows no secret."""

    token: str = field(repr=False)
    refresh_token: str = field(repr=False)  # "" if the provider gives none
    lifetime_s: float


class DeviceFlow:
    """A login at one identity provider. The clock and the wait are arguments for tests."""

    def __init__(
        self,
        account: ProviderAccount,
        connection: ProviderConnection | None = None,
        clock: Clock | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._account = account
        self._connection = connection or ProviderConnection()
        self._clock, self._wait = clock or SystemClock(), wait
        self._description = self._connection.discover(account.issuer)

    def begin(self) -> DeviceCode:
        """Ask for a code.

        Raises:
            LoginRefused: the provider does not allow such logins.
            Unavailable: it does not answer.
        """
        account = self._account
        fields = {"client_id": account.client_id, "scope": account.scopes}
        if account.audience != account.client_id:
            fields["audience"] = account.audience
        answer = self._connection.post(self._endpoint("device_authorization_endpoint"), fields)
        if answer.status != 200:
            raise _explain_refusal("the identity provider refused to begin a login", answer)
        url, full_url = answer.text("verification_uri"), answer.text("verification_uri_complete")
        code = DeviceCode(
            user_code=answer.text("user_code"),
            url=url,
            full_url=full_url if _is_link(full_url) else "",
            device_code=answer.text("device_code"),
            interval_s=min(answer.number("interval", USUAL_INTERVAL_S), MAX_INTERVAL_S),
            expires_in_s=answer.number("expires_in", USUAL_LIFETIME_S),
        )
        if not _is_link(url) or not _is_shown(code.user_code) or not code.device_code:
            raise Unavailable(
                "the identity provider answered without a code and a link to enter it"
            )
        return code

    def wait_for_user(self, code: DeviceCode) -> ProviderTokens:
        """Ask until the user has confirmed the code.

        Raises:
            LoginRefused: the user denied the login, or the code has expired.
            Unavailable: the provider does not answer.
        """
        fields = {
            "grant_type": DEVICE_GRANT,
            "device_code": code.device_code,
            "client_id": self._account.client_id,
        }
        endpoint = self._endpoint("token_endpoint")
        interval_s, failures = code.interval_s, 0
        end_s = self._clock.monotonic_s() + code.expires_in_s
        while self._clock.monotonic_s() + interval_s < end_s:
            self._wait(interval_s)
            try:
                answer = _require_answer(self._connection.post(endpoint, fields))
            except Unavailable:
                failures += 1
                if failures >= MAX_FAILURES:
                    raise
                interval_s = min(2 * interval_s, MAX_INTERVAL_S)
                continue
            failures = 0
            if answer.status == 200:
                return self._read_tokens(answer)
            match answer.text("error"):
                case "authorization_pending":
                    continue
                case "slow_down":
                    interval_s += SLOWER_S
                case "access_denied":
                    raise LoginRefused(
                        "the login was denied; run `tessera login` again to repeat it"
                    )
                case "expired_token":
                    break
                case _:
                    raise _explain_refusal("the identity provider refused the login", answer)
        raise LoginRefused("the code has expired; run `tessera login` again for a new one")

    def renew(self, refresh_token: str) -> ProviderTokens:
        """Return new tokens. Without a new refresh token, the old one is still good.

        Raises:
            LoginRefused: the login has ended.
            Unavailable: the provider does not answer.
        """
        fields = {
            "grant_type": "refresh_token",
            "refresh_token": refresh_token,
            "client_id": self._account.client_id,
        }
        answer = _require_answer(self._connection.post(self._endpoint("token_endpoint"), fields))
        if answer.status != 200:
            raise _explain_refusal("the login has ended", answer)
        tokens = self._read_tokens(answer)
        return ProviderTokens(
            token=tokens.token,
            refresh_token=tokens.refresh_token or refresh_token,
            lifetime_s=tokens.lifetime_s,
        )

    def revoke(self, refresh_token: str) -> None:
        """End the login at the provider, if it allows that (RFC 7009). Raises Unavailable."""
        if self._description.text("revocation_endpoint"):
            fields = {
                "token": refresh_token,
                "token_type_hint": "refresh_token",
                "client_id": self._account.client_id,
            }
            self._connection.post(self._endpoint("revocation_endpoint"), fields)

    def _endpoint(self, name: str) -> str:
        url, issuer = self._description.text(name), self._account.issuer
        if not url:
            raise LoginRefused(
                f"the identity provider {issuer} has no {name.replace('_', ' ')}, so it allows no logins"
                " from a command line; ask its administrator to allow the device flow, or use"
                " `tessera login --token`"
            )
        if not is_secure(url) or url.partition(":")[0] != issuer.partition(":")[0]:
            raise Unavailable(f"the {name.replace('_', ' ')} of {issuer} is not as safe as itself")
        return url

    def _read_tokens(self, answer: ProviderAnswer) -> ProviderTokens:
        account = self._account
        # An audience that is the client itself is that of ID tokens.
        name = "id_token" if account.audience == account.client_id else "access_token"
        token = answer.text(name)
        claims = read_unverified_claims(token)
        if claims is None:
            raise LoginRefused(
                f"the identity provider gave no {name.replace('_', ' ')} that the server could read; its"
                f" administrator must make it a JSON web token for the audience {account.audience}"
            )
        return ProviderTokens(
            token=token,
            refresh_token=answer.text("refresh_token"),
            lifetime_s=_lifetime_s(claims, answer.number("expires_in", USUAL_LIFETIME_S)),
        )


def read_unverified_claims(token: str) -> dict[str, Any] | None:
    """Return the claims of a JSON web token, which prove nothing, or None if it is not one."""
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    return claims if isinstance(claims, dict) else None


def _lifetime_s(claims: Mapping[str, Any], usual_s: float) -> float:
    """Return for how long a token is good. Its own times do not depend on this machine's clock."""
    begin, end = claims.get("iat"), claims.get("exp")
    if isinstance(begin, int | float) and isinstance(end, int | float) and 0 < end - begin < 1e9:
        return float(end - begin)
    return usual_s


def _require_answer(answer: ProviderAnswer) -> ProviderAnswer:
    """Return an answer that is about the login. Raises Unavailable: the provider has a problem."""
    if answer.status >= 500 or answer.status == 429:
        raise Unavailable(f"the identity provider answered {answer.status}; try again")
    return answer


def _explain_refusal(problem: str, answer: ProviderAnswer) -> TesseraError:
    """Return the error for a refusal, with what the provider says about it."""
    words = [answer.text("error"), answer.text("error_description")]
    cause = ": ".join(_shown(word) for word in words if word) or f"status {answer.status}"
    return LoginRefused(f"{problem} ({cause})")


def _shown(text: str) -> str:
    """Return a provider's text without what terminals obey, and without secrets."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return hide_secrets(printable)[:MAX_SHOWN_CHARS]


def _is_shown(text: str) -> bool:
    return 0 < len(text) <= MAX_SHOWN_CHARS and text.isprintable()


def _is_link(text: str) -> bool:
    return len(text) <= 2000 and text.isascii() and text.isprintable() and is_secure(text)


def read_account(issuer: str, audience: str, client_id: str, scopes: str) -> ProviderAccount:
    """Return the account that a server or a login file describes. Raises InvalidInput."""
    if not client_id or not audience or not is_secure(issuer):
        raise InvalidInput(
            "issuer", "must be an https:// address, with an audience and a client id"
        )
    return ProviderAccount(
        issuer=issuer, audience=audience, client_id=client_id, scopes=scopes or "openid"
    )
