"""The renewal of a login whose token is about to expire."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tessera.client import ChannelRefused, Login, load_login, save_login
from tessera.client.logins import hold_lock, login_path
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import TesseraError
from tessera.service.cli.access.deviceflow import (
    DeviceFlow,
    LoginRefused,
    ProviderAccount,
    ProviderTokens,
    read_account,
)

RENEW_S: Final = 60.0
"""Time in seconds before its end at which a token is renewed."""

LOCK_NAME: Final = ".renewal.lock"


def renew_login(address: str, login: Login) -> Login:
    """Return the login at the server ``address``, renewed and saved if its token ends soon.

    Raises:
        ChannelRefused: the token has expired, and there is no other.
    """
    if not _ends_soon(login):
        return login
    # A refresh token may be good for one use only, so one process at a time renews.
    with _hold_lock():
        login = load_login(address) or login
        if not _ends_soon(login) or not login.refresh:
            return login
        try:
            renewed = _renew(login)
        except TesseraError as error:
            if login.expires_s > SystemClock().wall_s():
                return login  # which is good for some seconds, and the next call tries again
            advice = "log in again with `tessera login`" if _has_ended(error) else "try again later"
            raise ChannelRefused(
                f"the token has expired and was not renewed: {error}; {advice}"
            ) from None
        save_login(address, renewed)
        return renewed


def make_login(authorities: str, account: ProviderAccount, tokens: ProviderTokens) -> Login:
    """Return the login to save for tokens that were issued now."""
    refresh = {
        "issuer": account.issuer,
        "audience": account.audience,
        "client_id": account.client_id,
        "refresh_token": tokens.refresh_token,
    }
    return Login(
        authorities=authorities,
        token=tokens.token,
        expires_s=SystemClock().wall_s() + tokens.lifetime_s,
        refresh=refresh if tokens.refresh_token else {},
    )


def read_refresh(refresh: Mapping[str, Any]) -> tuple[ProviderAccount, str]:
    """Return the account and the refresh token of a login. Raises InvalidInput."""
    texts = {name: str(refresh.get(name) or "") for name in _FIELDS}
    refresh_token = texts.pop("refresh_token")
    return read_account(**texts, scopes=""), refresh_token


_FIELDS: Final = ("issuer", "audience", "client_id", "refresh_token")


def _renew(login: Login) -> Login:
    account, refresh_token = read_refresh(login.refresh)
    return make_login(login.authorities, account, DeviceFlow(account).renew(refresh_token))


def _ends_soon(login: Login) -> bool:
    return login.expires_s - SystemClock().wall_s() < RENEW_S


def _has_ended(error: TesseraError) -> bool:
    return isinstance(error, LoginRefused)


@contextlib.contextmanager
def _hold_lock() -> Iterator[None]:
    folder = login_path(os.environ).parent
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(folder / LOCK_NAME))
        except OSError as error:
            raise ChannelRefused(f"{folder} cannot be written: {error.strerror}") from error
        yield
