"""Settings of channels: where they come from, what is refused, and what is never repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.client import (
    PLAIN_TEXT,
    ChannelRefused,
    ChannelSettings,
    Login,
    find_settings,
    forget_login,
    is_on_this_machine,
    load_login,
    open_async_channel,
    open_channel,
    save_login,
)
from tessera.client.requests import choose_settings
from tessera.client.settings import VARIABLES
from tessera.formulation.base.clock import SystemClock
from tests.support.certificates import Site, make_site

ADDRESS = "tessera.example:7070"
TOKEN = f"tessera_token_{'a' * 12}_{'S' * 43}"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path / "site")


@pytest.fixture
def home(tmp_path: Path) -> Mapping[str, str]:
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def refusal_of(home: Mapping[str, str], *, address: str = ADDRESS, **variables: str) -> str:
    """Return why settings are refused, which holds no secret."""
    with pytest.raises(ChannelRefused) as refused:
        open_channel(address, find_settings(address, {**home, **variables}))
    text = str(refused.value)
    assert "SSSS" not in text
    assert "eyJ" not in text
    return text


def secret_file(path: Path, text: str = f"{TOKEN}\n") -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


def test_the_environment_names_files_and_a_token(home: Mapping[str, str], tmp_path: Path) -> None:
    assert find_settings(ADDRESS, {**home, "TESSERA_CA": ""}) == PLAIN_TEXT
    variables = {
        "TESSERA_CA": "ca.pem",
        "TESSERA_CERTIFICATE": "a.pem",
        "TESSERA_KEY": "a.key",
        "TESSERA_SERVER_NAME": "tessera.internal",
        "TESSERA_TOKEN_FILE": secret_file(tmp_path / "token"),
    }
    settings = find_settings(ADDRESS, {**home, **variables})
    assert settings == ChannelSettings(
        authorities="ca.pem",
        certificate=Path("a.pem"),
        key=Path("a.key"),
        token=TOKEN,
        server_name="tessera.internal",
    )
    assert "SSSS" not in repr(settings)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_token_file_that_others_can_read_is_refused(
    home: Mapping[str, str], tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "token"
    secret_file(path)
    path.chmod(mode)
    assert f"run chmod 600 {path}" in refusal_of(home, TESSERA_TOKEN_FILE=str(path))
    assert "/no/such/file" in refusal_of(home, TESSERA_TOKEN_FILE="/no/such/file")
    assert "S" * 10 not in refusal_of(home, TESSERA_TOKEN_FILE="S" * 43)  # perhaps a token


def test_settings_that_contradict_each_other_are_refused(
    home: Mapping[str, str], tmp_path: Path
) -> None:
    file = secret_file(tmp_path / "token")
    assert "not both" in refusal_of(home, TESSERA_TOKEN=TOKEN, TESSERA_TOKEN_FILE=file)
    assert "set both" in refusal_of(home, TESSERA_CERTIFICATE="a.pem")
    assert "set both" in refusal_of(home, TESSERA_KEY="a.key")
    lone = refusal_of(home, TESSERA_CERTIFICATE="a.pem", TESSERA_KEY="a.key")
    assert "set TESSERA_CA" in lone


@pytest.mark.parametrize("secret", [TOKEN, JWT, TOKEN[:30], f"Bearer {TOKEN}", f"/tmp/{TOKEN}"])
@pytest.mark.parametrize("variable", ["TOKEN_FILE", "CA", "CERTIFICATE", "KEY", "SERVER_NAME"])
def test_a_secret_in_another_variable_is_never_repeated(
    home: Mapping[str, str], variable: str, secret: str
) -> None:
    assert refusal_of(home, **{f"TESSERA_{variable}": secret}) != ""


@pytest.mark.parametrize(
    "secret", [TOKEN, f"{TOKEN}:7070", JWT, f"https://user:{TOKEN}@host", "x" * 43]
)
def test_a_secret_as_the_address_is_never_repeated(home: Mapping[str, str], secret: str) -> None:
    with pytest.raises(ChannelRefused, match="address of the server") as refused:
        open_channel(secret, PLAIN_TEXT)
    assert secret not in str(refused.value)


@pytest.mark.parametrize("token", ["a b", "a\nb", "ä", " ", "a" * 8001])
def test_a_token_that_cannot_be_sent_is_refused_without_repeating_it(
    home: Mapping[str, str], token: str
) -> None:
    text = refusal_of(home, TESSERA_TOKEN=f"SSSS{token}")
    assert "copy the token again" in text
    with pytest.raises(ChannelRefused, match="cannot be sent"):
        open_channel("localhost:1", ChannelSettings(token=f"SSSS{token}"))


def test_a_client_that_runs_takes_up_a_login_that_was_renewed(
    home: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    refresh = {"refresh_token": "r"}
    now_s = SystemClock().wall_s()

    def log_in(token: str, left_s: float) -> None:
        login = Login(authorities="system", token=token, expires_s=now_s + left_s, refresh=refresh)
        save_login(ADDRESS, login)

    log_in("first", 3600.0)
    lasting = choose_settings(ADDRESS, "", "", None).find_token()
    assert lasting is not None
    log_in("second", 10.0)
    assert lasting() == "first"  # which is good for an hour
    ending = choose_settings(ADDRESS, "", "", None).find_token()
    assert ending is not None
    assert ending() == "second"  # nobody has renewed it
    log_in("third", 3600.0)
    assert ending() == "third"
    forget_login(ADDRESS)
    assert ending() == "third"


OTHER_MACHINES = f"""
{ADDRESS} 10.0.0.1:7070 0.0.0.0:7070 [fe80::1]:7070 localhost:7070@evil xds:///localhost
localhost.example:7070 127.0.0.1.example:7070 127.0.0.1%2eexample:7070
dns://8.8.8.8/localhost:7070 ipv4:127.0.0.1:7070,10.0.0.1:7070
"""
THIS_MACHINE = """
localhost:7070 localhost 127.0.0.1:7070 127.9.9.9:1 [::1]:7070 ipv4:127.0.0.1:7070
ipv6:[::1]:7070 dns:///localhost:7070 unix:/run/tessera.sock unix-abstract:tessera
"""


@pytest.mark.parametrize("address", [*OTHER_MACHINES.split(), ""])
async def test_a_token_is_not_sent_in_plain_text_to_other_machines(address: str) -> None:
    settings = ChannelSettings(token=TOKEN)
    renewed = ChannelSettings(renew_token=lambda: TOKEN)
    assert not is_on_this_machine(address)
    for chosen in (settings, renewed):
        with pytest.raises(ChannelRefused, match="would send the token in plain text") as refused:
            open_channel(address, chosen)
        with pytest.raises(ChannelRefused, match="set TESSERA_CA"):
            open_async_channel(address, chosen)
        assert "SSSS" not in str(refused.value)


@pytest.mark.parametrize("address", THIS_MACHINE.split())
async def test_a_token_may_stay_on_this_machine_in_plain_text(address: str) -> None:
    open_channel(address, ChannelSettings(token=TOKEN)).close()
    await open_async_channel(address, ChannelSettings(token=TOKEN)).close()


def test_files_of_a_channel_are_checked_when_it_is_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = site.agent()
    assert agent.certificate is not None
    assert agent.key is not None
    open_channel(ADDRESS, agent).close()
    problems = {
        "holds no certificates": replace(agent, authorities=str(agent.key)),
        "cannot be read: No such file": replace(agent, authorities="/no/such/file"),
        "cannot be used together": replace(agent, key=site.folder / "server.key"),
        "both must be PEM": replace(agent, certificate=agent.key),
    }
    for problem, settings in problems.items():
        with pytest.raises(ChannelRefused, match=problem):
            open_channel(ADDRESS, settings)
    agent.key.chmod(0o644)
    with pytest.raises(ChannelRefused, match="run chmod 600"):
        open_channel(ADDRESS, agent)
    monkeypatch.setenv("SSL_CERT_FILE", site.authorities)
    open_channel(ADDRESS, ChannelSettings(authorities="system", token=TOKEN)).close()


def test_a_login_is_used_where_the_environment_says_nothing(home: Mapping[str, str]) -> None:
    save_login(ADDRESS, Login(authorities="system", token=TOKEN), home)
    assert find_settings(ADDRESS, home) == ChannelSettings(authorities="system", token=TOKEN)
    assert find_settings("other:7070", home) == PLAIN_TEXT
    environment = {**home, "TESSERA_TOKEN": "x", "TESSERA_CA": "ca.pem"}
    assert find_settings(ADDRESS, environment) == ChannelSettings(authorities="ca.pem", token="x")
    certified = {**home, "TESSERA_CERTIFICATE": "a.pem", "TESSERA_KEY": "a.key"}
    assert find_settings(ADDRESS, certified).token == ""


def test_a_login_that_can_be_renewed_is_renewed_before_each_call(home: Mapping[str, str]) -> None:
    save_login(ADDRESS, Login(authorities="system", token="t0", refresh={"token": "r"}), home)
    seen: list[str] = []

    def renew(address: str, login: Login) -> Login:
        assert address == ADDRESS
        seen.append(login.token)
        return replace(login, token=f"t{len(seen)}")

    find_token = find_settings(ADDRESS, home, renew).find_token()
    assert find_token is not None
    assert [find_token(), find_token()] == ["t1", "t2"]
    assert seen == ["t0", "t1"]


def test_logins_are_kept_for_each_server_and_for_their_owner_alone(
    home: Mapping[str, str], tmp_path: Path
) -> None:
    full = Login(authorities="system", token=TOKEN, expires_s=1.8e9, refresh={"client": "c"})
    save_login("a:1", full, home)
    save_login("b:1", Login(token=JWT), home)
    path = tmp_path / "config" / "tessera" / "login.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert load_login("a:1", home) == full
    assert "SSSS" not in repr(full)
    assert forget_login("a:1", home)
    assert not forget_login("a:1", home)
    assert load_login("a:1", home) is None
    assert load_login("b:1", home) == Login(token=JWT)


def test_a_login_file_that_is_open_to_others_or_damaged_is_refused(
    home: Mapping[str, str], tmp_path: Path
) -> None:
    save_login(ADDRESS, Login(token=TOKEN), home)
    path = tmp_path / "config" / "tessera" / "login.json"
    path.chmod(0o644)
    assert "run chmod 600" in refusal_of(home)
    for text in (
        "{",
        "[]",
        f'{{"{ADDRESS}": "{TOKEN}"}}',
        f'{{"{ADDRESS}": {{"expires_s": "x"}}}}',
    ):
        secret_file(path, text)
        assert "damaged; remove it, and log in again" in refusal_of(home)
