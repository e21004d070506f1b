"""Arguments of launchers, made from gangs and execution plans, and their reading back."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from string import Template
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.graph import Graph
from tessera.estimator.plans import shape_of
from tessera.estimator.stated.completion import complete_plan
from tessera.estimator.stated.megatron import parse_arguments, read_megatron
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.blocks import BlockDivision, divide_blocks
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.runtimes import MEGATRON, RUNTIMES
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.deepspeed import (
    CONFIGURATION,
    deepspeed_arguments,
    deepspeed_configuration,
    find_configuration,
)
from tessera.service.agent.runtimes.arguments.jax import jax_arguments
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.arguments.megatron import megatron_arguments
from tessera.service.agent.runtimes.arguments.torchrun import torchrun_arguments
from tessera.service.agent.runtimes.arguments.words import fill_words, read_flags
from tests.support.laws import examples
from tests.support.stated import a_context, a_decoder, a_mixture, a_plan

SCRIPT = "train.py"


def a_layout(gpus: int = 4, **changes: Any) -> RankLayout:
    """Return a node that is a gang of its own, with a program before each rank's interpreter."""
    given: dict[str, Any] = {
        "node_rank": 0,
        "member_gpus": (gpus,),
        "address": "10.0.0.1",
        "port": "29500",
        "python": "/opt/python",
        "rank_program": ("/opt/keeper", "--rank"),
    }
    return RankLayout(**(given | changes))


def data_parallel(**changes: Any) -> ExecutionPlan:
    """Return a plan of four replicas, with 32 samples in two micro-batches."""
    given: dict[str, Any] = {"micro_batch": 16, "accumulation": 2, "shape": (4,)}
    return a_plan((18,), {"dp": 4}, **(given | changes))


def rank_words(arguments: LaunchArguments) -> tuple[str, ...]:
    """Return the words of a rank's program, after its name."""
    return arguments.argv[arguments.argv.index(SCRIPT) + 1 :]


def refuse(problem: str) -> Any:
    return pytest.raises(InvalidInput, match=problem)


def test_torchrun_starts_the_rank_program_once_for_each_gpu_of_the_node() -> None:
    layout = a_layout(node_rank=1, member_gpus=(8, 8), stop_grace_s=90.5)
    arguments = torchrun_arguments(layout, (SCRIPT, "--lr", "0.1"), None, 32)
    assert arguments.argv == (
        *("/opt/python", "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "8"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500", "--max-restarts", "0"),
        *("--no-python", "/opt/keeper", "--rank", "/opt/python", "-u", SCRIPT, "--lr", "0.1"),
    )
    assert arguments.environment == {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "91"}
    assert arguments.files == {}


def test_torchrun_keeps_the_words_of_a_command_and_counts_unequal_nodes_itself() -> None:
    layout = a_layout(address="fd00::1", node_rank=1, member_gpus=(4, 2))
    arguments = torchrun_arguments(layout, ("-m", "lab.train", "a$$b", "${local_rank}"), None, 32)
    argv = arguments.argv
    assert argv[-6:-2] == ("/opt/python", "-u", "-m", "lab.train")
    templates = [Template(word).safe_substitute(local_rank="3") for word in argv]
    assert templates[-2:] == ["a$$b", "${local_rank}"]
    assert argv[argv.index("--master-addr") + 1] == "[fd00::1]"
    assert argv[argv.index("--nproc-per-node") + 1] == "2"
    assert arguments.environment == {"TORCH_ELASTIC_WORKER_IDENTICAL": "0"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"node_rank": 2, "member_gpus": (8, 8)}, "node_rank: must be 0 to 1, not 2"),
        ({"member_gpus": (8, 0)}, "member_gpus: must be at least 1"),
        ({"member_gpus": ()}, "member_gpus: must be at least 1"),
        ({"port": ""}, "port: must not be empty"),
        ({"address": ""}, "address: must not be empty"),
        ({"devices": ("0",)}, "devices: must name the 4 GPUs"),
    ],
)
def test_a_gang_without_places_for_its_ranks_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with refuse(problem):
        a_layout(**changes)


