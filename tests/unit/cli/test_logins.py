"""``tessera login``, ``logout`` and ``whoami``, and the device flow with an identity provider."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.client import Login, load_login, save_login
from tessera.formulation.base.access import Identity, Role
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.errors import (
    InvalidInput,
    NotAuthenticated,
    PermissionDenied,
    TesseraError,
    Unavailable,
)
from tessera.service.cli import main
from tessera.service.cli.access import deviceflow
from tessera.service.cli.access.deviceflow import (
    DeviceFlow,
    LoginRefused,
    ProviderAccount,
    ProviderTokens,
    read_account,
)
from tessera.service.server.rpc.serving.errors import status_of
from tessera.service.server.security.oidc import OidcSettings, make_verifier
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


class Lab:
    """A server that asks, its identity provider, and a user with a home of their own."""

    def __init__(self, provider: IdentityProvider, server: AskingServer, home: Path) -> None:
        self.provider, self.server = provider, server
        self.file = home / "tessera" / "login.json"

    def run(self, *arguments: str, code: int = 0, stdin: str = "") -> Result:
        """Run a command. Nothing that it prints may contain a secret."""
        result = CliRunner().invoke(main.app, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        secrets = ["refresh-", "the-device-code", "ssssssss", *filter(None, self.server.tokens)]
        secrets += [token.rpartition(".")[2] for token in self.server.tokens if "." in token]
        assert not any(secret in result.stdout + result.stderr for secret in secrets)
        return result

    def entry(self) -> dict[str, Any]:
        """Return what the file has of the login."""
        entry: dict[str, Any] = json.loads(self.file.read_text())[self.server.address]
        return entry

    def expire(self, left_s: float) -> Login:
        """Make the saved token end in ``left_s`` seconds; return the login."""
        login = load_login(self.server.address)
        assert login is not None
        ended = replace(login, expires_s=SystemClock().wall_s() + left_s)
        save_login(self.server.address, ended)
        return ended


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with running_provider() as provider:
        provider.wall_s = SystemClock().wall_s
        provider.interval_s = 0.001
        server = AskingServer(provider)  # type: ignore[abstract]  # other calls are not made
        with serve_grpc(partial(access_pb2_grpc.add_AccessServicer_to_server, server)) as address:
            server.address = address
            monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
            monkeypatch.setenv("TESSERA_SERVER", address)
            for name in ("TESSERA_TOKEN", "TESSERA_TOKEN_FILE", "TESSERA_CA"):
                monkeypatch.delenv(name, raising=False)
            yield Lab(provider, server, tmp_path)


def test_a_login_with_a_code_is_saved_and_used(lab: Lab) -> None:
    lab.provider.polls = ["authorization_pending"]
    result = lab.run("login")
    assert f"open {lab.provider.issuer}/go and enter the code WDJB-MJHT" in result.stderr
    assert f"logged in to {lab.server.address} as ada, with the role user" in result.stderr
    assert result.stdout == ""
    entry = lab.entry()
    assert entry["token"] == lab.server.tokens[-1]
    assert entry["refresh"] == {
        "issuer": lab.provider.issuer,
        "audience": AUDIENCE,
        "client_id": CLIENT_ID,
        "refresh_token": "refresh-1",
    }
    assert 200 < entry["expires_s"] - SystemClock().wall_s() <= 300
    shown = lab.run("whoami").stdout.splitlines()
    assert [" ".join(line.split()) for line in shown[:4]] == [
        "SUBJECT ada",
        "ROLE user",
        "TENANTS vision",
        "CLUSTERS all",
    ]
    before = lab.expire(10)
    lab.run("whoami")  # renews, and so writes a second time
    after = lab.entry()
    assert lab.server.tokens[-1] == after["token"] != before.token
    assert after["refresh"]["refresh_token"] == "refresh-2"
    assert after["expires_s"] > before.expires_s
    lab.run("whoami")
    assert lab.entry() == after  # which is good for some minutes
    for path in lab.file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(lab.file.parent.stat().st_mode) == 0o700


def test_a_static_token_is_read_from_stdin_and_whoami_has_the_formats_of_other_commands(
    lab: Lab,
) -> None:
    result = lab.run("login", "--token", stdin=f"{STATIC_TOKEN}\n")
    assert "as ci, with the role operator" in result.stderr
    assert lab.entry() == {"authorities": "", "token": STATIC_TOKEN}
    assert json.loads(lab.run("whoami", "-o", "json").stdout) == {
        "subject": "ci",
        "role": "operator",
        "clusters": [],
        "tenants": [],
        "all_clusters": True,
        "all_tenants": True,
        "verified": True,
    }
    assert lab.run("whoami", "-o", "name").stdout == "ci\n"
    assert "EXPIRES   never" in lab.run("whoami").stdout


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
def test_a_wrong_token_is_not_saved(lab: Lab, stdin: str, code: int, message: str) -> None:
    result = lab.run("login", "--token", stdin=stdin, code=code)
    assert message in result.stderr
    assert "rrrr" not in result.stderr
    assert not lab.file.exists()


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
def test_a_secret_among_the_arguments_is_never_repeated(lab: Lab, command: str) -> None:
    result = lab.run(*command.split(), code=2)
    assert "tessera_token" not in result.stdout + result.stderr
    if command.startswith("whoami t"):
        words = " ".join(result.stderr.replace("│", " ").split())
        assert "consider this secret known, and have it revoked" in words
        lab.run("whoami", "--server", STATIC_TOKEN, code=1)


def test_at_a_server_that_does_not_ask_nothing_is_saved(lab: Lab) -> None:
    lab.server.asks = False
    result = lab.run("login", "--token", stdin=STATIC_TOKEN, code=1)
    assert "no need to log in; nothing was saved" in result.stderr
    assert not lab.file.exists()
    assert "so everybody is local" in lab.run("whoami").stderr
    lab.server.login = access_pb2.Login()
    result = lab.run("login", code=1)
    assert "this server has no identity provider; use `tessera login --token`" in result.stderr


@pytest.mark.parametrize(
    ("polls", "claims", "message"),
    [
        (["access_denied"], {}, "the login was denied"),
        (["invalid_grant"], {}, "refused the login (invalid_grant: described)"),
        ([], {"roles": ["unknown"]}, f"[{PermissionDenied.reason}]"),
    ],
)
def test_a_refused_login_is_not_saved(
    lab: Lab, polls: list[str], claims: dict[str, Any], message: str
) -> None:
    lab.provider.polls, lab.provider.claims = polls, claims
    assert message in lab.run("login", code=1).stderr
    assert not lab.file.exists()


def test_an_interrupted_login_saves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.service.cli.access.login.DeviceFlow.wait_for_user", interrupt)
    lab.run("login", code=130)
    assert not lab.file.exists()


def test_two_commands_renew_a_login_once(lab: Lab) -> None:
    from tessera.service.cli.access.renewal import renew_login  # noqa: PLC0415 - after the environment

    lab.run("login")
    old = lab.expire(-10)
    with ThreadPoolExecutor(4) as pool:
        renewed = list(pool.map(lambda _: renew_login(lab.server.address, old), range(4)))
    assert len({login.token for login in renewed} - {old.token}) == 1
    grants = [form.get("grant_type") for form in lab.provider.forms]
    assert grants.count("refresh_token") == 1


def test_an_ended_session_says_how_to_log_in_again(lab: Lab) -> None:
    lab.run("login")
    lab.provider.end_session()
    lab.expire(30)
    lab.run("whoami")  # the token is still good for a moment
    lab.expire(-10)
    result = lab.run("whoami", code=1)
    assert "the token has expired and was not renewed: the login has ended" in result.stderr
    assert "log in again with `tessera login`" in result.stderr
    lab.run("login")  # does not use the ended one
    lab.run("whoami")


def test_a_provider_that_is_down_fails_commands_only_once_the_token_has_expired(lab: Lab) -> None:
    lab.run("login")
    lab.provider.switch_off()
    lab.expire(30)
    lab.run("whoami")
    lab.expire(-10)
    result = lab.run("whoami", code=1)
    assert "127.0.0.1 cannot be reached" in result.stderr
    assert "try again later" in result.stderr
    assert "127.0.0.1 cannot be reached" in lab.run("login", code=3).stderr
    assert "the identity provider was not informed" in lab.run("logout").stderr
    assert load_login(lab.server.address) is None


def test_a_logout_forgets_the_login_and_ends_it_at_the_provider(lab: Lab) -> None:
    lab.run("login")
    assert f"logged out of {lab.server.address}" in lab.run("logout").stderr
    assert json.loads(lab.file.read_text()) == {}
    assert lab.provider.forms[-1]["token"] == "refresh-1"
    assert "there was no login" in lab.run("logout").stderr
    lab.run("whoami", code=1)


def test_a_token_of_the_environment_takes_precedence_and_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_TOKEN", STATIC_TOKEN)
    assert "TESSERA_TOKEN is set and takes precedence" in lab.run("login").stderr
    assert lab.run("whoami", "-o", "name").stdout == "ci\n"


def test_authorities_are_saved_with_the_login(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.service.cli.access.login import _find_authorities  # noqa: PLC0415 - one part of it

    (tmp_path / "ca.pem").write_text("certificates")
    monkeypatch.chdir(tmp_path)
    assert _find_authorities("system", "h:1") == "system"
    assert _find_authorities("ca.pem", "h:1") == str(tmp_path / "ca.pem")
    assert _find_authorities("", "h:1") == ""
    save_login("h:1", Login(authorities="/last.pem", token=STATIC_TOKEN))
    assert _find_authorities("", "h:1") == "/last.pem"
    monkeypatch.setenv("TESSERA_CA", "ca.pem")
    assert _find_authorities("", "h:1") == str(tmp_path / "ca.pem")
    assert "there is no such file" in lab.run("login", "--ca", "absent.pem", code=2).stderr


class Device:
    """The device flow with a provider, by a clock that only waiting moves."""

    def __init__(self, provider: IdentityProvider) -> None:
        self.provider = provider
        self.waits: list[float] = []

    def monotonic_s(self) -> float:
        return sum(self.waits)

    def flow(self, **changes: Any) -> DeviceFlow:
        values = {"issuer": self.provider.issuer, "audience": AUDIENCE, "client_id": CLIENT_ID}
        account = ProviderAccount(**(values | changes))
        return DeviceFlow(account, clock=self, wait=self.waits.append)

    def log_in(self, **changes: Any) -> ProviderTokens:
        flow = self.flow(**changes)
        return flow.wait_for_user(flow.begin())


@pytest.fixture
def device() -> Iterator[Device]:
    with running_provider() as provider:
        yield Device(provider)


def test_a_confirmed_login_gives_tokens(device: Device) -> None:
    device.provider.polls = ["authorization_pending", "authorization_pending"]
    tokens = device.log_in(scopes="openid offline_access")
    assert deviceflow.read_unverified_claims(tokens.token) == device.provider.usual_claims() | {
        "jti": "t1"
    }
    assert (tokens.refresh_token, tokens.lifetime_s) == ("refresh-1", 300.0)
    assert device.waits == [1.0, 1.0, 1.0]
    assert device.provider.forms[0] == {
        "client_id": CLIENT_ID,
        "scope": "openid offline_access",
        "audience": AUDIENCE,
    }
    assert device.provider.forms[1] == {
        "grant_type": DEVICE_GRANT,
        "device_code": "the-device-code",
        "client_id": CLIENT_ID,
    }


def test_the_id_token_is_used_where_the_client_is_the_audience(device: Device) -> None:
    tokens = device.log_in(audience=CLIENT_ID)
    claims = deviceflow.read_unverified_claims(tokens.token)
    assert claims is not None
    assert (claims["aud"], claims["jti"]) == (CLIENT_ID, "i1")
    assert "audience" not in device.provider.forms[0]


def test_polls_become_slower_when_the_provider_asks_for_it_and_end_with_the_code(
    device: Device,
) -> None:
    device.provider.polls = ["slow_down", "authorization_pending", "slow_down"]
    device.log_in()
    assert device.waits == [1.0, 6.0, 6.0, 11.0]
    for no_interval_s in (None, 0, -1, 1e13):
        device.waits.clear()
        device.provider.interval_s = no_interval_s
        device.log_in()
        assert device.waits == [5.0]
    device.waits.clear()
    device.provider.interval_s, device.provider.expires_in_s = 1, 10.0
    device.provider.polls = ["authorization_pending"] * 100
    with pytest.raises(LoginRefused, match="the code has expired"):
        device.log_in()
    assert device.waits == [1.0] * 9


@pytest.mark.parametrize(
    ("polls", "message"),
    [
        (["authorization_pending", "access_denied"], "the login was denied"),
        (["expired_token"], "the code has expired; run `tessera login` again"),
        (["unauthorized_client"], "unauthorized_client: described"),
    ],
)
def test_a_refused_login_says_why(device: Device, polls: list[str], message: str) -> None:
    device.provider.polls = polls
    with pytest.raises(LoginRefused, match=message):
        device.log_in()


def test_a_provider_that_fails_for_a_moment_is_asked_again_more_slowly(device: Device) -> None:
    flow = device.flow()
    code = flow.begin()
    device.provider.statuses = {"/token": 503}

    def wait(seconds: float) -> None:
        device.waits.append(seconds)
        if len(device.waits) == 3:
            device.provider.statuses = {}

    flow._wait = wait
    assert flow.wait_for_user(code).token
    assert device.waits == [1.0, 2.0, 4.0]
    flow, code = device.flow(), flow.begin()
    device.waits.clear()
    device.provider.switch_off()
    with pytest.raises(Unavailable, match="cannot be reached"):
        flow.wait_for_user(code)
    assert len(device.waits) == deviceflow.MAX_FAILURES
    with pytest.raises(Unavailable, match="cannot be reached"):
        device.flow()


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
    device: Device, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    device.provider.discovery = changes
    with pytest.raises(error, match=message):
        device.log_in()
    for issuer in ("", "http://idp.example", "ftp://idp.example"):
        with pytest.raises(InvalidInput, match="https://"):
            read_account(issuer, "a", "c", "")


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
def test_a_strange_code_never_reaches_the_terminal(device: Device, answer: dict[str, Any]) -> None:
    device.provider.bodies = {"/device": json.dumps(answer).encode()}
    with pytest.raises(Unavailable, match="without a code and a link"):
        device.log_in()


def test_descriptions_of_errors_are_cleaned(device: Device) -> None:
    answer = {
        "error": "bad",
        "error_description": "\x1b[31m eyJhbGciOiJSUzI1NiJ9.e30.c2ln " + "x" * 999,
    }
    device.provider.bodies = {"/device": json.dumps(answer).encode()}
    device.provider.statuses = {"/device": 400}
    with pytest.raises(LoginRefused) as caught:
        device.log_in()
    message = str(caught.value)
    assert message.isprintable()
    assert "c2ln" not in message
    assert len(message) < 400


@pytest.mark.parametrize("token", [None, "opaque", "a.b.c", 7])
def test_a_token_that_no_server_could_read_is_refused(device: Device, token: Any) -> None:
    device.provider.bodies = {"/token": json.dumps({"access_token": token}).encode()}
    with pytest.raises(LoginRefused, match="JSON web token for the audience"):
        device.log_in()


def test_a_login_is_renewed_until_its_session_ends(device: Device) -> None:
    flow = device.flow()
    code = flow.begin()
    first = flow.wait_for_user(code)
    assert "the-device-code" not in repr(code)
    assert first.token not in repr(first)
    assert first.refresh_token not in repr(first)
    second = flow.renew(first.refresh_token)
    assert (second.refresh_token, second.token == first.token) == ("refresh-2", False)
    device.provider.has_refresh_tokens = False
    third = flow.renew("refresh-2")
    assert third.refresh_token == "refresh-2"
    with pytest.raises(LoginRefused, match=r"the login has ended .*Session not active"):
        flow.renew("refresh-1")
