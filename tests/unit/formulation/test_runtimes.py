"""Launches and runtimes: what users may state, and what servers and agents refuse alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import PROFILING, Workload
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.launch import (
    DEFAULT_LAUNCH,
    DEFAULT_TUNING_BUDGET_S,
    MAX_PATTERN,
    LaunchSpec,
    SecretVariable,
    check_pattern,
    launch_from_plain,
)
from tessera.formulation.job.runtimes import (
    ALPA,
    COMMAND,
    DEEPSPEED,
    JAX,
    MEGATRON,
    PROFILER,
    REPLAY,
    RUNTIMES,
    TORCHRUN,
    fail_at,
    is_training,
)
from tessera.service.agent.settings import build_config, make_parser, make_runtimes
from tests.support.launches import WHOLE_LAUNCH
from tests.support.stored_cluster import a_spec

PROGRAMS: Final = {COMMAND, TORCHRUN, DEEPSPEED, MEGATRON, JAX, ALPA}
"""The runtimes that start the programs of users."""


def a_uniform_plan(
    layers: tuple[int, ...] = (6,),
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    zero: ZeroStage = ZeroStage.NONE,
    offload: Offload = Offload.NONE,
    **degrees: Any,
) -> ExecutionPlan:
    """Return a plan whose stages have these numbers of layers, and the same degrees."""
    stages = tuple(
        PlanStage(start=start, end=end, **degrees)
        for start, end in pairwise([0, *accumulate(layers)])
    )
    return ExecutionPlan(
        stages=stages,
        micro_batch=8,
        accumulation=len(stages),
        schedule=schedule,
        zero=zero,
        offload=offload,
    )


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
    assert "the replay runtime trains nothing" in str(refused.value)
    assert "submit the job with the runtime 'command', or without a command" in str(refused.value)
    assert len(str(refused.value)) < 300


def test_an_agent_has_the_runtimes_that_servers_check_against() -> None:
    flags = ["--server", "127.0.0.1:1", "--cluster", "c", "--data-dir", "d", "--node", "n:a100:1"]
    options = make_parser().parse_args(flags)
    assert make_runtimes(options, build_config(options, "first")).keys() == RUNTIMES.keys()


def test_only_runtimes_that_start_users_programs_train() -> None:
    assert {name for name, runtime in RUNTIMES.items() if runtime.trains} == PROGRAMS
    assert {name for name, runtime in RUNTIMES.items() if runtime.is_for_users} == {
        *PROGRAMS,
        REPLAY,
    }


@pytest.mark.parametrize(
    ("stated", "command", "runtime"),
    [
        ("", (), REPLAY),
        ("", ("fail-at", "5"), REPLAY),
        ("", ("python", "train.py"), COMMAND),
        (COMMAND, ("fail-at", "5"), COMMAND),
        (TORCHRUN, ("train.py",), TORCHRUN),
        (REPLAY, ("python", "train.py"), REPLAY),
    ],
)
def test_a_job_has_the_runtime_that_it_states_or_that_its_command_implies(
    stated: str, command: tuple[str, ...], runtime: str
) -> None:
    assert a_spec("j", launch=LaunchSpec(runtime=stated), command=command).runtime == runtime


@pytest.mark.parametrize("stated", ["", REPLAY, TORCHRUN])
def test_a_profiling_task_is_always_run_by_the_profiler(stated: str) -> None:
    workload = Workload(model=PROFILING, params="", global_batch=1)
    spec = a_spec("j", workload=workload, launch=LaunchSpec(runtime=stated), command=("{}",))
    assert spec.runtime == PROFILER


@pytest.mark.parametrize("runtime", sorted(PROGRAMS))
@pytest.mark.parametrize("command", [(), ("",)])
def test_a_runtime_that_starts_programs_needs_one(runtime: str, command: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"job\.command: must name the (program|script) to run"):
        RUNTIMES[runtime].check_command("job.command", command)
    RUNTIMES[runtime].check_command("job.command", ("train.py", ""))


@pytest.mark.parametrize("runtime", sorted(PROGRAMS - {COMMAND}))
def test_a_launcher_needs_the_name_of_a_module_after_m(runtime: str) -> None:
    check = RUNTIMES[runtime].check_command
    for option in ("-m", "--module"):
        with pytest.raises(InvalidInput, match="must name the module after -m"):
            check("job.command", (option,))
        check("job.command", (option, "train"))


@pytest.mark.parametrize(
    ("changes", "refusing"),
    [
        ({"dp": 8}, {}),
        ({"dp": 8, "zero": ZeroStage.PARAMETERS}, {MEGATRON: "ZeRO stage 3"}),
        ({"dp": 8, "zero": ZeroStage.OPTIMIZER}, {ALPA: "ZeRO stage 1"}),
        (
            {"dp": 8, "offload": Offload.OPTIMIZER},
            {
                TORCHRUN: "offloads",
                DEEPSPEED: "undivided states",
                MEGATRON: "undivided states",
                ALPA: "offloads",
            },
        ),
        ({"dp": 2, "tp": 4}, {TORCHRUN: "divides tensors", DEEPSPEED: "divides tensors"}),
        (
            {"dp": 2, "cp": 4},
            {TORCHRUN: "sequences", DEEPSPEED: "sequences", JAX: "(cp)", ALPA: "sequences"},
        ),
        ({"dp": 8, "ep": 8}, {TORCHRUN: "experts", DEEPSPEED: "experts", ALPA: "experts"}),
        (
            {"dp": 4, "layers": (3, 3)},
            {TORCHRUN: "has 2 pipeline stages", DEEPSPEED: "has 2 pipeline stages"},
        ),
        (
            {"dp": 4, "layers": (3, 2)},
            {TORCHRUN: "2 pipeline", DEEPSPEED: "2 pipeline"},
        ),
        (
            {"dp": 4, "layers": (3, 3), "schedule": Schedule.GPIPE},
            {TORCHRUN: "2 pipeline", DEEPSPEED: "2 pipeline", MEGATRON: "GPipe"},
        ),
    ],
)
def test_a_runtime_refuses_the_plans_that_its_launcher_cannot_run(
    changes: dict[str, Any], refusing: dict[str, str]
) -> None:
    plan = a_uniform_plan(**changes)
    for name, runtime in RUNTIMES.items():
        problem = runtime.refuse_plan(plan)
        assert bool(problem) == (name in refusing), (name, problem)
        assert refusing.get(name, "") in problem
        assert not (problem and runtime.runs_any_plan)


def test_megatron_refuses_stages_that_differ_in_parallelism() -> None:
    plan = a_uniform_plan(dp=4, layers=(3, 3))
    first, second = plan.stages
    uneven = replace(plan, stages=(first, replace(second, dp=2, tp=2)))
    assert "stages of different parallelism" in RUNTIMES[MEGATRON].refuse_plan(uneven)


@pytest.mark.parametrize(
    ("degrees", "problem"),
    [
        ({"dp": 4, "ep": 2}, ""),
        ({"dp": 4, "ep": 4}, ""),
        ({"dp": 2, "tp": 4, "ep": 4}, ""),
        ({"dp": 2, "tp": 2, "ep": 4}, ""),
        ({"tp": 8, "ep": 8}, ""),
        ({"dp": 4, "tp": 3, "ep": 6}, "divides experts over 6 GPUs"),
        ({"dp": 2, "tp": 6, "ep": 3}, "which do not form whole parts of 2 x 6"),
    ],
)
def test_jax_divides_experts_over_whole_parts_of_a_stage(
    degrees: dict[str, Any], problem: str
) -> None:
    stage = PlanStage(start=0, end=6, **degrees)
    refusal = RUNTIMES[JAX].refuse_plan(ExecutionPlan(stages=(stage,), micro_batch=8))
    assert problem in refusal
    assert bool(refusal) == bool(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"precision": Precision.F32}, ""),
        ({"precision": Precision.BF16}, ""),
        ({"precision": Precision.F16}, "computes in f16"),
        ({"precision": Precision.FP8}, "computes in fp8"),
        ({"shape": (8,)}, ""),
        ({"shape": (4, 4)}, "has pipeline stages on several nodes"),
    ],
)
def test_jax_refuses_pipelines_of_several_nodes_and_precisions_that_need_scaled_losses(
    changes: dict[str, Any], problem: str
) -> None:
    refusal = RUNTIMES[JAX].refuse_plan(replace(a_uniform_plan(dp=4, layers=(3, 3)), **changes))
    assert problem in refusal
    assert bool(refusal) == bool(problem)


def test_only_a_known_runtime_that_trains_measures(trainer: str) -> None:
    assert is_training(trainer, "")
    assert not is_training(REPLAY, trainer)
    assert not is_training("of-a-later-release", trainer)


def test_an_agent_that_names_no_runtime_is_taken_to_use_the_requested_one(trainer: str) -> None:
    assert is_training("", trainer)
    assert not is_training("", PROFILER)
    assert not is_training("", "")


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
        ({"env": {"1A": ""}}, "env[1A]"),
        ({"env": {"TESSERA_JOB": "x"}}, "env[TESSERA_JOB]"),
        ({"env": {"A": "x" * 4097}}, "env[A]"),
        ({"env": {"A": "x\0"}}, "env[A]"),
        ({"env": {f"A{i}": "" for i in range(257)}}, "env"),
        ({"workdir": "here"}, "workdir"),
        ({"image": "x" * 4097}, "image"),
        ({"staging_command": ("cp", "a\0b")}, "staging_command[1]"),
        ({"user": "Ana"}, "user"),
        ({"user": "-r"}, "user"),
        ({"progress_pattern": "x" * (MAX_PATTERN + 1)}, "progress_pattern"),
        ({"stall_limit_s": float("nan")}, "stall_limit"),
        ({"stall_limit_s": 8 * 86_400.0}, "stall_limit"),
        ({"stop_grace_s": 3601.0}, "stop_grace"),
        ({"tuning_space": "all"}, "tuning_space"),
        ({"tuning_space": "full", "tuning_budget_s": 86_401.0}, "tuning_budget"),
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
        LaunchSpec(env=environment, secrets=secrets)
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