def test_a_command_gets_the_values_of_the_plan_in_its_words() -> None:
    command = (SCRIPT, "--batch={plan.micro_batch}", "{plan.accumulation}", "{plan.precision}")
    words = rank_words(torchrun_arguments(a_layout(), command, data_parallel(), 32))
    assert words == ("--batch=4", "2", "bf16")
    plan = data_parallel(zero=ZeroStage.PARAMETERS, recomputation=Recomputation.FULL)
    shown = fill_words(["{plan.dp}/{plan.zero}", "{plan.recomputation}", "{plan.sp}"], plan)
    assert shown == ("4/3", "full", "false")
    assert fill_words(['{"a": {"b": 1}}', "{plan}"], None) == ('{"a": {"b": 1}}', "{plan}")


def test_an_unknown_place_holder_and_one_without_a_plan_are_refused() -> None:
    with refuse(r"\{plan.batch\} is not a value of this plan; the values are accumulation, .*zero"):
        fill_words(["{plan.batch}"], data_parallel())
    with refuse(r"\{plan.dp\} needs an execution plan, and the job runs without one"):
        fill_words(["{plan.dp}"], None)
    stages = (PlanStage(start=0, end=9, dp=2), PlanStage(start=9, end=18, dp=4))
    unequal = ExecutionPlan(stages=stages, micro_batch=4)
    assert fill_words(["{plan.pp}"], unequal) == ("2",)
    with refuse(r"\{plan.micro_batch\} is not a value of this plan"):
        fill_words(["{plan.micro_batch}"], unequal)


@pytest.mark.parametrize(
    ("plan", "batch", "problem"),
    [
        (a_plan((9, 18)), 64, "has 2 pipeline stages.*torchrun cannot run it"),
        (data_parallel(), 64, "has 32 samples in an iteration, but the job's global batch is 64"),
        (a_plan((18,), {"dp": 8}), 64, "is for 8 GPUs, but the gang has 4"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: ExecutionPlan, batch: int, problem: str) -> None:
    with refuse(problem):
        torchrun_arguments(a_layout(), (SCRIPT,), plan, batch)


def world_of(arguments: LaunchArguments) -> dict[str, list[str]]:
    (word,) = [word for word in arguments.argv if word.startswith("--world_info=")]
    world: dict[str, list[str]] = json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))
    return world


def test_jax_starts_the_script_once_on_each_node_with_the_place_where_nodes_meet() -> None:
    command = (SCRIPT, "--batch={plan.global_batch}")
    alone = jax_arguments(a_layout(), command, data_parallel(), 32)
    assert alone == LaunchArguments(argv=("/opt/python", "-u", SCRIPT, "--batch=32"))
    layout = a_layout(node_rank=1, member_gpus=(8, 8), address="fd00::1")
    second = jax_arguments(layout, ("-m", "lab.train", "x"), None, 32)
    assert second.argv == ("/opt/python", "-u", "-m", "lab.train", "x")
    assert second.environment == {"TESSERA_COORDINATOR": "[fd00::1]:29500"}
    pipeline, two = a_plan((9, 18), {"dp": 2}), a_layout(member_gpus=(2, 2))
    assert jax_arguments(a_layout(4), (SCRIPT,), pipeline, pipeline.global_batch).files == {}
    with refuse("has 2 pipeline stages on 2 nodes.*state a plan of one stage"):
        jax_arguments(two, (SCRIPT,), pipeline, pipeline.global_batch)
    assert jax_arguments(two, (SCRIPT,), replace(data_parallel(), shape=(2, 2)), 32).environment


def test_deepspeed_starts_the_launcher_of_a_node_with_the_gpus_of_the_gang() -> None:
    layout = a_layout(node_rank=1, member_gpus=(2, 3), devices=("5", "GPU-7", "6"))
    arguments = deepspeed_arguments(layout, (SCRIPT, "--lr", "0.1"), None, 32)
    assert arguments.argv[:3] == ("/opt/python", "-m", "deepspeed.launcher.launch")
    assert world_of(arguments) == {"node-0": ["0", "1"], "node-1": ["5", "GPU-7", "6"]}
    assert arguments.argv[4:] == (
        *("--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500"),
        *("--no_python", "--no_local_rank"),
        *("/opt/keeper", "--rank", "/opt/python", "-u", SCRIPT, "--lr", "0.1"),
    )
    assert arguments.files == {}


