"""The device flow: codes, polls, refusals, and what a strange provider can do to a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tessera.formulation.errors import InvalidInput, Unavailable
from tessera.service.cli import deviceflow
from tessera.service.cli.deviceflow import (
    DeviceFlow,
    LoginRefused,
    ProviderAccount,
    ProviderTokens,
    read_account,
)
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    DEVICE_GRANT,
    IdentityProvider,
    running_provider,
)


class HandClock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def monotonic_s(self) -> float:
        return sum(self.waits)


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def a_flow(provider: IdentityProvider, clock: HandClock, **changes: Any) -> DeviceFlow:
    values: dict[str, Any] = {
        "issuer": provider.issuer,
        "audience": AUDIENCE,
        "client_id": CLIENT_ID,
    }
    account = ProviderAccount(**(values | changes))
    return DeviceFlow(account, clock=clock, wait=clock.waits.append)


def log_in(provider: IdentityProvider, clock: HandClock, **changes: Any) -> ProviderTokens:
    flow = a_flow(provider, clock, **changes)
    return flow.wait_for_user(flow.begin())


def test_a_confirmed_login_gives_tokens(provider: IdentityProvider, clock: HandClock) -> None:
    provider.polls = ["authorization_pending", "authorization_pending"]
    tokens = log_in(provider, clock, scopes="openid offline_access")
    assert deviceflow.read_unverified_claims(tokens.token) == provider.usual_claims() | {
        "jti": "t1"
    }
    assert (tokens.refresh_token, tokens.lifetime_s) == ("refresh-1", 300.0)
    assert clock.waits == [1.0, 1.0, 1.0]
    assert provider.forms[0] == {
        "client_id": CLIENT_ID,
        "scope": "openid offline_access",
        "audience": AUDIENCE,
    }
    assert provider.forms[1] == {
        "grant_type": DEVICE_GRANT,
        "device_code": "the-device-code",
        "client_id": CLIENT_ID,
    }


def test_the_id_token_is_used_where_the_client_is_the_audience(
    provider: IdentityProvider, clock: HandClock
) -> None:
    tokens = log_in(provider, clock, audience=CLIENT_ID)
    claims = deviceflow.read_unverified_claims(tokens.token)
    assert claims is not None
    assert (claims["aud"], claims["jti"]) == (CLIENT_ID, "i1")
    assert "audience" not in provider.forms[0]


def test_polls_become_slower_when_the_provider_asks_for_it(
    provider: IdentityProvider, clock: HandClock
) -> None:
    provider.polls = ["slow_down", "authorization_pending", "slow_down"]
    log_in(provider, clock)
    assert clock.waits == [1.0, 6.0, 6.0, 11.0]


@pytest.mark.parametrize("interval_s", [None, 0, -1, 1e13])
def test_without_a_sensible_interval_polls_are_five_seconds_apart(
    provider: IdentityProvider, clock: HandClock, interval_s: float | None
) -> None:
    provider.interval_s = interval_s
    log_in(provider, clock)
    assert clock.waits == [5.0]


def test_a_denied_login_says_so(provider: IdentityProvider, clock: HandClock) -> None:
    provider.polls = ["authorization_pending", "access_denied"]
    with pytest.raises(LoginRefused, match="the login was denied"):
        log_in(provider, clock)


def test_an_expired_code_says_how_to_get_another(
    provider: IdentityProvider, clock: HandClock
) -> None:
    provider.polls = ["expired_token"]
    with pytest.raises(LoginRefused, match="the code has expired; run `tessera login` again"):
        log_in(provider, clock)


def test_polls_end_with_the_code_even_if_the_provider_never_says_so(
    provider: IdentityProvider, clock: HandClock
) -> None:
    provider.polls = ["authorization_pending"] * 100
    provider.expires_in_s = 10.0
    with pytest.raises(LoginRefused, match="the code has expired"):
        log_in(provider, clock)
    assert clock.waits == [1.0] * 9


def test_another_error_is_shown_with_its_description(
    provider: IdentityProvider, clock: HandClock
) -> None:
    provider.polls = ["unauthorized_client"]
    with pytest.raises(LoginRefused, match="unauthorized_client: described"):
        log_in(provider, clock)


def test_a_provider_that_fails_for_a_moment_is_asked_again_more_slowly(
    provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(provider, clock)
    code = flow.begin()
    provider.statuses = {"/token": 503}

    def wait(seconds: float) -> None:
        clock.waits.append(seconds)
        if len(clock.waits) == 3:
            provider.statuses = {}

    flow._wait = wait
    assert flow.wait_for_user(code).token
    assert clock.waits == [1.0, 2.0, 4.0]


def test_a_provider_that_stays_down_ends_the_login(
    provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(provider, clock)
    code = flow.begin()
    provider.switch_off()
    with pytest.raises(Unavailable, match="cannot be reached"):
        flow.wait_for_user(code)
    assert len(clock.waits) == deviceflow.MAX_FAILURES
    with pytest.raises(Unavailable, match="cannot be reached"):
        a_flow(provider, clock)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device_authorization_endpoint": None}, LoginRefused, "allows no logins from a command"),
        ({"device_authorization_endpoint": "http://10.0.0.1/"}, Unavailable, "not as safe"),
        ({"device_authorization_endpoint": "https://127.0.0.1/"}, Unavailable, "not as safe"),
        ({"issuer": "https://another.example"}, Unavailable, "calls itself by another name"),
    ],
)
def test_a_provider_without_a_safe_device_flow_is_refused(
    provider: IdentityProvider,
    clock: HandClock,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    provider.discovery = changes
    with pytest.raises(error, match=message):
        log_in(provider, clock)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"device_code": "d", "user_code": "\x1b[2Jcode", "verification_uri": "https://idp/go"},
        {"device_code": "d", "user_code": "code", "verification_uri": "https://idp/\x1b[2J"},
        {"device_code": "d", "user_code": "code", "verification_uri": "javascript:alert(1)"},
        {"device_code": "d", "user_code": "code", "verification_uri": "http://10.0.0.1/go"},
        {"device_code": "d", "user_code": "code", "verification_uri": ["https://idp/go"]},
        {"device_code": "", "user_code": "code", "verification_uri": "https://idp/go"},
    ],
)
def test_a_strange_code_never_reaches_the_terminal(
    provider: IdentityProvider, clock: HandClock, answer: dict[str, Any]
) -> None:
    provider.bodies = {"/device": json.dumps(answer).encode()}
    with pytest.raises(Unavailable, match="without a code and a link"):
        log_in(provider, clock)


def test_descriptions_of_errors_are_cleaned(provider: IdentityProvider, clock: HandClock) -> None:
    answer = {
        "error": "bad",
        "error_description": "\x1b[31m eyJhbGciOiJSUzI1NiJ9.e30.c2ln " + "x" * 999,
    }
    provider.bodies = {"/device": json.dumps(answer).encode()}
    provider.statuses = {"/device": 400}
    with pytest.raises(LoginRefused) as caught:
        log_in(provider, clock)
    message = str(caught.value)
    assert message.isprintable()
    assert "c2ln" not in message
    assert len(message) < 400


@pytest.mark.parametrize("token", [None, "opaque", "a.b.c", 7])
def test_a_token_that_no_server_could_read_is_refused(
    provider: IdentityProvider, clock: HandClock, token: Any
) -> None:
    provider.bodies = {"/token": json.dumps({"access_token": token}).encode()}
    with pytest.raises(LoginRefused, match="JSON web token for the audience"):
        log_in(provider, clock)


def test_a_login_is_renewed_until_its_session_ends(
    provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(provider, clock)
    first = flow.wait_for_user(flow.begin())
    second = flow.renew(first.refresh_token)
    assert (second.refresh_token, second.token == first.token) == ("refresh-2", False)
    provider.has_refresh_tokens = False
    third = flow.renew("refresh-2")
    assert third.refresh_token == "refresh-2"
    with pytest.raises(LoginRefused, match=r"the login has ended .*Session not active"):
        flow.renew("refresh-1")


def test_an_account_that_is_not_safe_is_refused() -> None:
    for issuer in ("", "http://idp.example", "ftp://idp.example"):
        with pytest.raises(InvalidInput, match="https://"):
            read_account(issuer, "a", "c", "")


def test_no_part_of_a_login_shows_its_secrets(provider: IdentityProvider, clock: HandClock) -> None:
    flow = a_flow(provider, clock)
    code = flow.begin()
    tokens = flow.wait_for_user(code)
    assert "the-device-code" not in repr(code)
    assert tokens.token not in repr(tokens)
    assert tokens.refresh_token not in repr(tokens)
