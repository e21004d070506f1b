"""``tessera login``, ``logout`` and ``whoami``, and the device flow with an identity provider."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.client import Login, load_login, save_login
from tessera.formulation.access import Identity, Role
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import (
    InvalidInput,
    NotAuthenticated,
    PermissionDenied,
    TesseraError,
    Unavailable,
)
from tessera.service.cli import deviceflow, main
from tessera.service.cli.deviceflow import (
    DeviceFlow,
    LoginRefused,
    ProviderAccount,
    ProviderTokens,
    read_account,
)
from tessera.service.rpc.errors import status_of
from tessera.service.security.oidc import OidcSettings, make_verifier
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    DEVICE_GRANT,
    IdentityProvider,
    running_provider,
)
from tests.support.local_server import serve_grpc

STATIC_TOKEN = "tessera_token_0123456789ab_" + "s" * 43
JOIN_TOKEN = "tessera_join_0123456789ab_" + "s" * 43


class AskingServer(access_pb2_grpc.AccessServicer):
    """A server that knows one static token, and the tokens of an identity provider."""

    def __init__(self, provider: IdentityProvider) -> None:
        settings = OidcSettings(issuer=provider.issuer, audience=AUDIENCE, client_id=CLIENT_ID)
        self.login = access_pb2.Login(
            issuer=provider.issuer, audience=AUDIENCE, client_id=CLIENT_ID, scopes="openid"
        )
        self.verifier = make_verifier(settings, SystemClock())
        self.asks = True
        self.tokens: list[str] = []
        self.address = ""

    def GetLogin(
        self, request: access_pb2.GetLoginRequest, context: grpc.ServicerContext
    ) -> access_pb2.Login:
        assert "authorization" not in dict(context.invocation_metadata())
        return self.login

    def GetCaller(
        self, request: access_pb2.GetCallerRequest, context: grpc.ServicerContext
    ) -> access_pb2.Caller:
        if not self.asks:
            return access_pb2.Caller(
                subject="local", role="admin", all_tenants=True, all_clusters=True
            )
        text = str(dict(context.invocation_metadata()).get("authorization", ""))
        self.tokens.append(text.removeprefix("Bearer "))
        try:
            identity = self._identify(self.tokens[-1])
        except TesseraError as error:
            context.abort_with_status(rpc_status.to_status(status_of(error)))
        caller = access_pb2.Caller(
            subject=identity.subject,
            role=identity.role,
            tenants=sorted(identity.tenants or ()),
            all_tenants=identity.tenants is None,
            all_clusters=identity.clusters is None,
            verified=True,
        )
        if identity.expires_s < 1e12:
            caller.expire_time.FromSeconds(int(identity.expires_s))
        return caller

    def _identify(self, text: str) -> Identity:
        if text == STATIC_TOKEN:
            return Identity(subject="ci", role=Role.OPERATOR, key="token/0123456789ab")
        if text.startswith("tessera"):
            raise NotAuthenticated("no such token")
        return self.verifier.verify(text, SystemClock().wall_s())


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.wall_s = SystemClock().wall_s
        provider.interval_s = 0.001
        yield provider


@pytest.fixture
def server(provider: IdentityProvider) -> Iterator[AskingServer]:
    servicer = AskingServer(provider)  # type: ignore[abstract]  # other calls are not made
    register = partial(access_pb2_grpc.add_AccessServicer_to_server, servicer)
    with serve_grpc(register) as address:
        servicer.address = address
        yield servicer


Run = Callable[..., Result]


@pytest.fixture
def run(server: AskingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command. Nothing that it prints may contain a secret."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TESSERA_SERVER", server.address)
    for name in ("TESSERA_TOKEN", "TESSERA_TOKEN_FILE", "TESSERA_CA"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, code: int = 0, stdin: str = "") -> Result:
        result = CliRunner().invoke(main.app, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        secrets = ["refresh-", "the-device-code", "ssssssss", *filter(None, server.tokens)]
        secrets += [token.rpartition(".")[2] for token in server.tokens if "." in token]
        assert not any(secret in result.stdout + result.stderr for secret in secrets)
        return result

    return run


@pytest.fixture
def login_file(tmp_path: Path) -> Path:
    return tmp_path / "tessera" / "login.json"


def read_entry(login_file: Path, server: AskingServer) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(login_file.read_text())[server.address]
    return entry


def expire(server: AskingServer, *, left_s: float) -> Login:
    """Make the saved token end in ``left_s`` seconds; return the login."""
    login = load_login(server.address)
    assert login is not None
    ended = Login(
        authorities=login.authorities,
        token=login.token,
        expires_s=SystemClock().wall_s() + left_s,
        refresh=login.refresh,
    )
    save_login(server.address, ended)
    return ended


def test_a_login_with_a_code_is_saved_and_used(
    run: Run, server: AskingServer, provider: IdentityProvider, login_file: Path
) -> None:
    provider.polls = ["authorization_pending"]
    result = run("login")
    assert f"open {provider.issuer}/go and enter the code WDJB-MJHT" in result.stderr
    assert f"logged in to {server.address} as ada, with the role user" in result.stderr
    assert result.stdout == ""
    entry = read_entry(login_file, server)
    assert entry["token"] == server.tokens[-1]
    assert entry["refresh"] == {
        "issuer": provider.issuer,
        "audience": AUDIENCE,
        "client_id": CLIENT_ID,
        "refresh_token": "refresh-1",
    }
    assert 200 < entry["expires_s"] - SystemClock().wall_s() <= 300
    shown = run("whoami").stdout.splitlines()
    assert [" ".join(line.split()) for line in shown[:4]] == [
        "SUBJECT ada",
        "ROLE user",
        "TENANTS vision",
        "CLUSTERS all",
    ]
    expire(server, left_s=10)
    run("whoami")  # renews, and so writes a second time
    for path in login_file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(login_file.parent.stat().st_mode) == 0o700


def test_a_static_token_is_read_from_stdin_and_whoami_has_the_formats_of_other_commands(
    run: Run, server: AskingServer, login_file: Path
) -> None:
    result = run("login", "--token", stdin=f"{STATIC_TOKEN}\n")
    assert "as ci, with the role operator" in result.stderr
    assert read_entry(login_file, server) == {"authorities": "", "token": STATIC_TOKEN}
    assert json.loads(run("whoami", "-o", "json").stdout) == {
        "subject": "ci",
        "role": "operator",
        "clusters": [],
        "tenants": [],
        "all_clusters": True,
        "all_tenants": True,
        "verified": True,
    }
    assert run("whoami", "-o", "name").stdout == "ci\n"
    assert "EXPIRES   never" in run("whoami").stdout


@pytest.mark.parametrize(
    ("stdin", "code", "message"),
    [
        ("", 2, "is not a token; a token begins with tessera_token_"),
        (STATIC_TOKEN[:-1], 2, "is not a token"),
        (f"{STATIC_TOKEN} {STATIC_TOKEN}", 2, "is not a token"),
        (STATIC_TOKEN * 300, 2, "is not a token"),
        (JOIN_TOKEN, 2, "this is a join token, which is for agents"),
        ("tessera_token_0123456789ab_" + "r" * 43, 1, "no such token"),
    ],
)
def test_a_wrong_token_is_not_saved(
    run: Run, login_file: Path, stdin: str, code: int, message: str
) -> None:
    result = run("login", "--token", stdin=stdin, code=code)
    assert message in result.stderr
    assert "rrrr" not in result.stderr
    assert not login_file.exists()


@pytest.mark.parametrize(
    "command",
    [
        f"whoami {STATIC_TOKEN}",
        f"login --token {STATIC_TOKEN}",
        f"login --token={STATIC_TOKEN}",
        f"login --{STATIC_TOKEN}",
        f"whoami --output {STATIC_TOKEN}",
        f"whoami -o{STATIC_TOKEN}",
        STATIC_TOKEN,
        f"--{STATIC_TOKEN}",
        "logout eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.ssssssss",
        "logout abcd1234ssssssssssssssssssssssss",
        f"login --ca {STATIC_TOKEN}",
    ],
)
def test_a_secret_among_the_arguments_is_never_repeated(run: Run, command: str) -> None:
    result = run(*command.split(), code=2)
    assert "tessera_token" not in result.stdout + result.stderr
    if command.startswith("whoami t"):
        words = " ".join(result.stderr.replace("│", " ").split())
        assert "consider this secret known, and have it revoked" in words
        run("whoami", "--server", STATIC_TOKEN, code=1)


def test_without_an_identity_provider_the_error_names_the_other_way(
    run: Run, server: AskingServer
) -> None:
    server.login = access_pb2.Login()
    result = run("login", code=1)
    assert "this server has no identity provider; use `tessera login --token`" in result.stderr


def test_at_a_server_that_does_not_ask_nothing_is_saved(
    run: Run, server: AskingServer, login_file: Path
) -> None:
    server.asks = False
    result = run("login", "--token", stdin=STATIC_TOKEN, code=1)
    assert "no need to log in; nothing was saved" in result.stderr
    assert not login_file.exists()
    assert "so everybody is local" in run("whoami").stderr


@pytest.mark.parametrize(
    ("polls", "claims", "message"),
    [
        (["access_denied"], {}, "the login was denied"),
        (["invalid_grant"], {}, "refused the login (invalid_grant: described)"),
        ([], {"roles": ["unknown"]}, f"[{PermissionDenied.reason}]"),
    ],
)
def test_a_refused_login_is_not_saved(
    run: Run,
    provider: IdentityProvider,
    login_file: Path,
    polls: list[str],
    claims: dict[str, Any],
    message: str,
) -> None:
    provider.polls, provider.claims = polls, claims
    assert message in run("login", code=1).stderr
    assert not login_file.exists()


def test_a_provider_that_is_down_ends_the_command_with_code_3(
    run: Run, provider: IdentityProvider
) -> None:
    provider.switch_off()
    assert "127.0.0.1 cannot be reached" in run("login", code=3).stderr


def test_an_interrupted_login_saves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, login_file: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.service.cli.login.DeviceFlow.wait_for_user", interrupt)
    run("login", code=130)
    assert not login_file.exists()


def test_a_token_near_its_end_is_renewed_when_a_command_starts(
    run: Run, server: AskingServer, login_file: Path
) -> None:
    run("login")
    before = expire(server, left_s=10)
    run("whoami")
    after = read_entry(login_file, server)
    assert server.tokens[-1] == after["token"] != before.token
    assert after["refresh"]["refresh_token"] == "refresh-2"
    assert after["expires_s"] > before.expires_s
    run("whoami")
    assert read_entry(login_file, server) == after  # which is good for some minutes


def test_two_commands_renew_a_login_once(
    run: Run, server: AskingServer, provider: IdentityProvider
) -> None:
    from tessera.service.cli.renewal import renew_login  # noqa: PLC0415 - after the environment

    run("login")
    old = expire(server, left_s=-10)
    with ThreadPoolExecutor(4) as pool:
        renewed = list(pool.map(lambda _: renew_login(server.address, old), range(4)))
    assert len({login.token for login in renewed} - {old.token}) == 1
    grants = [form.get("grant_type") for form in provider.forms]
    assert grants.count("refresh_token") == 1


def test_an_ended_session_says_how_to_log_in_again(
    run: Run, server: AskingServer, provider: IdentityProvider
) -> None:
    run("login")
    provider.end_session()
    expire(server, left_s=30)
    run("whoami")  # the token is still good for a moment
    expire(server, left_s=-10)
    result = run("whoami", code=1)
    assert "the token has expired and was not renewed: the login has ended" in result.stderr
    assert "log in again with `tessera login`" in result.stderr
    run("login")  # does not use the ended one
    run("whoami")


def test_a_provider_that_is_down_fails_commands_only_once_the_token_has_expired(
    run: Run, server: AskingServer, provider: IdentityProvider
) -> None:
    run("login")
    provider.switch_off()
    expire(server, left_s=30)
    run("whoami")
    expire(server, left_s=-10)
    result = run("whoami", code=1)
    assert "127.0.0.1 cannot be reached" in result.stderr
    assert "try again later" in result.stderr


def test_a_logout_forgets_the_login_and_ends_it_at_the_provider(
    run: Run, server: AskingServer, provider: IdentityProvider, login_file: Path
) -> None:
    run("login")
    assert f"logged out of {server.address}" in run("logout").stderr
    assert json.loads(login_file.read_text()) == {}
    assert provider.forms[-1]["token"] == "refresh-1"
    assert "there was no login" in run("logout").stderr
    run("whoami", code=1)


def test_a_logout_works_while_the_provider_is_down(
    run: Run, server: AskingServer, provider: IdentityProvider
) -> None:
    run("login")
    provider.switch_off()
    result = run("logout")
    assert "the identity provider was not informed" in result.stderr
    assert load_login(server.address) is None


def test_a_token_of_the_environment_takes_precedence_and_is_named(
    run: Run, server: AskingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_TOKEN", STATIC_TOKEN)
    assert "TESSERA_TOKEN is set and takes precedence" in run("login").stderr
    assert run("whoami", "-o", "name").stdout == "ci\n"


def test_authorities_are_saved_with_the_login(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.service.cli.login import _find_authorities  # noqa: PLC0415 - one part of it

    (tmp_path / "ca.pem").write_text("certificates")
    monkeypatch.chdir(tmp_path)
    assert _find_authorities("system", "h:1") == "system"
    assert _find_authorities("ca.pem", "h:1") == str(tmp_path / "ca.pem")
    assert _find_authorities("", "h:1") == ""
    save_login("h:1", Login(authorities="/last.pem", token=STATIC_TOKEN))
    assert _find_authorities("", "h:1") == "/last.pem"
    monkeypatch.setenv("TESSERA_CA", "ca.pem")
    assert _find_authorities("", "h:1") == str(tmp_path / "ca.pem")
    assert "there is no such file" in run("login", "--ca", "absent.pem", code=2).stderr


class HandClock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def monotonic_s(self) -> float:
        return sum(self.waits)


@pytest.fixture
def device_provider() -> Iterator[IdentityProvider]:
    """Yield a provider with the clock of its tests, whose waits are only recorded."""
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


def log_in(device_provider: IdentityProvider, clock: HandClock, **changes: Any) -> ProviderTokens:
    flow = a_flow(device_provider, clock, **changes)
    return flow.wait_for_user(flow.begin())


def test_a_confirmed_login_gives_tokens(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    device_provider.polls = ["authorization_pending", "authorization_pending"]
    tokens = log_in(device_provider, clock, scopes="openid offline_access")
    assert deviceflow.read_unverified_claims(tokens.token) == device_provider.usual_claims() | {
        "jti": "t1"
    }
    assert (tokens.refresh_token, tokens.lifetime_s) == ("refresh-1", 300.0)
    assert clock.waits == [1.0, 1.0, 1.0]
    assert device_provider.forms[0] == {
        "client_id": CLIENT_ID,
        "scope": "openid offline_access",
        "audience": AUDIENCE,
    }
    assert device_provider.forms[1] == {
        "grant_type": DEVICE_GRANT,
        "device_code": "the-device-code",
        "client_id": CLIENT_ID,
    }


def test_the_id_token_is_used_where_the_client_is_the_audience(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    tokens = log_in(device_provider, clock, audience=CLIENT_ID)
    claims = deviceflow.read_unverified_claims(tokens.token)
    assert claims is not None
    assert (claims["aud"], claims["jti"]) == (CLIENT_ID, "i1")
    assert "audience" not in device_provider.forms[0]


def test_polls_become_slower_when_the_provider_asks_for_it(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    device_provider.polls = ["slow_down", "authorization_pending", "slow_down"]
    log_in(device_provider, clock)
    assert clock.waits == [1.0, 6.0, 6.0, 11.0]


@pytest.mark.parametrize("interval_s", [None, 0, -1, 1e13])
def test_without_a_sensible_interval_polls_are_five_seconds_apart(
    device_provider: IdentityProvider, clock: HandClock, interval_s: float | None
) -> None:
    device_provider.interval_s = interval_s
    log_in(device_provider, clock)
    assert clock.waits == [5.0]


@pytest.mark.parametrize(
    ("polls", "message"),
    [
        (["authorization_pending", "access_denied"], "the login was denied"),
        (["expired_token"], "the code has expired; run `tessera login` again"),
        (["unauthorized_client"], "unauthorized_client: described"),
    ],
)
def test_a_refused_login_says_why(
    device_provider: IdentityProvider, clock: HandClock, polls: list[str], message: str
) -> None:
    device_provider.polls = polls
    with pytest.raises(LoginRefused, match=message):
        log_in(device_provider, clock)


def test_polls_end_with_the_code_even_if_the_provider_never_says_so(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    device_provider.polls = ["authorization_pending"] * 100
    device_provider.expires_in_s = 10.0
    with pytest.raises(LoginRefused, match="the code has expired"):
        log_in(device_provider, clock)
    assert clock.waits == [1.0] * 9


def test_a_provider_that_fails_for_a_moment_is_asked_again_more_slowly(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(device_provider, clock)
    code = flow.begin()
    device_provider.statuses = {"/token": 503}

    def wait(seconds: float) -> None:
        clock.waits.append(seconds)
        if len(clock.waits) == 3:
            device_provider.statuses = {}

    flow._wait = wait
    assert flow.wait_for_user(code).token
    assert clock.waits == [1.0, 2.0, 4.0]


def test_a_provider_that_stays_down_ends_the_login(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(device_provider, clock)
    code = flow.begin()
    device_provider.switch_off()
    with pytest.raises(Unavailable, match="cannot be reached"):
        flow.wait_for_user(code)
    assert len(clock.waits) == deviceflow.MAX_FAILURES
    with pytest.raises(Unavailable, match="cannot be reached"):
        a_flow(device_provider, clock)


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
    device_provider: IdentityProvider,
    clock: HandClock,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    device_provider.discovery = changes
    with pytest.raises(error, match=message):
        log_in(device_provider, clock)


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
    device_provider: IdentityProvider, clock: HandClock, answer: dict[str, Any]
) -> None:
    device_provider.bodies = {"/device": json.dumps(answer).encode()}
    with pytest.raises(Unavailable, match="without a code and a link"):
        log_in(device_provider, clock)


def test_descriptions_of_errors_are_cleaned(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    answer = {
        "error": "bad",
        "error_description": "\x1b[31m eyJhbGciOiJSUzI1NiJ9.e30.c2ln " + "x" * 999,
    }
    device_provider.bodies = {"/device": json.dumps(answer).encode()}
    device_provider.statuses = {"/device": 400}
    with pytest.raises(LoginRefused) as caught:
        log_in(device_provider, clock)
    message = str(caught.value)
    assert message.isprintable()
    assert "c2ln" not in message
    assert len(message) < 400


@pytest.mark.parametrize("token", [None, "opaque", "a.b.c", 7])
def test_a_token_that_no_server_could_read_is_refused(
    device_provider: IdentityProvider, clock: HandClock, token: Any
) -> None:
    device_provider.bodies = {"/token": json.dumps({"access_token": token}).encode()}
    with pytest.raises(LoginRefused, match="JSON web token for the audience"):
        log_in(device_provider, clock)


def test_a_login_is_renewed_until_its_session_ends(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(device_provider, clock)
    first = flow.wait_for_user(flow.begin())
    second = flow.renew(first.refresh_token)
    assert (second.refresh_token, second.token == first.token) == ("refresh-2", False)
    device_provider.has_refresh_tokens = False
    third = flow.renew("refresh-2")
    assert third.refresh_token == "refresh-2"
    with pytest.raises(LoginRefused, match=r"the login has ended .*Session not active"):
        flow.renew("refresh-1")


def test_an_account_that_is_not_safe_is_refused() -> None:
    for issuer in ("", "http://idp.example", "ftp://idp.example"):
        with pytest.raises(InvalidInput, match="https://"):
            read_account(issuer, "a", "c", "")


def test_no_part_of_a_login_shows_its_secrets(
    device_provider: IdentityProvider, clock: HandClock
) -> None:
    flow = a_flow(device_provider, clock)
    code = flow.begin()
    tokens = flow.wait_for_user(code)
    assert "the-device-code" not in repr(code)
    assert tokens.token not in repr(tokens)
    assert tokens.refresh_token not in repr(tokens)