def test_a_plan_becomes_a_configuration_that_the_script_is_given() -> None:
    plan = data_parallel(zero=ZeroStage.PARAMETERS, offload=Offload.PARAMETERS)
    arguments = deepspeed_arguments(a_layout(), (SCRIPT,), plan, 32).place_files("/run/gang")
    path = "/run/gang/deepspeed.json"
    assert rank_words(arguments) == ("--deepspeed", "--deepspeed_config", path)
    cpu = {"device": "cpu", "pin_memory": True}
    assert json.loads(arguments.files[CONFIGURATION]) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--deepspeed", "{files}/deepspeed.json"), ("--deepspeed", "/x/deepspeed.json")),
        (("--deepspeed", "own.json"), ("--deepspeed", "/x/deepspeed.json")),
        (("--deepspeed_config=own.json",), ("--deepspeed_config=/x/deepspeed.json",)),
    ],
)
def test_a_command_may_say_where_the_configuration_goes(
    words: Sequence[str], expected: Sequence[str]
) -> None:
    own = {"gradient_clipping": 1.0}
    arguments = deepspeed_arguments(a_layout(), (SCRIPT, *words), data_parallel(), 32, own)
    assert rank_words(arguments.place_files("/x")) == expected
    assert json.loads(arguments.files[CONFIGURATION])["gradient_clipping"] == 1.0


def test_the_users_own_configuration_keeps_what_a_plan_does_not_decide() -> None:
    own = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_batch_size": "auto",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "activation_checkpointing": {"number_checkpoints": 4, "profile": True},
    }
    plan = data_parallel(precision=Precision.F16, zero=ZeroStage.GRADIENTS)
    settings_of_plan = deepspeed_configuration(plan, 32, own)
    assert settings_of_plan == own | {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 0},
        "activation_checkpointing": {"profile": True},
    }


def test_without_a_plan_deepspeeds_batch_is_the_jobs() -> None:
    command = (SCRIPT, "--deepspeed_config", "{files}/deepspeed.json")
    arguments = deepspeed_arguments(a_layout(), command, None, 32)
    assert json.loads(arguments.files[CONFIGURATION]) == {"train_batch_size": 32}
    untouched = deepspeed_arguments(a_layout(), (SCRIPT, "--deepspeed", "own.json"), None, 32)
    assert rank_words(untouched) == ("--deepspeed", "own.json")
    assert untouched.files == {}


def test_a_configuration_that_cannot_be_used_is_refused() -> None:
    with refuse("names the configuration own.json, which could not be read; write {files}"):
        deepspeed_arguments(a_layout(), (SCRIPT, "--deepspeed", "own.json"), data_parallel(), 32)
    with refuse("zero_optimization: must be an object"):
        deepspeed_configuration(data_parallel(), 32, {"zero_optimization": True})
    with refuse("train_batch_size: is 16, but the job's global batch is 32"):
        deepspeed_configuration(None, 32, {"train_batch_size": 16})
    assert find_configuration(("--deepspeed", "--lr", "1.json")) is None


def megatron_words(plan: ExecutionPlan, *command: str, batch: int = 64) -> tuple[str, ...]:
    layout = a_layout(plan.gpus)
    return rank_words(megatron_arguments(layout, (SCRIPT, *command), plan, batch))


def test_megatron_gets_the_plan_as_its_own_arguments() -> None:
    plan = a_plan(
        (9, 18),
        {"dp": 2, "tp": 2, "sp": True},
        zero=ZeroStage.OPTIMIZER,
        recomputation=Recomputation.FULL,
        offload=Offload.OPTIMIZER,
    )
    arguments = megatron_arguments(a_layout(8), (SCRIPT, "--lr", "1e-4"), plan, 64)
    assert " ".join(rank_words(arguments)) == (
        "--lr 1e-4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        " --context-parallel-size 1 --sequence-parallel --micro-batch-size 4 --global-batch-size 64"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        " --use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
        " --use-precision-aware-optimizer --bf16"
    )
    assert arguments.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_command_may_state_what_the_plan_says() -> None:
    stated = ("--tensor-model-parallel-size", "{plan.tp}", "--bf16", "--global_batch_size=64")
    words = megatron_words(a_plan((9, 18)), *stated)
    assert words[:4] == ("--tensor-model-parallel-size", "2", "--bf16", "--global_batch_size=64")
    assert words.count("--tensor-model-parallel-size") == 1
    assert "--global-batch-size" not in words
    own = ("--micro-batch-size", "2", "--tensor-model-parallel-size", "4")
    arguments = megatron_arguments(a_layout(), (SCRIPT, *own), None, 64)
    assert rank_words(arguments) == (*own, "--global-batch-size", "64")


