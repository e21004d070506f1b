"""Settings: environment over file, strict keys, no printed secrets, loopback by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.service.config import Config
from tessera.service.settings.sources import load_config

ANY = "0.0.0.0:7070"


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tessera.toml"
    file.write_text('listen = "127.0.0.1:1"\nstore_threads = 4\ngrace_s = 3\n')
    config = load_config(file, {"TESSERA_LISTEN": "127.0.0.1:2", "PATH": "/bin"})
    assert (config.listen, config.store_threads, config.grace_s) == ("127.0.0.1:2", 4, 3.0)


@pytest.mark.parametrize(
    "text",
    ["lisen = 'x'", "store_threads = 'four'", "store_threads = 1.5", "grace_s = true", "a = ["],
)
def test_an_unknown_key_or_a_wrong_type_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tessera.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=str(file)):
        load_config(file, {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TESSERA_DATABSE_URL", "x"),
        ("TESSERA_STORE_THREADS", "x"),
        ("TESSERA_INSECURE_ANY_INTERFACE", "1"),
    ],
)
def test_an_unknown_or_wrong_variable_is_an_error(variable: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=variable):
        load_config(None, {variable: value})


def test_a_mistyped_variable_is_reported_with_the_nearest_and_all_valid_names() -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_DATABSE_URL": "x"})
    message = str(caught.value)
    assert message.startswith(
        "TESSERA_DATABSE_URL: unknown setting; did you mean 'TESSERA_DATABASE_URL'?"
        " The settings are TESSERA_LISTEN,"
    )
    assert "TESSERA_SERVER" in message


@pytest.mark.parametrize(
    "variable", ["TESSERA_SERVER", "TESSERA_CLUSTER", "TESSERA_DATA", "TESSERA_TORCH_PYTHON"]
)
def test_variables_of_other_programs_are_ignored(variable: str) -> None:
    assert load_config(None, {variable: "x"}) == Config()


@pytest.mark.parametrize("listen", [ANY, "[::]:7070", "10.0.0.1:7070", "example.org:7070", ":7070"])
def test_other_machines_may_connect_only_if_configured(listen: str) -> None:
    with pytest.raises(InvalidInput, match="callers need no token"):
        Config(listen=listen)
    assert Config(listen=listen, insecure_any_interface=True).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:7070", "localhost:7070", "unix:/run/t.s"])
def test_this_machine_may_always_connect(listen: str) -> None:
    assert Config(listen=listen).listen == listen


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db",
        "postgresql://me:hun/ter2@host/db",
        "postgresql:///db?host=h&user=me&password=hunter2",
    ],
)
def test_no_password_is_ever_printed(url: str) -> None:
    config = Config(database_url=url)
    for shown in (str(config), repr(config)):
        assert "ter2" not in shown
    assert "postgresql://" in str(config)


def test_a_printed_configuration_can_be_read_again(tmp_path: Path) -> None:
    config = Config(listen='unix:/a "b"\\c', grace_s=1.5, insecure_any_interface=True)
    file = tmp_path / "printed.toml"
    file.write_text(str(config))
    assert load_config(file, {}) == config


def test_a_lease_that_could_run_out_between_heartbeats_is_refused() -> None:
    with pytest.raises(InvalidInput, match="heartbeat_s"):
        Config(heartbeat_s=10.0, lease_s=30.0)


@pytest.mark.parametrize("margin_s", [-5.0, 0.0, 31.0])
def test_gpus_are_given_away_after_a_margin_in_which_programs_can_end(margin_s: float) -> None:
    with pytest.raises(InvalidInput, match="margin_s"):
        Config(lease_s=30.0, margin_s=margin_s)


def test_three_replicas_fit_into_postgresqls_connection_limit() -> None:
    assert 3 * Config().connections() <= 97  # 3 of its 100 are reserved for the superuser


def test_callers_need_a_token_with_authenticate_or_tls_and_not_otherwise(tmp_path: Path) -> None:
    assert not Config().asks_callers()
    assert Config(authenticate=True).asks_callers()
    assert Config(listen=ANY, tls_directory=str(tmp_path)).asks_callers()


def test_authentication_without_tls_does_not_open_the_server_to_other_machines() -> None:
    with pytest.raises(InvalidInput, match="other machines, and tokens are sent in plain text"):
        Config(listen=ANY, authenticate=True)
