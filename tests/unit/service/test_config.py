"""Settings of the server, from the command line, the environment and files, and its limits."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.limits import MAX_DURATION_S
from tessera.service.cli import options
from tessera.service.durations import parse_duration_s
from tessera.service.server.rounds.standing_policy import unheeded_wishes
from tessera.service.server.settings.config import Config
from tessera.service.server.settings.sources import load_config
from tessera.solvers.rounds.options import RoundOptions
from tests.support.job_records import a_job_record

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


def test_a_wrong_variable_is_an_error_with_the_nearest_and_all_valid_names() -> None:
    for variable, value in (("STORE_THREADS", "x"), ("INSECURE_ANY_INTERFACE", "1")):
        with pytest.raises(InvalidInput, match=variable):
            load_config(None, {f"TESSERA_{variable}": value})
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_DATABSE_URL": "x"})
    message = str(caught.value)
    assert message.startswith(
        "TESSERA_DATABSE_URL: unknown setting; did you mean 'TESSERA_DATABASE_URL'?"
        " The settings are TESSERA_LISTEN,"
    )
    assert "TESSERA_SERVER" in message
    for other in ("SERVER", "CLUSTER", "DATA", "TORCH_PYTHON"):  # of other programs
        assert load_config(None, {f"TESSERA_{other}": "x"}) == Config()


def test_other_machines_may_connect_only_if_configured() -> None:
    for listen in (ANY, "[::]:7070", "10.0.0.1:7070", "example.org:7070", ":7070"):
        with pytest.raises(InvalidInput, match="callers need no token"):
            Config(listen=listen)
        assert Config(listen=listen, insecure_any_interface=True).listen == listen
        with pytest.raises(InvalidInput, match="other machines, and tokens are sent in plain text"):
            Config(listen=listen, authenticate=True)
    for listen in ("127.0.0.1:0", "[::1]:7070", "localhost:7070", "unix:/run/t.s"):
        assert Config(listen=listen).listen == listen


def test_no_password_is_ever_printed() -> None:
    for url in (
        "postgresql://me:hunter2@host/db",
        "postgresql://me:hun/ter2@host/db",
        "postgresql:///db?host=h&user=me&password=hunter2",
    ):
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
    for margin_s in (-5.0, 0.0, 31.0):  # in which programs can end
        with pytest.raises(InvalidInput, match="margin_s"):
            Config(lease_s=30.0, margin_s=margin_s)


def test_three_replicas_fit_into_postgresqls_connection_limit() -> None:
    assert 3 * Config().connections() <= 97  # 3 of its 100 are reserved for the superuser


def test_callers_need_a_token_with_authenticate_or_tls_and_not_otherwise(tmp_path: Path) -> None:
    assert not Config().asks_callers()
    assert Config(authenticate=True).asks_callers()
    assert Config(listen=ANY, tls_directory=str(tmp_path)).asks_callers()


WRITTEN = [
    ("90s", 90.0),
    ("500ms", 0.5),
    ("5m", 300.0),
    ("1.5h", 5400.0),
    ("2h", 7200.0),
    ("1h30m", 5400.0),
    (" 1h 30m ", 5400.0),
    ("1d12h", 129_600.0),
    ("1m0.5s", 60.5),
]


@pytest.mark.parametrize(("text", "seconds"), WRITTEN)
def test_options_and_the_standing_policy_parse_durations_alike(text: str, seconds: float) -> None:
    assert options.parse_seconds("--default-run", text) == seconds
    policy = f"{{network_measure: {text!r}, networkFloor: 0.5}}"
    standing = load_config(None, {"TESSERA_POLICY": policy}).round_options()
    assert (standing.network_measure_s, standing.network_floor) == (seconds, 0.5)


def test_a_policy_may_name_durations_in_proto_json_or_as_never() -> None:
    policy = "{network_measure: 0, solve_limit: never, round: 7200s, default_run: 1.5s}"
    options = load_config(None, {"TESSERA_POLICY": policy}).round_options()
    assert options == RoundOptions(
        network_measure_s=0.0, solve_limit_s=math.inf, round_s=7200.0, default_run_s=1.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "30m1h",
            "policy.default_run: '30m1h' is not a duration; write e.g. 90s, 5m, 2h, 1h30m or 1d",
        ),
        ("1h1h", "is not a duration"),
        ("soon", "is not a duration"),
        ("-5s", "is not a duration"),
        ("600", "policy.default_run: 600 has no unit; write e.g. 600s, 600m, 600h or 600d"),
        ("1.50", "1.50 has no unit; write e.g. 1.50s"),
        ("010", "010 has no unit"),
        ("22:30", "'22:30' is not a duration"),
        ("9" * 200 + "s", "is not a duration"),
        ("9999999d", "must lie in 0 to"),
        ("true", "default_run"),
        ("[1h]", "default_run"),
    ],
)
def test_an_invalid_duration_is_refused_with_its_location(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_POLICY": f"default_run: {text}"})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@given(
    st.integers(0, 999),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999),
)
def test_units_add_up(days: int, hours: int, minutes: int, seconds: int, millis: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s{millis}ms"
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds + millis / 1000
    assert parse_duration_s("x", text) == pytest.approx(total)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert 0 <= parse_duration_s("x", text) <= MAX_DURATION_S


POLICY = "{objective: deadline then jct, keep_requests: false, default_run: 7200s, max_changes: 8}"


def test_the_policy_comes_from_the_environment_or_a_multiline_setting_in_the_file(
    tmp_path: Path,
) -> None:
    wanted = RoundOptions(
        objective="deadline then jct", keep_requests=False, default_run_s=7200.0, max_changes=8
    )
    assert load_config(None, {"TESSERA_POLICY": POLICY}).round_options() == wanted
    file = tmp_path / "tessera.toml"
    lines = POLICY.strip("{}").replace(", ", "\n")
    file.write_text(f'policy = """\n{lines}\n"""\n')
    config = load_config(file, {})
    assert config.round_options() == wanted
    file.write_text(str(config))  # the printed configuration can be read again
    assert load_config(file, {}) == config


def test_without_a_policy_rounds_use_the_defaults_and_the_configured_period() -> None:
    assert Config().round_options() == RoundOptions()
    assert Config(period_s=60.0).round_options() == RoundOptions(round_s=60.0)
    assert Config(period_s=0.0).round_options() == RoundOptions()
    assert Config(period_s=60.0, policy="round: 10s").round_options().round_s == 10.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "objective: speed",
            "policy.objective: 'speed' is not an objective; choose from throughput, deadline",
        ),
        ("jct", "policy: must map names to values"),
        ("objective: [", "policy: is neither JSON nor YAML: while parsing"),
        ("solver: magic", "policy.solver: unknown 'magic'; choose one of portfolio, "),
        (
            "{scheduler: sia, scheduler_parameters: 'fairness=x'}",
            "policy.scheduler_parameters: fairness must be a number from -2 to 2, not 'x'",
        ),
    ],
)
def test_an_invalid_policy_is_refused_when_the_server_starts(policy: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_config(None, {"TESSERA_POLICY": policy})
    assert message in str(caught.value)


DUE = a_job_record(deadline_s=1e9)


@pytest.mark.parametrize(
    ("standing", "options"),
    [
        (RoundOptions(objective="jct"), ""),
        (RoundOptions(scheduler="fcfs"), " --scheduler ''"),
        (RoundOptions(objective="deadline then jct", deadlines="ignore"), " --deadlines auto"),
    ],
)
def test_the_advice_for_an_ignored_deadline_undoes_what_ignores_it(
    standing: RoundOptions, options: str
) -> None:
    (warning,) = unheeded_wishes(DUE, standing)
    advice = f"--objective 'deadline then throughput'{options}`"
    assert f"tessera policy set {advice}" in warning
    assert f"tessera round {advice}" in warning
    followed = replace(standing, objective="deadline then throughput", scheduler="", deadlines="")
    assert not unheeded_wishes(DUE, followed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "deadline then throughput"}, ""),
        ({"deadlines": "myopic"}, ""),
        ({"deadlines": "planned"}, ""),
        ({"deadlines": "ignore"}, "(deadlines: ignore)"),
        ({"scheduler": "fcfs"}, "the scheduler 'fcfs' decides rounds"),
        ({"scheduler": "fcfs", "deadlines": "look-ahead"}, "the scheduler 'fcfs' decides rounds"),
    ],
)
def test_warnings_follow_the_standing_policy(options: dict[str, Any], message: str) -> None:
    warnings = unheeded_wishes(DUE, RoundOptions(**options))
    assert len(warnings) == bool(message)
    assert all(message in warning for warning in warnings)


SCRIPT = """
import resource
from tessera.service.server.tasks.file_limit import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised_limit(soft: int, hard: int) -> list[int]:
    """Return the limit that a process with these limits gets, and its limits after that."""
    script = SCRIPT.format(soft=soft, hard=hard)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [int(text) for text in done.stdout.split()]


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    assert raised_limit(256, 512) == [512, 512, 512]
    assert raised_limit(512, 512) == [512, 512, 512]