@pytest.mark.parametrize(
    ("plan", "words", "problem"),
    [
        (
            a_plan((9, 18)),
            ("--tensor-model-parallel-size", "4"),
            "--tensor-model-parallel-size: contradicts .* --tensor-model-parallel-size 2; leave",
        ),
        (a_plan((9, 18)), ("--use-distributed-optimizer",), "is not in the execution plan, which"),
        (a_plan((9, 18)), ("--fp16",), "--fp16: is not in the execution plan"),
        (a_plan((9, 18)), ("--num-layers", "24"), "is 24, but the execution plan has 16 layers"),
        (None, ("--global-batch-size", "32"), "is 32, but the job's global batch is 64"),
    ],
)
def test_a_command_that_contradicts_the_plan_or_the_job_is_refused(
    plan: ExecutionPlan | None, words: tuple[str, ...], problem: str
) -> None:
    layout = a_layout(plan.gpus if plan else 4)
    with refuse(problem):
        megatron_arguments(layout, (SCRIPT, *words), plan, 64)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((18,), BlockDivision()),
        ((5, 9, 13, 18), BlockDivision()),
        ((6, 12, 18), BlockDivision(counts_ends=True)),
        ((4, 9, 14, 18), BlockDivision(first=3, last=3)),
        ((1, 9, 18), None),  # a first stage without blocks
        ((5, 10, 14, 18), None),
    ],
)
def test_blocks_are_divided_as_megatron_can_be_asked_for(
    ends: tuple[int, ...], expected: BlockDivision | None
) -> None:
    plan = a_plan(ends, {"dp": 2}, micro_batch=8)
    assert divide_blocks(plan) == expected
    refusal = RUNTIMES[MEGATRON].refuse_plan(plan)
    assert refusal.startswith("divides the model's blocks") == (expected is None)


@st.composite
def megatron_plans(draw: st.DrawFn) -> tuple[ExecutionPlan, Graph]:
    """Return plans that Megatron-LM can run for a decoder of 16 blocks, with its graph."""
    kinds = [((18,), 1), ((9, 18), 1), ((5, 9, 13, 18), 1), ((6, 12, 18), 1), ((4, 9, 14, 18), 1)]
    kinds += [((5, 9, 13, 18), 2), ((3, 6, 9, 12, 15, 18), 2), ((4, 9, 12, 18), 2)]
    ends, chunks = draw(st.sampled_from(kinds))
    degree = len(ends) // chunks
    is_mixture = draw(st.booleans())
    dp, tp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    choices = [ep for ep in (1, 2, 4, 8) if is_mixture and (dp * tp * cp) % ep == 0]
    stage = {"dp": dp, "tp": tp, "cp": cp, "ep": draw(st.sampled_from(choices or [1]))}
    stage["sp"] = tp > 1 and draw(st.booleans())
    zero = draw(st.sampled_from([ZeroStage.NONE, ZeroStage.OPTIMIZER]))
    plan = a_plan(
        ends,
        stage,
        chunks=chunks,
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
        micro_batch=dp * draw(st.sampled_from([1, 3])),
        accumulation=degree * draw(st.sampled_from([1, 2])),
        zero=zero,
        offload=draw(st.sampled_from([Offload.NONE, Offload.OPTIMIZER])) if zero else Offload.NONE,
        recomputation=draw(st.sampled_from(Recomputation)),
        precision=draw(st.sampled_from([Precision.BF16, Precision.F16, Precision.FP8])),
        shape=shape_of(dp * tp * cp * degree, 8).each_node,
    )
    return plan, a_mixture() if is_mixture else a_decoder()


@given(drawn=megatron_plans())
@examples(300)
def test_generated_arguments_are_read_back_as_the_same_plan(
    drawn: tuple[ExecutionPlan, Graph],
) -> None:
    plan, graph = drawn
    experts = ("--num-experts", "8") if int(graph.experts.max()) > 1 else ()
    words = megatron_words(plan, "--num-layers", "16", *experts, batch=plan.global_batch)
    stated = read_megatron("file", parse_arguments(words))
    assert complete_plan(stated, a_context(plan.gpus, plan.global_batch, graph)) == plan


def test_arguments_are_read_by_name_however_they_are_written() -> None:
    words = ("--a_b=1", "--flag", "--n", "-3", "--list", "1", "2", "-x", "--last")
    assert read_flags(words) == {
        "--a-b": "1",
        "--flag": "",
        "--n": "-3",
        "--list": "1",
        "--last": "",
    }
