"""The login file: the authorities and the token of each server that a user has logged in to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tessera.client.refusals import ChannelRefused
from tessera.client.secretfiles import read_secret

FILE_NAME: Final = "login.json"
LOCK_NAME: Final = ".login.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The way to call a server. Its ``repr`` shows no secret.

    ``authorities`` is a file of certificates (PEM), ``system``, the certificates themselves, or ""
    for plain text. ``expires_s`` is the end of the token, in seconds since 1970. ``refresh`` is
    what a new token can be had with; only those that write it know its fields.
    """

    authorities: str = ""
    token: str = field(default="", repr=False)
    expires_s: float = math.inf
    refresh: Mapping[str, Any] = field(default_factory=dict, repr=False)


def login_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the login file."""
    home = environment.get("HOME") or str(Path.home())
    folder = environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return Path(folder) / "tessera" / FILE_NAME


def load_login(address: str, environment: Mapping[str, str] | None = None) -> Login | None:
    """Return the login at the server ``address``, or None.

    Raises:
        ChannelRefused: the file cannot be read or understood, or others can read it.
    """
    path = login_path(os.environ if environment is None else environment)
    entry = _load(path).get(address)
    if entry is None:
        return None
    try:
        return Login(
            authorities=str(entry.get("authorities") or ""),
            token=str(entry.get("token") or ""),
            expires_s=float(entry.get("expires_s", math.inf)),
            refresh=dict(entry.get("refresh") or {}),
        )
    except (AttributeError, TypeError, ValueError):  # the cause may repeat a secret
        raise _damaged(path) from None


def save_login(address: str, login: Login, environment: Mapping[str, str] | None = None) -> None:
    """Store a login in place of an earlier one at the same server. Raises ChannelRefused."""
    entry: dict[str, Any] = {"authorities": login.authorities, "token": login.token}
    if math.isfinite(login.expires_s):
        entry["expires_s"] = login.expires_s
    if login.refresh:
        entry["refresh"] = dict(login.refresh)
    with _change_file(environment) as entries:
        entries[address] = entry


def forget_login(address: str, environment: Mapping[str, str] | None = None) -> bool:
    """Remove the login at a server; return whether there was one. Raises ChannelRefused."""
    path = login_path(os.environ if environment is None else environment)
    if address not in _load(path):
        return False
    with _change_file(environment) as entries:
        return entries.pop(address, None) is not None


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        entries = json.loads(read_secret(path, "the login file"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise _damaged(path) from None
    if not isinstance(entries, dict):
        raise _damaged(path)
    return entries


def _damaged(path: Path) -> ChannelRefused:
    return ChannelRefused(f"the login file {path} is damaged; remove it, and log in again")


@contextlib.contextmanager
def _change_file(environment: Mapping[str, str] | None) -> Iterator[dict[str, Any]]:
    """Yield the entries of the login file, and write what they are at the end of the block."""
    path = login_path(os.environ if environment is None else environment)
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with hold_lock(path.parent / LOCK_NAME):
            entries = _load(path)
            yield entries
            _write(path, json.dumps(entries, indent=2))
    except OSError as error:
        raise ChannelRefused(
            f"the login file {path} cannot be written: {error.strerror}"
        ) from error


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if necessary, inside the block. Raises OSError."""
    # Only some systems have this, and most callers never log in.
    import fcntl  # noqa: PLC0415

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Replace a file that only its owner can read, in one step."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
