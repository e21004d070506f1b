"""Jobs that the runtimes of this release can run: servers and agents apply the same rules."""

from __future__ import annotations

import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.runtimes import PROFILER, REPLAY, RUNTIMES, fail_at, is_training
from tessera.formulation.values import PROFILING, Workload
from tessera.service.agent.main import _parser, build_config, make_runtimes


def test_a_replayed_job_takes_no_command_or_one_that_makes_it_fail() -> None:
    assert fail_at(()) is None
    assert fail_at(("fail-at", "12")) == 12


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py"),
        ("fail-at",),
        ("fail-at", "-1"),
        ("fail-at", "1", "2"),
        ("",),
        ("fail-at", "9" * 5000),
        ("fail-at", "\u0663"),
    ],
)
def test_a_job_that_no_runtime_can_run_is_refused_in_one_short_sentence(
    command: tuple[str, ...],
) -> None:
    with pytest.raises(InvalidInput) as refused:
        RUNTIMES[REPLAY].check_command("job.command", command)
    assert refused.value.field == "job.command"
    assert "replay jobs and train nothing" in str(refused.value)
    assert str(refused.value).endswith("submit the job without a command")
    assert len(str(refused.value)) < 300


def test_an_agent_has_the_runtimes_that_servers_check_against() -> None:
    flags = ["--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", "d", "--node", "n:a100:1"]
    options = _parser().parse_args(flags)
    assert make_runtimes(options, build_config(options, "first")).keys() == RUNTIMES.keys()


def test_no_runtime_of_this_release_trains() -> None:
    assert not any(runtime.trains for runtime in RUNTIMES.values())


@pytest.mark.parametrize(("model", "runtime"), [("bert", ""), (PROFILING, PROFILER)])
def test_the_runtime_of_a_job_follows_from_its_model(model: str, runtime: str) -> None:
    workload = Workload(model=model, params="", global_batch=1)
    spec = JobSpec(name="j", workload=workload, iterations=1, requested_gpus=1)
    assert spec.runtime == runtime


def test_only_a_known_runtime_that_trains_measures(trainer: str) -> None:
    assert is_training(trainer, "")
    assert not is_training(REPLAY, trainer)
    assert not is_training("of-a-later-release", trainer)


def test_an_agent_that_names_no_runtime_is_taken_to_use_the_requested_one(trainer: str) -> None:
    assert is_training("", trainer)
    assert not is_training("", PROFILER)
    assert not is_training("", "")
