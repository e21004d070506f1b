"""``tessera login``, ``logout`` and ``whoami`` with an identity provider and a server that asks."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from tessera.client import Login, load_login, save_login
from tessera.formulation.access import Identity, Role
from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import NotAuthenticated, PermissionDenied, TesseraError
from tessera.service.cli import main
from tessera.service.rpc.errors import status_of
from tessera.service.security.oidc import OidcSettings, make_verifier
from tessera.v1 import access_pb2, access_pb2_grpc
from tests.support.identity_provider import (
    AUDIENCE,
    CLIENT_ID,
    IdentityProvider,
    running_provider,
)

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
    pool = ThreadPoolExecutor(2)
    process = grpc.server(pool)
    access_pb2_grpc.add_AccessServicer_to_server(servicer, process)
    servicer.address = f"127.0.0.1:{process.add_insecure_port('127.0.0.1:0')}"
    process.start()
    yield servicer
    process.stop(None).wait()
    pool.shutdown()


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
    shown = run("whoami")
    assert [line.split() for line in shown.stdout.splitlines()][:4] == [
        ["SUBJECT", "ada"],
        ["ROLE", "user"],
        ["TENANTS", "vision"],
        ["CLUSTERS", "all"],
    ]


def test_the_files_of_a_login_can_be_read_by_their_owner_only(
    run: Run, server: AskingServer, login_file: Path
) -> None:
    run("login")
    expire(server, left_s=10)
    run("whoami")  # renews, and so writes a second time
    for path in login_file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(login_file.parent.stat().st_mode) == 0o700


def test_whoami_has_the_formats_of_other_commands(run: Run) -> None:
    run("login", "--token", stdin=STATIC_TOKEN)
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


def test_a_static_token_is_read_from_stdin_and_saved(
    run: Run, server: AskingServer, login_file: Path, tmp_path: Path
) -> None:
    result = run("login", "--token", stdin=f"{STATIC_TOKEN}\n")
    assert "as ci, with the role operator" in result.stderr
    assert read_entry(login_file, server) == {"authorities": "", "token": STATIC_TOKEN}


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
    "arguments",
    [
        ["whoami", STATIC_TOKEN],
        ["login", "--token", STATIC_TOKEN],
        ["login", f"--token={STATIC_TOKEN}"],
        ["login", f"--{STATIC_TOKEN}"],
        ["whoami", "--output", STATIC_TOKEN],
        ["whoami", f"-o{STATIC_TOKEN}"],
        [STATIC_TOKEN],
        [f"--{STATIC_TOKEN}"],
        ["logout", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.ssssssss"],
        ["logout", "abcd1234ssssssssssssssssssssssss"],
        ["login", "--ca", STATIC_TOKEN],
    ],
)
def test_a_secret_among_the_arguments_is_never_repeated(run: Run, arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert "tessera_token" not in result.stdout + result.stderr


def test_a_secret_among_the_arguments_should_be_revoked(run: Run) -> None:
    result = run("whoami", STATIC_TOKEN, code=2)
    words = " ".join(result.stderr.replace("│", " ").split())
    assert "consider this secret known, and have it revoked" in words


def test_an_address_that_is_a_secret_is_not_repeated(run: Run) -> None:
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
    ("polls", "message"),
    [
        (["access_denied"], "the login was denied"),
        (["expired_token"], "the code has expired"),
        (["invalid_grant"], "refused the login (invalid_grant: described)"),
    ],
)
def test_a_refused_login_is_not_saved(
    run: Run, provider: IdentityProvider, login_file: Path, polls: list[str], message: str
) -> None:
    provider.polls = polls
    result = run("login", code=1)
    assert f"error: {message}" in result.stderr or message in result.stderr
    assert not login_file.exists()


def test_a_login_without_a_role_at_the_server_is_not_saved(
    run: Run, provider: IdentityProvider, login_file: Path
) -> None:
    provider.claims = {"roles": ["unknown"]}
    result = run("login", code=1)
    assert f"[{PermissionDenied.reason}]" in result.stderr
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
