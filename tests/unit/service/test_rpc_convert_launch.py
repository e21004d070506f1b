"""The launch of a job in messages: what a user states, what answers show, and what agents get."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import PROFILING, Workload
from tessera.formulation.job.launch import DEFAULT_LAUNCH, LaunchSpec
from tessera.formulation.records.agents import DesiredState
from tessera.formulation.records.jobs import JobSpec
from tessera.service.agent.gangs import read_launch
from tessera.service.agent.isolation import UnsuitableNode
from tessera.service.server.convert import agents, jobs
from tessera.service.server.convert.launch import MAX_LAUNCH_CHARS, of_launch, to_launch
from tessera.v1 import agents_pb2, jobs_pb2, launch_pb2
from tests.support.execution_plans import a_plan
from tests.support.job_records import a_desired_gang
from tests.support.launches import WHOLE_LAUNCH, WHOLE_MESSAGE
from tests.support.stored_cluster import BERT, a_spec
from tests.support.tuning import tuner

__all__ = ["tuner"]


def a_job_message(*, command: tuple[str, ...] = (), **launch: Any) -> jobs_pb2.Job:
    message = jobs_pb2.Job(iterations=10, requested_gpus=4, command=command)
    message.workload.model, message.workload.global_batch = "bert", 256
    if launch:
        message.launch.CopyFrom(launch_pb2.Launch(**launch))
    return message


def read_job(message: jobs_pb2.Job) -> JobSpec:
    return jobs.to_job_spec("job", "c", "j", message)


def test_a_whole_launch_survives_a_round_trip() -> None:
    assert to_launch("launch", WHOLE_MESSAGE) == WHOLE_LAUNCH
    spec = a_spec("j", command=("train.py",), launch=WHOLE_LAUNCH)
    assert of_launch(spec) == WHOLE_MESSAGE
    assert read_job(jobs.of_spec("c", spec)).launch == WHOLE_LAUNCH


def test_a_tuning_survives_a_round_trip_and_contradicts_a_stated_plan(tuner: str) -> None:
    for budget_s in (0.0, 90.5):
        launch = LaunchSpec(runtime=tuner, tuning_space="arena", tuning_budget_s=budget_s)
        spec = a_spec("j", command=("train.py",), launch=launch)
        assert read_job(jobs.of_spec("c", spec)).launch == launch
        assert read_launch(send(spec)) == launch
    message = a_job_message(command=("train.py",), runtime=tuner, tuning_space="full")
    message.plan, message.workload.params = a_plan(BERT, 4).to_json(), BERT.params
    with pytest.raises(InvalidInput, match="contradicts plan") as refused:
        read_job(message)
    assert refused.value.field == "job.launch.tuning_space"


@pytest.mark.parametrize(
    ("launch", "field", "problem"),
    [
        ({"runtime": "slurm"}, "runtime", "'slurm' is not a runtime of users' jobs; name one of a"),
        ({"runtime": "x" * 10_000}, "runtime", "is not a runtime"),
        ({"runtime": "profile"}, "runtime", "'profile' is not a runtime of users' jobs"),
        ({"image": "repo/image:1"}, "image", "is for engines that run containers"),
        ({"env": {"A B": "x"}}, "env[A B]", "must be the name of a variable"),
        ({"env": {"TESSERA_X": ""}}, "env[TESSERA_X]", "the agent sets those"),
        ({"env": {"A": "x" * 5000}}, "env[A]", "at most 4096 characters"),
        (
            {"env": {f"A{i}": "x" * 1000 for i in range(70)}},
            "",
            f"must have at most {MAX_LAUNCH_CHARS:,} characters in total; it has 70,200",
        ),
        ({"env": {f"A{i}": "x" for i in range(257)}}, "env", "at most 256"),
        ({"workdir": "train"}, "workdir", "must be an absolute path"),
        (
            {"secrets": [{"variable": "A", "name": "a"}, {"variable": "1", "name": "a"}]},
            "secrets[1].variable",
            "must be the name of a variable",
        ),
        ({"secrets": [{"variable": "A", "name": "../a"}]}, "secrets[0].name", "must be 1 to 100"),
        (
            {"secrets": [{"variable": "A", "name": "a"}], "env": {"A": "x"}},
            "secrets[0].variable",
            "A has a value already",
        ),
        ({"staging_command": ["", "x"]}, "staging_command[0]", "must name the program"),
        ({"staging_command": ["cp", "\0"]}, "staging_command[1]", "zero byte"),
        ({"user": "root;"}, "user", "must be the name of a user"),
        ({"progress_pattern": "("}, "progress_pattern", "is not a regular expression"),
        ({"progress_pattern": "x"}, "progress_pattern", "needs the group"),
        ({"stall_limit": Duration(seconds=10**9)}, "stall_limit", "must be 0 to 604800 seconds"),
        ({"stall_limit": Duration(seconds=-1)}, "stall_limit", "must be a valid duration"),
        ({"stall_limit": Duration(nanos=10**9)}, "stall_limit", "must be a valid duration"),
        ({"stop_grace": Duration()}, "stop_grace", "must be longer than 0 s"),
        ({"stop_grace": Duration(seconds=3601)}, "stop_grace", "must be 0 to 3600 seconds"),
        ({"tuning_space": "x" * 999}, "tuning_space", "must be one of halves, arena, full"),
        ({"tuning_space": "full"}, "tuning_space", "needs a runtime whose programs try plans"),
        ({"tuning_budget": Duration(seconds=60)}, "tuning_budget", "needs a tuning_space"),
        (
            {"tuning_space": "full", "tuning_budget": Duration(seconds=86_401)},
            "tuning_budget",
            "must be 0 to 86400 seconds",
        ),
    ],
)
def test_a_wrong_field_of_a_launch_is_named(
    launch: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_job(a_job_message(command=("train.py",), **launch))
    assert refused.value.field == ("job.launch." + field).removesuffix(".")
    assert problem in refused.value.problem
    assert len(refused.value.problem) < 300


def test_a_variable_that_holds_a_secret_is_refused_without_repeating_it() -> None:
    for value in (
        "tessera_token_" + 12 * "a",
        "postgresql://ana:" + "pass" + "@host/db",
        "eyJ" + 9 * "a" + ".",
    ):
        with pytest.raises(InvalidInput) as refused:
            read_job(a_job_message(env={"A": f"x {value}"}))
        assert refused.value.field == "job.launch.env[A]"
        assert "name that file in job.launch.secrets" in str(refused.value)
        assert value not in str(refused.value)


def test_the_runtime_of_a_job_checks_its_command_and_no_user_submits_a_profiling_task() -> None:
    for command, runtime, problem in (
        (("python", "train.py"), "replay", "the replay runtime trains nothing"),
        ((), "command", "must name the program to run"),
        ((), "torchrun", "must name the script to run"),
        (("-m",), "deepspeed", "must name the module after -m"),
        (("",), "", "must name the program to run"),
    ):
        with pytest.raises(InvalidInput, match=problem) as refused:
            read_job(a_job_message(command=command, runtime=runtime))
        assert refused.value.field == "job.command"
    message = a_job_message(command=("train.py",), runtime="command")
    message.workload.model = PROFILING
    with pytest.raises(InvalidInput, match="reserved for profiling tasks"):
        read_job(message)


def test_a_stated_plan_that_the_runtime_cannot_run_is_refused_with_its_problem() -> None:
    message = a_job_message(command=("train.py",), runtime="torchrun")
    message.plan = a_plan(BERT, 4).to_json()
    message.workload.params = BERT.params
    with pytest.raises(InvalidInput) as refused:
        read_job(message)
    assert str(refused.value) == (
        "job.plan: divides tensors, experts or sequences, and data parallelism divides only"
        " samples; the runtime 'torchrun' cannot run it, so state another plan or another runtime"
    )
    for runtime in ("command", "megatron"):
        message.launch.runtime = runtime
        assert read_job(message).plan == a_plan(BERT, 4)


def send(spec: JobSpec) -> agents_pb2.DesiredGang:
    """Return the message of a gang of ``spec`` to the agent of n2."""
    state = DesiredState(revision=5, gangs=(a_desired_gang(spec),))
    return agents.of_desired(state, {"n2"}).gangs[0]


def test_answers_and_agents_name_the_runtime_that_was_implied() -> None:
    for command, runtime in (((), "replay"), (("fail-at", "3"), "replay"), (("train",), "command")):
        spec = read_job(a_job_message(command=command))
        assert (spec.launch, spec.runtime) == (DEFAULT_LAUNCH, runtime)
        assert jobs.of_spec("c", spec).launch == launch_pb2.Launch(runtime=runtime)
    task = Workload(model=PROFILING, params="", global_batch=1)
    for spec, runtime in (
        (a_spec("j"), "replay"),
        (a_spec("j", command=("python",)), "command"),
        (a_spec("j", workload=task, command=("{}",)), "profile"),
    ):
        assert read_launch(send(spec)) == LaunchSpec(runtime=runtime)


def test_an_agent_gets_the_launch_the_tenant_and_the_gpus_of_all_members() -> None:
    message = send(a_spec("j", command=("train.py",), launch=WHOLE_LAUNCH, tenant="vision"))
    assert message.launch == WHOLE_MESSAGE
    assert (list(message.members), list(message.member_gpus)) == (["n1", "n2"], [3, 2])
    assert (message.tenant, read_launch(message)) == ("vision", WHOLE_LAUNCH)


def test_a_launch_that_only_a_later_release_allows_is_refused_with_what_to_do() -> None:
    message = send(a_spec("j", command=("train.py",), launch=WHOLE_LAUNCH))
    message.launch.env["A"] = "x" * 5000
    with pytest.raises(UnsuitableNode) as refused:
        read_launch(message)
    assert refused.value.problem == (
        "this agent cannot use the job's launch; upgrade tessera on its node: env[A]: must have"
        " at most 4096 characters"
    )
