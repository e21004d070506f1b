"""The options and keys that say how a job's program is started, and their view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.jobfile import read_jobs
from tessera.service.cli.jobview import job_columns, show_job
from tessera.service.cli.launchoptions import MAX_FILE_BYTES, program_options
from tessera.service.cli.launchview import launch_facts
from tessera.v1 import jobs_pb2, launch_pb2
from tests.support.launches import WHOLE_LAUNCH, WHOLE_MESSAGE

NOW = Timestamp(seconds=1_800_000_000)
MINIMAL = "model: bert\nparams: 1.3B\nglobal_batch: 256\niterations: 1000\ngpus: 8\n"
TOKEN = "tessera_token_" + 12 * "a"

WHOLE_OPTIONS: dict[str, Any] = {
    "runtime": "torchrun",
    "command": "train.py --name 'a b'",
    "env": ["NCCL_DEBUG=INFO", "GREETING=a b=ü", "EMPTY="],
    "workdir": "/srv/train",
    "secret": ["WANDB_API_KEY=wandb"],
    "staging": "cp -r '/data/a b' /scratch",
    "run_as": "ana",
    "progress_pattern": WHOLE_LAUNCH.progress_pattern,
    "stall_limit": "30m",
    "stop_grace": "1m30.5s",
    "until_exit": True,
}
WHOLE_KEYS = r"""
runtime: torchrun
command: [train.py, --name, a b]
environment: {NCCL_DEBUG: INFO, GREETING: a b=ü, EMPTY: ""}
working_directory: /srv/train
secrets: {WANDB_API_KEY: wandb}
staging: [cp, -r, /data/a b, /scratch]
user: ana
progress_pattern: 'iteration +(?P<iteration>\d+).*?loss: (?P<loss>[0-9.]+)'
stall_limit: 30m
stop_grace: 90.5s
until_exit: true
"""


def read_job(text: str) -> jobs_pb2.Job:
    return read_jobs(MINIMAL + text, "j.yaml", NOW)[0].job


def test_options_and_the_keys_of_a_file_state_the_same_launch() -> None:
    for job in (program_options(**WHOLE_OPTIONS), read_job(WHOLE_KEYS)):
        assert list(job.command) == ["train.py", "--name", "a b"]
        assert job.launch == WHOLE_MESSAGE


def test_a_job_that_states_no_launch_sends_none() -> None:
    assert program_options() == jobs_pb2.Job()
    assert not read_job("").HasField("launch")
    assert not read_job("stall_limit:\nenvironment: {}\n").HasField("launch")


def test_options_and_the_keys_of_a_file_state_the_same_tuning() -> None:
    for job in (
        program_options(tune="halves", tune_budget="20m"),
        read_job("tune: halves\ntune_budget: 20m\n"),
    ):
        assert (job.launch.tuning_space, job.launch.tuning_budget.seconds) == ("halves", 1200)
        assert ("tuning", "halves, 20m") in launch_facts(job)


def test_variables_come_from_a_file_and_options_have_precedence(tmp_path: Path) -> None:
    file = tmp_path / "train.env"
    file.write_text("# for all runs\n\nA=1\r\n B=x\nC= y = z \n#D=4\nA=2")
    with pytest.raises(InvalidInput) as refused:
        program_options(env_from_file=str(tmp_path / "absent"))
    assert refused.value.field == "--env-from-file"
    job = program_options(env_from_file=str(file), env=["C=option"])
    assert dict(job.launch.environment) == {"A": "2", "B": "x", "C": "option"}


def test_two_values_of_one_variable_or_label_are_refused_and_not_dropped() -> None:
    with pytest.raises(InvalidInput, match=r"^--env: A has a value already; give it once"):
        program_options(env=["A=1", "B=2", "A=3"])
    with pytest.raises(InvalidInput, match=r"^--label: team has a value already"):
        options.parse_labels("--label", ["team=a", "team=b"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"A=1\nnot a variable\n", "line 2: must have the form NAME=VALUE"),
        (b"=1\n", "line 1: must have the form NAME=VALUE"),
        (b"\xff", "cannot be read"),
        (b"#" * (MAX_FILE_BYTES + 1), "must have at most 1,048,576 bytes"),
    ],
)
def test_a_wrong_file_of_variables_is_named(tmp_path: Path, text: bytes, problem: str) -> None:
    file = tmp_path / "train.env"
    file.write_bytes(text)
    with pytest.raises(InvalidInput) as refused:
        program_options(env_from_file=str(file))
    assert str(refused.value).startswith(f"--env-from-file: {file}")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"env": ["A"]}, "--env: must have the form NAME=VALUE"),
        ({"env": ["=x"]}, "--env: must have the form NAME=VALUE"),
        ({"secret": ["wandb"]}, "--secret: must have the form VARIABLE=NAME"),
        ({"command": "'"}, "--command: must be quoted as in a shell"),
        ({"staging": "'"}, "--staging: must be quoted as in a shell"),
        ({"stall_limit": "soon"}, "--stall-limit: 'soon' is not a duration"),
        ({"stop_grace": "-1"}, "--stop-grace: '-1' is not a duration"),
        ({"tune_budget": "soon"}, "--tune-budget: 'soon' is not a duration"),
    ],
)
def test_a_wrong_option_of_a_program_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        program_options(**given)
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("environment: [A]\n", "j.yaml: environment: must map texts to texts"),
        ("environment: {A: true}\n", "j.yaml: environment: A: must be a text, not true; put it in"),
        ("secrets: wandb\n", "j.yaml: secrets: must map texts to texts"),
        ("staging: cp a b\n", "j.yaml: staging: must be a list of texts"),
        ("stall_limit: soon\n", "j.yaml: stall_limit: 'soon' is not a duration"),
        ("image: x\n", "j.yaml: unknown key 'image'"),
        (f"environment: {{A: {TOKEN}}}\n", "j.yaml: environment[A]: looks like a secret"),
        (f"secrets: {{A: {TOKEN}}}\n", "j.yaml: secrets: A needs the name of a file on the nodes"),
    ],
)
def test_a_wrong_key_of_a_program_is_named(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_job(text)
    assert str(refused.value).startswith(problem)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"env": [f"A={TOKEN}"]}, "--env[A]: looks like a secret"),
        ({"env": [f"HF_TOKEN={'h' * 34}"]}, "--env[HF_TOKEN]: looks like a secret"),
        ({"env": [TOKEN]}, "--env: must have the form NAME=VALUE"),
        ({"secret": [f"A={TOKEN}"]}, "--secret: A needs the name of a file on the nodes"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_without_repeating_it(
    given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        program_options(**given)
    assert str(refused.value).startswith(problem)
    assert TOKEN not in str(refused.value)


def test_a_job_shows_its_runtime_and_what_was_stated(capsys: pytest.CaptureFixture[str]) -> None:
    job = program_options(**WHOLE_OPTIONS)
    job.launch.environment["LONG"] = "x" * 1000
    job.launch.environment["URL"] = "postgresql://ana:" + "pass" + "@host/db"
    job.name = "clusters/c/jobs/j"
    show_job(job, NOW)
    lines = {
        name.strip(): " ".join(value.split())
        for name, value in (
            (line[:16], line[16:])
            for line in capsys.readouterr().out.splitlines()
            if line[:1] != " "
        )
    }
    assert lines["runtime"] == "torchrun"
    assert lines["command"] == "train.py --name 'a b'"
    assert lines["environment"] == (
        f"EMPTY='', GREETING='a b=ü', LONG={80 * 'x'}..., NCCL_DEBUG=INFO,"
        " URL='postgresql://ana:***" + "@host/db'"
    )
    assert lines["secrets"] == "WANDB_API_KEY from wandb"
    assert lines["starts in"] == "/srv/train"
    assert lines["staging"] == "cp -r '/data/a b' /scratch"
    assert lines["runs as"] == "ana"
    assert lines["progress pattern"] == WHOLE_LAUNCH.progress_pattern
    assert (lines["stall limit"], lines["stop grace"]) == ("30m", "1m30s")


def test_a_job_without_a_program_shows_its_runtime_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_job(jobs_pb2.Job(launch=launch_pb2.Launch(runtime="replay")), NOW)
    shown = capsys.readouterr().out
    assert "replay" in shown
    for name in ("command", "environment", "secrets", "starts in", "stall limit", "runs as"):
        assert name not in shown


@pytest.mark.parametrize(
    ("until_exit", "done", "percent", "text"),
    [
        (False, 30.0, "3.0", "3.0 % (30 of 1,000 iterations)"),
        (True, 30.0, "3.0", "30 iterations (1,000 expected)"),
        (True, 1200.0, "100.0", "1,200 iterations (1,000 expected)"),
        (True, 0.0, "-", "no iterations reported (1,000 expected)"),
    ],
)
def test_the_shown_count_of_iterations_is_the_reported_one(
    capsys: pytest.CaptureFixture[str], until_exit: bool, done: float, percent: str, text: str
) -> None:
    launch = launch_pb2.Launch(runtime="command", until_exit=until_exit)
    job = jobs_pb2.Job(
        name="clusters/c/jobs/j",
        state=jobs_pb2.SUCCEEDED,
        iterations=1000,
        iterations_done=done,
        launch=launch,
    )
    show_job(job, NOW)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"progress {text}" in shown
    assert ("done when its program exits with status 0" in shown) == until_exit
    (column,) = (column for column in job_columns([job], NOW) if column.title == "DONE %")
    assert column.value(job) == percent
