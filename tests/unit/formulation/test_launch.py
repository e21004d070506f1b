"""The way in which a job's program is started: what users may state, and its form in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.launch import (
    DEFAULT_LAUNCH,
    DEFAULT_TUNING_BUDGET_S,
    MAX_PATTERN,
    LaunchSpec,
    SecretVariable,
    check_pattern,
    launch_from_plain,
)
from tests.support.launches import WHOLE_LAUNCH


@pytest.mark.parametrize(
    "launch",
    [
        DEFAULT_LAUNCH,
        WHOLE_LAUNCH,
        LaunchSpec(stop_grace_s=1.5),
        LaunchSpec(tuning_space="arena", tuning_budget_s=60.0),
    ],
)
def test_a_launch_reads_back_from_json(launch: LaunchSpec) -> None:
    assert launch_from_plain(json.loads(json.dumps(launch.to_plain()))) == launch


def test_only_what_was_stated_is_written() -> None:
    assert DEFAULT_LAUNCH.to_plain() == {}
    assert LaunchSpec(user="ana").to_plain() == {"user": "ana"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {"1A": ""}}, "environment[1A]"),
        ({"environment": {"": "x"}}, "environment[]"),
        ({"environment": {"A-B": "x"}}, "environment[A-B]"),
        ({"environment": {"TESSERA_JOB": "x"}}, "environment[TESSERA_JOB]"),
        ({"environment": {"A": "x" * 4097}}, "environment[A]"),
        ({"environment": {"A": "x\0"}}, "environment[A]"),
        ({"environment": {f"A{i}": "" for i in range(257)}}, "environment"),
        ({"working_directory": "here"}, "working_directory"),
        ({"working_directory": "/a\0"}, "working_directory"),
        ({"image": "x" * 4097}, "image"),
        ({"staging_command": ("x",) * 257}, "staging_command"),
        ({"staging_command": ("cp", "a\0b")}, "staging_command[1]"),
        ({"user": "Ana"}, "user"),
        ({"user": "-r"}, "user"),
        ({"progress_pattern": "x" * (MAX_PATTERN + 1)}, "progress_pattern"),
        ({"stall_limit_s": -1.0}, "stall_limit"),
        ({"stall_limit_s": float("nan")}, "stall_limit"),
        ({"stall_limit_s": 8 * 86_400.0}, "stall_limit"),
        ({"stop_grace_s": float("inf")}, "stop_grace"),
        ({"stop_grace_s": 3601.0}, "stop_grace"),
        ({"tuning_space": "all"}, "tuning_space"),
        ({"tuning_space": "full", "tuning_budget_s": 86_401.0}, "tuning_budget"),
        ({"tuning_space": "full", "tuning_budget_s": -1.0}, "tuning_budget"),
        ({"tuning_budget_s": 60.0}, "tuning_budget"),
    ],
)
def test_a_wrong_field_of_a_launch_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        LaunchSpec(**changes)
    assert refused.value.field == field


def test_a_job_tunes_for_its_budget_or_the_default_and_only_if_it_names_a_space() -> None:
    assert LaunchSpec().tuning_s == 0.0
    assert LaunchSpec(tuning_space="halves").tuning_s == DEFAULT_TUNING_BUDGET_S
    assert LaunchSpec(tuning_space="halves", tuning_budget_s=60.0).tuning_s == 60.0


@pytest.mark.parametrize(
    ("variable", "name", "field"),
    [
        ("KEY", "../other-tenant", "name"),
        ("KEY", ".hidden", "name"),
        ("KEY", "", "name"),
        ("KEY", "x" * 101, "name"),
        ("K=Y", "key", "variable"),
        ("TESSERA_KEY", "key", "variable"),
    ],
)
def test_a_wrong_secret_is_named(variable: str, name: str, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        SecretVariable(variable=variable, name=name)
    assert refused.value.field == field


@pytest.mark.parametrize("environment", [{}, {"KEY": "x"}])
def test_a_variable_has_one_value(environment: dict[str, str]) -> None:
    secrets = (SecretVariable(variable="KEY", name="a"), SecretVariable(variable="KEY", name="b"))
    with pytest.raises(InvalidInput, match=r"secrets\[.\]\.variable: KEY has a value already"):
        LaunchSpec(environment=environment, secrets=secrets)
    many = tuple(SecretVariable(variable=f"KEY_{i}", name="a") for i in range(65))
    with pytest.raises(InvalidInput, match="secrets: must be at most 64"):
        LaunchSpec(secrets=many)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "is not a regular expression of Python"),
        ("step (?P<step>[0-9]+)", "needs the group (?P<iteration>...)"),
        ("(?P<iteration>x){99999999999999999999}", "is not a regular expression"),
        ("(" * 400, "is not a regular expression"),
        ("(?P<iteration>x)[\u0100-\uffff]", "must be of ASCII characters"),
        (r"(?P<iteration>x)[\0-\uffff]", "must be of ASCII characters"),
        (r"(?P<iteration>x)[\0-\U0010ffff]", "must be of ASCII characters"),
    ],
)
def test_a_pattern_that_finds_no_progress_is_refused(pattern: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem)) as refused:
        check_pattern("job.launch.progress_pattern", pattern)
    assert refused.value.field == "job.launch.progress_pattern"


def test_a_pattern_may_find_the_loss_too() -> None:
    check_pattern("p", "")
    check_pattern("p", WHOLE_LAUNCH.progress_pattern)
