"""How a client reaches a server: the authorities it trusts, its certificate and its token."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.client.logins import Login, load_login
from tessera.client.refusals import ChannelRefused, holds_secret
from tessera.client.secretfiles import read_secret

SYSTEM: Final = "system"
"""The value of ``ChannelSettings.authorities`` for the authorities that this machine trusts."""

CERTIFICATE_START: Final = "-----BEGIN CERTIFICATE-----"

VARIABLES: Final = (
    "TESSERA_CA",
    "TESSERA_CERTIFICATE",
    "TESSERA_KEY",
    "TESSERA_SERVER_NAME",
    "TESSERA_TOKEN",
    "TESSERA_TOKEN_FILE",
)
"""The environment variables that ``find_settings`` reads."""

RenewLogin = Callable[[str, Login], Login]
"""A function of the server's address and a login that returns the login, renewed if it must be."""

FOLLOWED_S: Final = 60.0
"""Time in seconds before a token's end from which on the login file is read for another one."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,8000}")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """What a channel needs besides an address. Its ``repr`` shows no secret.

    ``authorities`` is a file of certificates (PEM) to trust, ``system`` for those of this machine,
    or the certificates themselves. If it is "", the channel is plain text, which is refused with a
    token unless the address is on this machine. ``certificate`` and ``key`` are files (PEM) for
    mutual TLS. ``renew_token`` returns the token for a call, in place of ``token``.
    """

    authorities: str = ""
    certificate: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""  # the name to expect in the server's certificate, if not the address
    renew_token: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    def find_token(self) -> Callable[[], str] | None:
        """Return a function that returns the token for a call, or None if calls carry none."""
        if self.renew_token is not None:
            return self.renew_token
        return (lambda: self.token) if self.token else None


PLAIN_TEXT: Final = ChannelSettings()
"""The settings of a channel without TLS and without an identity, whatever the environment says."""


class RenewedToken:
    """The token of a login, which is renewed when it must be. Calls may be made from any thread."""

    def __init__(self, address: str, login: Login, renew: RenewLogin) -> None:
        self._address, self._login, self._renew = address, login, renew
        self._lock = threading.Lock()

    def __call__(self) -> str:
        """Return the token for a call."""
        with self._lock:
            self._login = self._renew(self._address, self._login)
            return require_token("the login", self._login.token)


def follow_login(address: str, login: Login) -> Login:
    """Return the login as the login file has it, if its token ends soon, and ``login`` otherwise.

    The command line renews logins. A program that runs for longer than a token is good takes up
    the new one. Raises ChannelRefused: the file cannot be used.
    """
    now = Timestamp()
    now.GetCurrentTime()
    if login.expires_s - now.ToSeconds() > FOLLOWED_S:
        return login
    return load_login(address) or login


def find_settings(
    address: str, environment: Mapping[str, str], renew: RenewLogin | None = None
) -> ChannelSettings:
    """Return the settings for ``address`` from the environment, or else from the login file.

    A client with a certificate of its own does not use the login file.

    Raises:
        ChannelRefused: they contradict each other, or a file cannot be used. The message repeats no
            secret.
    """
    certificate, key = _find_path(environment, "CERTIFICATE"), _find_path(environment, "KEY")
    if (certificate is None) != (key is None):
        raise ChannelRefused("set both TESSERA_CERTIFICATE and TESSERA_KEY, or neither of them")
    authorities = environment.get("TESSERA_CA", "")
    if authorities and CERTIFICATE_START not in authorities:
        _find_path(environment, "CA")
    server_name = environment.get("TESSERA_SERVER_NAME", "")
    if server_name and (holds_secret(server_name) or not _HOST_NAME.fullmatch(server_name)):
        raise ChannelRefused("TESSERA_SERVER_NAME must be the name of a host")
    token, renewed = _find_token(environment), None
    if certificate is None and not (token and authorities):
        login = load_login(address, environment) or Login()
        authorities = authorities or login.authorities
        if not token and login.token:
            token = require_token("the login", login.token)
            renewed = RenewedToken(address, login, renew) if renew and login.refresh else None
    return ChannelSettings(
        authorities=authorities,
        certificate=certificate,
        key=key,
        token=token,
        server_name=server_name,
        renew_token=renewed,
    )


def require_token(source: str, token: str) -> str:
    """Return ``token`` if it can be sent. Raises ChannelRefused, without repeating the token."""
    if not _TOKEN.fullmatch(token):
        raise ChannelRefused(
            f"{source} holds no token, or one with spaces, line ends or other characters that cannot be"
            " sent; copy the token again, as one word"
        )
    return token


def _find_token(environment: Mapping[str, str]) -> str:
    """Return the token of the environment, or ""."""
    token, file = environment.get("TESSERA_TOKEN", ""), environment.get("TESSERA_TOKEN_FILE", "")
    if token and file:
        raise ChannelRefused("set TESSERA_TOKEN or TESSERA_TOKEN_FILE, but not both")
    if token:
        return require_token("TESSERA_TOKEN", token)
    if not file:
        return ""
    if holds_secret(file):
        raise ChannelRefused(
            "TESSERA_TOKEN_FILE holds a token, but must be the path of a file; set TESSERA_TOKEN to"
            " the token instead, or write it to a file of mode 600"
        )
    try:
        text = read_secret(Path(file), "the file of TESSERA_TOKEN_FILE")
    except UnicodeDecodeError:
        text = ""
    return require_token("the file of TESSERA_TOKEN_FILE", text.strip())


def _find_path(environment: Mapping[str, str], name: str) -> Path | None:
    """Return the path that a variable holds, or None if it is not set."""
    text = environment.get(f"TESSERA_{name}", "")
    if holds_secret(text):
        raise ChannelRefused(
            f"TESSERA_{name} holds a secret, but must be the path of a file; set it again, and consider"
            " the secret known to others"
        )
    return Path(text) if text else None
