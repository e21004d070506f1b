"""Jobs as files and options state them: their meaning, and how mistakes are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.jobs.changeoptions import removes_field
from tessera.service.cli.jobs.jobfields import MAX_FILE_BYTES, build_optional_job
from tessera.service.cli.jobs.jobfile import JobEntry, read_jobs
from tessera.service.cli.jobs.launchview import launch_facts
from tessera.service.cli.jobs.workflow import parse_after, parse_array
from tessera.v1 import jobs_pb2
from tests.support.launches import WHOLE_LAUNCH, WHOLE_MESSAGE

NOW = Timestamp(seconds=1_800_000_000)
MINIMAL = "model: bert\nparams: 1.3B\nbatch: 256\niterations: 1000\ngpus: 8\n"
HUGE = "9" * 20
PLACE = "clusters/default"
TOKEN = "tessera_token_" + 12 * "a"

WHOLE_OPTIONS: dict[str, Any] = {
    "runtime": "torchrun",
    "command": "train.py --name 'a b'",
    "env": ["NCCL_DEBUG=INFO", "GREETING=a b=ü", "EMPTY="],
    "workdir": "/srv/train",
    "secrets": ["WANDB_API_KEY=wandb"],
    "staging_command": "cp -r '/data/a b' /scratch",
    "user": "ana",
    "progress_pattern": WHOLE_LAUNCH.progress_pattern,
    "stall_limit": "30m",
    "stop_grace": "1m30.5s",
    "until_exit": True,
}
PROGRAM_KEYS = r"""
runtime: torchrun
command: [train.py, --name, a b]
env: {NCCL_DEBUG: INFO, GREETING: a b=ü, EMPTY: ""}
workdir: /srv/train
secrets: {WANDB_API_KEY: wandb}
staging_command: [cp, -r, /data/a b, /scratch]
user: ana
progress_pattern: 'iteration +(?P<iteration>\d+).*?loss: (?P<loss>[0-9.]+)'
stall_limit: 30m
stop_grace: 90.5s
until_exit: true
"""
OTHER_KEYS = """
name: j
gpu_type: a100
tenant: nlp
priority: 2
weight: 1.5
guaranteed: true
restart: 2m
deadline: 2027-01-15T09:00:00Z
pinned: true
preemptible: true
labels: {team: nlp, run: 7}
max_retries: 0
pinned_gpu_type: true
allowed_gpu_types: [h100]
avoid_nodes: [n1, clusters/d/nodes/n2]
node_selector: zone=a
preferred_labels: rack!=b
longest_run: 2h
profile: true
min_gpus: 4
max_gpus: 16
after: [prepare, "x:ended"]
array: 1-4%2
plan: run.sh
plan_first: true
submitted_plan: '{"stages": []}'
techniques: [dp, tp]
cpus: 96
tuning_space: halves
tuning_budget: 20m
"""


def read_job(keys: str = "", source: str = "j.yaml") -> jobs_pb2.SubmitJobRequest:
    """Return the job of a file with these keys, and with those of MINIMAL that they leave out."""
    stated = {line.partition(":")[0] for line in keys.splitlines()}
    usual = [line for line in MINIMAL.splitlines() if line.partition(":")[0] not in stated]
    (request,) = read_jobs("\n".join(usual) + f"\n{keys}", source, NOW)
    return request


def read_options(**given: Any) -> jobs_pb2.Job:
    return build_optional_job(given, "default")


def test_a_key_that_is_absent_is_not_sent() -> None:
    request = read_job("stall_limit:\nenv: {}\n")
    assert json_format.MessageToDict(request, preserving_proto_field_name=True) == {
        "job": {
            "workload": {"model": "bert", "params": "1.3B", "global_batch": 256},
            "iterations": "1000",
            "requested_gpus": 8,
        }
    }


def test_every_key_of_a_job_reaches_the_request(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("--tensor-model-parallel-size 8")
    assert yaml.safe_load(MINIMAL + PROGRAM_KEYS + OTHER_KEYS).keys() == set(JobEntry.model_fields)
    request = read_job(PROGRAM_KEYS + OTHER_KEYS, str(tmp_path / "jobs.yaml"))
    job, launch = request.job, jobs_pb2.Job(launch=WHOLE_MESSAGE).launch
    launch.tuning_space = "halves"
    launch.tuning_budget.FromSeconds(1200)
    assert list(job.command) == ["train.py", "--name", "a b"]
    assert job.launch == launch
    job.ClearField("launch")
    job.ClearField("command")
    assert json_format.MessageToDict(request, preserving_proto_field_name=True) == {
        "job_id": "j",
        "array": {"first": "1", "last": "4", "step": "1", "max_running": 2},
        "job": {
            "workload": {"model": "bert", "params": "1.3B", "global_batch": 256},
            "iterations": "1000",
            "requested_gpus": 8,
            "requested_gpu_type": "a100",
            "tenant": "nlp",
            "priority": 2,
            "weight": 1.5,
            "guaranteed": True,
            "restart": "120s",
            "deadline": "2027-01-15T09:00:00Z",
            "pinned": True,
            "preemptible": True,
            "labels": {"team": "nlp", "run": "7"},
            "max_retries": 0,
            "pinned_gpu_type": True,
            "allowed_gpu_types": ["h100"],
            "avoid_nodes": [f"{PLACE}/nodes/n1", "clusters/d/nodes/n2"],
            "node_selector": "zone=a",
            "preferred_labels": "rack!=b",
            "longest_run": "7200s",
            "profile": True,
            "min_gpus": 4,
            "max_gpus": 16,
            "after": [
                {"job": f"{PLACE}/jobs/prepare", "condition": "SUCCEEDED"},
                {"job": f"{PLACE}/jobs/x", "condition": "ENDED"},
            ],
            "plan": "--tensor-model-parallel-size 8",
            "plan_first": True,
            "submitted_plan": '{"stages": []}',
            "techniques": ["dp", "tp"],
            "requested_cpus": 96,
        },
    }


def test_documents_lists_and_defaults_can_each_hold_many_jobs() -> None:
    text = (
        f"{MINIMAL}---\n- {{model: a, batch: 1, iterations: 1, gpus: 1}}\n---\n"
        "defaults: {model: b, batch: 2, iterations: 3, gpus: 4, tenant: t}\n"
        "jobs: [{name: x}, {name: y, gpus: 8}]\n"
    )
    jobs = read_jobs(text, "many.yaml", NOW)
    assert [r.job.workload.model for r in jobs] == ["bert", "a", "b", "b"]
    assert [r.job_id for r in jobs] == ["", "", "x", "y"]
    assert [r.job.requested_gpus for r in jobs] == [8, 1, 4, 8]
    assert jobs[3].job.tenant == "t"
    for text, message in (
        ("jobs:\n- {model: m, modle: m}\n", "j.yaml: jobs[0]: unknown key 'modle'"),
        ("defaults: {name: n}\njobs: []\n", "j.yaml: defaults: unknown key 'name'"),
        ("model: bert\n", "j.yaml: needs 'batch'"),
        (f"{MINIMAL}gpus: 9\n", "the key 'gpus' occurs twice"),
        (f"{MINIMAL}---\n5\n", "j.yaml: document 2: must be a mapping of keys to values, not 5"),
        ("jobs: 5\n", "j.yaml: jobs: must be a list, not 5"),
        ("a: [", "j.yaml: is not valid YAML"),
        ("", "j.yaml: contains no jobs"),
    ):
        with pytest.raises(InvalidInput) as caught:
            read_jobs(text, "j.yaml", NOW)
        assert message in str(caught.value)


@pytest.mark.parametrize("text", ["010", "0x10", "22:30", "1.10", "1e5", "yes", "NO", "8"])
def test_texts_of_a_job_are_those_that_were_written(text: str) -> None:
    request = read_job(
        f"name: {text}\nlabels: {{a: {text}, {text}: b}}\ncommand: [{text}]\ntenant: {text}\n"
        f"env: {{V: {text}}}\nstaging_command: [{text}]\nuser: {text}\n"
    )
    job = request.job
    assert request.job_id == text
    assert dict(job.labels) == {"a": text, text: "b"}
    assert dict(job.launch.env) == {"V": text}
    assert {*job.command, *job.launch.staging_command, job.launch.user, job.tenant} == {text}


@pytest.mark.parametrize("key", ["restart", "longest_run", "stall_limit", "stop_grace", "deadline"])
@pytest.mark.parametrize("text", ["6", "1.5", "1798761600", "'6'", "010", "22:30"])
def test_a_number_without_a_unit_is_neither_a_duration_nor_a_time(key: str, text: str) -> None:
    with pytest.raises(
        InvalidInput, match=rf"^j.yaml: {key}: .*(no unit|is not a (time|duration))"
    ):
        read_job(f"{key}: {text}\n")


def test_durations_and_times_are_read_with_their_units() -> None:
    durations_s = {"0": 0, "500ms": 0.5, "90s": 90, "1.5m": 90, "2h": 7200, "1d": 86400}
    assert {text: options.parse_seconds("x", text) for text in durations_s} == durations_s
    for text in ("", "-5s", "5 weeks", "1e3", "s", "5M"):
        with pytest.raises(InvalidInput, match="is not a duration"):
            options.parse_seconds("x", text)
    assert options.parse_time("x", "2h", NOW).seconds == NOW.seconds + 7200
    zoned = options.parse_time("x", "2027-01-15T10:00:00+01:00", NOW)
    assert zoned.ToJsonString() == "2027-01-15T09:00:00Z"
    for text in ("6", "1798761600", "20261128", "1.5"):
        with pytest.raises(InvalidInput, match=f"{text} has no unit; write e.g. {text}s, {text}m"):
            options.parse_seconds("--default-run", text)
        for read in (options.parse_time, options.parse_past):
            with pytest.raises(InvalidInput, match=r"^--deadline: .*(is not a time|no time zone)"):
                read("--deadline", text, NOW)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpu: 8", "unknown key 'gpu'; did you mean 'gpus'? (allowed: name,"),
        ("batch: many", "batch: must be a whole number from 1 to 1,000"),
        ("gpus: true", "gpus: must be a whole number from 1 to 65,536, not true"),
        ("weight: 1e999", "line 6: weight: must be a finite number, not inf"),
        (f"weight: {HUGE * 20}", f"line 6: weight: the number {HUGE}... has more than 40"),
        ("restart: .inf", "restart: '.inf' is not a duration"),
        ("deadline: 2027-13-45", "deadline: '2027-13-45' is not a time"),
        ("deadline: 2027-01-15T09:00:00", "deadline: 2027-01-15T09:00:00 has no"),
        ("labels: [a]", "labels: must map texts to texts"),
        ("guaranteed: 1", "guaranteed: must be true or false, not 1"),
        (
            "pinned_gpu_type: true",
            "pinned_gpu_type: pins the type that gpu_type names, so give both",
        ),
        (f"avoid_nodes: [{'n, ' * 257}]", "avoid_nodes: may name at most 256 nodes"),
        ("after: [x:soon]", "after: "),
        ("array: many", "array: "),
        ("plan: nowhere.json", "plan: nowhere.json cannot be read"),
        ("plan_first: true", "plan_first: needs plan, the plan of the first start"),
        ("env: {A: true}", "env: A: must be a text, not true; put it in"),
        (f"env: {{A: {TOKEN}}}", "env[A]: looks like a secret"),
        (f"secrets: {{A: {TOKEN}}}", "secrets: A needs the name of a file on the nodes"),
    ],
)
def test_a_wrong_key_of_a_job_is_named(line: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_job(f"{line}\n")
    assert str(caught.value).startswith(f"j.yaml: {message}")
    assert TOKEN not in str(caught.value)


def test_arrays_and_the_jobs_that_one_waits_for_are_words() -> None:
    limited = jobs_pb2.ArrayIndices(last=99, step=2, max_running=8)
    assert parse_array("--array", "0-99:2%8") == limited
    assert parse_array("--array", "5-5") == jobs_pb2.ArrayIndices(first=5, last=5, step=1)
    for form, wrong in {
        "FIRST-LAST": ("7", "0-9%", "-1-9"),
        "FIRST <= LAST": ("9-0",),
        "at least 1": ("0-9:0", "0-9%0"),
        "1,000,000 members": ("0-999999",),
    }.items():
        for text in wrong:
            with pytest.raises(InvalidInput, match=form):
                parse_array("--array", text)
    dependencies = parse_after("--after", ["a", "b:ended", f"{PLACE}/jobs/c:failed"], "default")
    assert [(d.job, d.condition) for d in dependencies] == [
        (f"{PLACE}/jobs/a", jobs_pb2.Dependency.SUCCEEDED),
        (f"{PLACE}/jobs/b", jobs_pb2.Dependency.ENDED),
        (f"{PLACE}/jobs/c", jobs_pb2.Dependency.FAILED),
    ]
    with pytest.raises(InvalidInput, match="JOB:ended"):
        parse_after("--after", ["a:done"], "default")


def test_options_state_what_a_file_states_and_only_what_was_given() -> None:
    job = read_options(**WHOLE_OPTIONS)
    assert (list(job.command), job.launch) == (["train.py", "--name", "a b"], WHOLE_MESSAGE)
    tuning_job = read_options(tuning_space="halves", tuning_budget="20m")
    assert (tuning_job.launch.tuning_space, tuning_job.launch.tuning_budget.seconds) == (
        "halves",
        1200,
    )
    assert ("tuning", "halves, 20m") in launch_facts(tuning_job)
    placing_job = read_options(allowed_gpu_types="h100, a100", longest_run="1h30m", labels=["a=b"])
    assert list(placing_job.allowed_gpu_types) == ["h100", "a100"]
    assert placing_job.longest_run.seconds == 5400
    assert dict(placing_job.labels) == {"a": "b"}
    empty_options = {
        "until_exit": False,
        "env": [],
        "command": "",
        "user": None,
        "env_from_file": None,
    }
    assert read_options(**empty_options) == jobs_pb2.Job()
    removals = {"node_selector": "none", "deadline": " none", "avoid_nodes": ["none"]}
    assert read_options(allowed_gpu_types="any", **removals) == jobs_pb2.Job()
    assert not removes_field("user", "none")
    with pytest.raises(InvalidInput, match=r"^--label: team has a value already"):
        options.parse_labels("--label", ["team=a", "team=b"])


def test_variables_come_from_a_file_and_options_have_precedence(tmp_path: Path) -> None:
    file = tmp_path / "train.env"
    file.write_text("# for all runs\n\nA=1\r\n B=x\nC= y = z \n#D=4\nA=2")
    job = read_options(env_from_file=str(file), env=["C=option"])
    assert dict(job.launch.env) == {"A": "2", "B": "x", "C": "option"}
    for text, problem in (
        (b"A=1\nnot a variable\n", "line 2: must have the form NAME=VALUE"),
        (b"=1\n", "line 1: must have the form NAME=VALUE"),
        (b"\xff", "cannot be read"),
        (b"#" * (MAX_FILE_BYTES + 1), "must have at most 1,048,576 bytes"),
    ):
        file.write_bytes(text)
        with pytest.raises(InvalidInput, match=problem) as refused:
            read_options(env_from_file=str(file))
        assert str(refused.value).startswith(f"--env-from-file: {file}")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"env": ["A"]}, "--env: must have the form NAME=VALUE"),
        ({"env": ["=x"]}, "--env: must have the form NAME=VALUE"),
        ({"env": ["A=1", "B=2", "A=3"]}, "--env: A has a value already; give it once"),
        ({"env": [TOKEN]}, "--env: must have the form NAME=VALUE"),
        ({"env": [f"A={TOKEN}"]}, "--env[A]: looks like a secret"),
        ({"env": [f"HF_TOKEN={'h' * 34}"]}, "--env[HF_TOKEN]: looks like a secret"),
        ({"secrets": ["wandb"]}, "--secret: must have the form VARIABLE=NAME"),
        ({"secrets": [f"A={TOKEN}"]}, "--secret: A needs the name of a file on the nodes"),
        ({"command": "'"}, "--command: must be quoted as in a shell"),
        ({"staging_command": "'"}, "--staging-command: must be quoted as in a shell"),
        ({"stall_limit": "soon"}, "--stall-limit: 'soon' is not a duration"),
        ({"stop_grace": "-1"}, "--stop-grace: '-1' is not a duration"),
        ({"tuning_budget": "soon"}, "--tuning-budget: 'soon' is not a duration"),
    ],
)
def test_a_wrong_option_of_a_program_is_named_without_its_secret(
    given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_options(**given)
    assert str(refused.value).startswith(problem)
    assert TOKEN not in str(refused.value)
