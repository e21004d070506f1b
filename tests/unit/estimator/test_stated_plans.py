"""Readers of stated plans, their recognition, and the completion of what they leave open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.graph import Graph
from tessera.estimator.stated.comparison import compare_plan, describe_differences
from tessera.estimator.stated.completion import complete_plan
from tessera.estimator.stated.formats import PlanFormat, read_stated_plan, recognise_format
from tessera.estimator.stated.statement import StatedPlan, combine
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import (
    ExecutionPlan,
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tests.support.stated import a_context, a_decoder, a_mixture, a_plan, a_setting

SCRIPT = r"""#!/bin/bash
# Don't run this on a login node; it's long.
#SBATCH --nodes=2
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE="$2/gpt2-vocab.json"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port 6000
)
GPT_MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048 # it's a test
    --num-attention-heads 24
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)
TRAINING_ARGS="--micro-batch-size 2 --global-batch-size 64 --lr 6.0e-5 --min-lr -1 \
    --train-iters 500000 --bf16"
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 4
	--pipeline-model-parallel-size 2
    --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce
)
if [ -z "$X" ]; then
  echo "no; plan"
fi
mkdir -p $CHECKPOINT_PATH && torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    $TRAINING_ARGS \
    ${MODEL_PARALLEL_ARGS[@]} --data-path $DATA --recompute-activations 2>&1 | tee run.log
"""
TITAN = """
# torchtitan Config.toml
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true
profile_freq = 100

[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
compile = false

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 1

[checkpoint]
folder = "checkpoint"

[activation_checkpoint]
mode = "full"

[float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
"""
SPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999]}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    },
}


def read(text: str) -> StatedPlan:
    """Return what a file states that is not a whole plan."""
    stated = read_stated_plan("file", text)
    assert isinstance(stated, StatedPlan)
    return stated


def complete(
    text: str, gpus: int = 16, batch: int = 64, graph: Graph | None = None
) -> ExecutionPlan:
    return complete_plan(read(text), a_context(gpus, batch, graph))


def speed(**changes: Any) -> str:
    return json.dumps(SPEED | changes)


def titan(old: str = "", new: str = "") -> str:
    assert old in TITAN
    return TITAN.replace(old, new)


def test_a_script_of_megatron_becomes_a_plan() -> None:
    plan = complete(SCRIPT)
    assert str(plan) == (
        "2 x (dp2 tp4 sp), 1F1B, ZeRO-1, selective recomputation, micro-batch 2 x 16"
    )
    assert [stage.end for stage in plan.stages] == [9, 18]
    assert plan.shape == (8, 8)


def test_lists_of_a_script_may_grow_and_lose_lines_to_comments() -> None:
    text = """
TP_SIZE=4     # GPUs
ARGS=(
    --micro-batch-size 2 \\
    #--tensor-model-parallel-size 8 \\
    --bf16
)
LOGS=(--log-interval 1)
if [[ -n "$WANDB" ]]; then
    LOGS+=(
        "--wandb-project x"
    )
fi
MORE=(--pipeline-model-parallel-size 2)
ARGS+=("${MORE[@]}")
torchrun "$SCRIPT.py" ${ARGS[@]} ${LOGS[@]} --tensor-model-parallel-size $TP_SIZE
"""
    assert str(complete(text)) == "2 x (dp2 tp4), 1F1B, micro-batch 2 x 16"
    assert read(text).notes == ("left out, because only a run decides them: $LOGS (line 10)",)
    uncertain = read(text.replace("--wandb-project x", "--fp8-format hybrid"))
    assert uncertain.unknown == {
        "precision": "is perhaps in $LOGS (line 10), which only a run decides"
    }


@pytest.mark.parametrize(
    "text",
    [
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 --bf16",
        "--tensor-model-parallel-size=4\n--pipeline-model-parallel-size=2\n--micro-batch-size=2\n--bf16",
        "--tensor-model-parallel-size\n4\n--pipeline-model-parallel-size\n2\n--micro-batch-size\n2\n--bf16",
        "ARGS=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2\n"
        " --micro-batch-size 2 --bf16)",
        "tensor_model_parallel_size: 4\npipeline_model_parallel_size: 2\nmicro_batch_size: 2\nbf16: true\n",
        "ENV_VARS:\n  X: 1\nMODEL_ARGS:\n  --tensor-model-parallel-size: 4\n"
        "  --pipeline-model-parallel-size: 2\n  --micro-batch-size: 2\n  --bf16: true\n  --fp16: false\n",
        '{"tensor-model-parallel-size": 4, "pipeline-model-parallel-size": 2, "micro-batch-size": 2,'
        ' "bf16": true}',
        "python train.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
        " --micro-batch-size 2 --bf16 > log.txt",
        "--bf16 --tensor-model-parallel-size 1 --tensor-model-parallel-size 4 --micro-batch-size 2"
        " --pipeline-model-parallel-size 2 # the last one counts",
    ],
)
def test_arguments_may_be_written_in_many_ways(text: str) -> None:
    assert recognise_format("file", text) is PlanFormat.MEGATRON
    assert str(complete(text)) == "2 x (dp2 tp4), 1F1B, micro-batch 2 x 16"


def test_what_is_not_priced_or_not_understood_is_reported_next_to_the_plan() -> None:
    stated = read(
        "--tensor-model-parallel-size 2 --bf16 --rampup-batch-size 16 8 300000 --my-flag --foo 3 4"
        " --mtp-num-layers 0 $EXTRA"
    )
    assert stated.tp == 2
    assert stated.notes == (
        "--rampup-batch-size is not priced: the batch grows to --global-batch-size, which alone is"
        " priced",
        "not understood, and ignored: --my-flag, --foo 3 4",
        "left out, because only a run decides them: $EXTRA (line 1)",
    )


def test_all_arguments_with_problems_are_named_at_once() -> None:
    text = (
        "torchrun --nproc_per_node 8 train.py --tensor-model-parallel-size 2 --micro-batch-sise 2"
        " --cpu-offloading --my-pipeline-split 2 --other 1"
    )
    with pytest.raises(InvalidInput) as refused:
        read(text)
    assert refused.value.field == "file"
    assert refused.value.problem.count("; ") >= 2
    for name in ("--micro-batch-sise", "--cpu-offloading", "--my-pipeline-split"):
        assert name in refused.value.problem
    assert "--other" not in refused.value.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nlr: 0.1\n", "no known format: it has neither"),
        ('{"optimizer": {"type": "AdamW"}, "gradient_clipping": 1.0}', "no known format"),
        ('{"num_layers": 12, "hidden_size": 768}', "no known format"),
        ("bf16: true\nseed: 3\n", "no known format"),
        ("per_device_train_batch_size: 4\nbf16: true\n", "a file of Hugging Face's Trainer"),
        ("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n", "Accelerate"),
        ("trainer:\n  devices: 8\nmodel:\n  micro_batch_size: 2\n", "NeMo or Lightning"),
        ('{"model_type": "llama", "hidden_size": 64}', "describe the model by --hf"),
        ("actor_rollout_ref:\n  actor: 1\n", "verl"),
        ("base_model: x\nmicro_batch_size: 1\nadapter: lora\nsequence_len: 9\n", "no known format"),
        ("[model]\nname = 'x'\n[training]\nepochs = 3\n", "no field of torchtitan"),
        ("[tool.ruff]\nline-length = 100\n", "no known format"),
        ("torchrun train.py --per_device_train_batch_size 4 --bf16 True", "Hugging Face's Trainer"),
        ("python finetune.py --micro_batch_size 4 --base_model x --lora_r 8", "without arguments"),
        ("TP=8\nbash ./launch.sh $TP\n", "no known format"),
        (
            "#!/bin/bash\nsource conf.sh --x\nbash launch.sh --tp 8\n",
            "launch.sh (line 3); give that file",
        ),
    ],
)
def test_a_file_without_the_fields_of_a_known_format_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(text)
    assert said in str(refused.value)


def test_a_default_of_the_environment_states_no_gpus_and_gives_way_to_options() -> None:
    text = (
        "NNODES=${SLURM_NNODES:-1}\nTP=${TP:-4}\n"
        "torchrun --nproc_per_node 8 --nnodes $NNODES train.py --tensor-model-parallel-size $TP"
        " --micro-batch-size ${MBS:-1} --bf16"
    )
    stated = read(text)
    assert (stated.gpus, stated.tp, stated.micro_batch) == (None, 4, 1)
    assert "taken as not set: TP, MBS" in stated.notes
    assert combine([stated, StatedPlan(tp=2)]).tp == 2
    assert combine([StatedPlan(tp=2), stated]).tp == 2
    assert read(text.replace("${SLURM_NNODES:-1}", "${NODES:-2}")).gpus is None
    assert read(text.replace("${SLURM_NNODES:-1}", "2")).gpus == 16
    one_node = read(text.replace("--nnodes $NNODES", ""))
    assert complete_plan(one_node, a_context(16)).gpus == 16


def test_a_value_that_only_a_run_decides_can_be_stated_by_an_option() -> None:
    text = (
        "if nvidia-smi | grep -q A100; then TP=2; AC=--recompute-activations; else TP=4; AC=; fi\n"
        "torchrun train.py --tensor-model-parallel-size $TP --micro-batch-size $1 $AC --bf16"
    )
    with pytest.raises(InvalidInput) as refused:
        complete(text)
    assert str(refused.value) == (
        "--tensor-model-parallel-size: is $TP (line 1), which only a run decides;"
        " --micro-batch-size is $1 (line 2), which only a run decides; --recompute-activations is"
        " perhaps in $AC (line 1), which only a run decides; write the value into the file (`tessera"
        " estimate` also takes --tp, --micro-batch, --recompute)"
    )
    given = StatedPlan(tp=4, micro_batch=2, recomputation=Recomputation.NONE)
    whole = complete_plan(combine([read(text), given]), a_context())
    assert str(whole) == "dp4 tp4, micro-batch 2 x 8"


def test_what_a_value_may_change_is_unknown_too() -> None:
    text = "if x; then A={}; fi\ntorchrun train.py --tensor-model-parallel-size {} --bf16 $A"
    for argument, tp, fields in (
        ("--fp8-hybrid", "2", {"precision"}),
        ("--num-experts=8", "2", {"experts", "expert_tp"}),
        ("--num-experts=8", "1", {"experts"}),
        ("--tensor-model-parallel-size=4", "2", {"tp"}),
        ("--micro-$X=4", "2", {"micro_batch"}),
        ("'--use-megatron-fsdp --num-layers=8'", "1", {"zero", "blocks"}),
    ):
        assert {*read(text.format(argument, tp)).unknown} == fields
    with pytest.raises(InvalidInput, match="--cpu-offloading-num-layers"):
        read(text.format("--cpu-offloading-num-layers=1", "2"))


def test_training_that_differs_between_launches_is_refused() -> None:
    text = "\n".join(f"torchrun train.py --tensor-model-parallel-size {n} --bf16" for n in (1, 2))
    with pytest.raises(
        InvalidInput, match="different --tensor-model-parallel-size \\(lines 1 and 2"
    ):
        read(text)
    assert read(text.replace("size 2", "size 1 --seed 2")).tp == 1


def test_a_configuration_of_deepspeed_is_not_read_with_a_script() -> None:
    command = (
        "deepspeed --num_nodes 2 --num_gpus 8 train.py --tensor-model-parallel-size 2 --deepspeed"
        " --deepspeed_config ds.json --micro-batch-size 2 --bf16"
    )
    assert (read(command).gpus, read(command).usual.get("offload")) == (16, None)
    assert read(command).unknown == {"zero": "is in 'ds.json', a file that is not read here"}
    assert read(f"{command} --zero-stage 1").zero is ZeroStage.OPTIMIZER
    uncertain = read(f"if x; then A=--num_gpus=4; fi; {command.replace(' train', ' $A train')}")
    assert uncertain.unknown["gpus"] == "is perhaps in $A (line 1)"


def test_a_torchtitan_file_becomes_a_plan() -> None:
    plan = complete(TITAN, batch=16)
    assert str(plan) == (
        "2 x (dp4 tp2 sp), interleaved 1F1B with 2 chunks, ZeRO-2, full recomputation, fp8,"
        " micro-batch 1 x 4"
    )
    # The embedding and the head count as a block each: 18 / 4 parts, the first two have one more.
    assert [s.end - s.start for s in plan.stages] == [5, 5, 4, 4]


def test_a_deepspeed_file_becomes_a_plan() -> None:
    plan = complete(speed())
    assert str(plan) == "dp16, ZeRO-3, optimizer offload, micro-batch 2 x 2"


def test_a_deepspeed_configuration_may_be_yaml() -> None:
    text = "train_batch_size: auto\ntrain_micro_batch_size_per_gpu: 2\nzero_optimization:\n  stage: 2\n"
    assert recognise_format("file", text) is PlanFormat.DEEPSPEED
    assert complete(text).zero is ZeroStage.GRADIENTS


def test_a_plan_in_our_json_is_read_as_it_is() -> None:
    plan = a_plan(zero=ZeroStage.OPTIMIZER)
    assert read_stated_plan("file", plan.to_json()) == plan
    assert read_stated_plan("file", json.dumps(json.loads(plan.to_json()), indent=2)) == plan


degrees = st.sampled_from([1, 2, 4])


@given(
    tp=degrees,
    pp=degrees,
    cp=degrees,
    dp=degrees,
    chunks=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 4),
    turns=st.integers(1, 4),
    sp=st.booleans(),
    zero=st.sampled_from([ZeroStage.NONE, ZeroStage.OPTIMIZER, ZeroStage.PARAMETERS]),
    recomputation=st.sampled_from(Recomputation),
    precision=st.sampled_from([Precision.BF16, Precision.F16, Precision.FP8]),
)
def test_a_uniform_plan_written_as_megatrons_arguments_is_read_back(**drawn: Any) -> None:
    plan = uniform_plan(**drawn)
    text = " ".join(megatron_arguments(plan))
    context = a_context(plan.gpus, plan.global_batch)
    assert complete_plan(read(text), context) == replace(
        plan, shape=(plan.shape[0],) * len(plan.shape)
    )


def uniform_plan(**drawn: Any) -> ExecutionPlan:
    """Return a plan of equal parts of 16 blocks."""
    pp = drawn["pp"]
    chunks = drawn["chunks"] if pp > 1 else 1
    each = 16 // (pp * chunks)
    ends = [1 + each * (k + 1) for k in range(pp * chunks - 1)] + [18]
    stage = {name: drawn[name] for name in ("dp", "tp", "cp")} | {
        "sp": drawn["sp"] and drawn["tp"] > 1
    }
    plan = a_plan(
        tuple(ends),
        stage,
        micro_batch=drawn["micro"] * drawn["dp"],
        accumulation=drawn["turns"] * pp,
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
        chunks=chunks,
        **{name: drawn[name] for name in ("zero", "recomputation", "precision")},
    )
    shape = a_context(plan.gpus).shape
    return replace(plan, shape=(shape.gpus_per_node,) * shape.nodes)


def megatron_arguments(plan: ExecutionPlan) -> list[str]:
    stage = plan.stages[0]
    texts = [
        f"--tensor-model-parallel-size {stage.tp}",
        f"--pipeline-model-parallel-size {plan.pipeline_degree}",
        f"--context-parallel-size {stage.cp}",
        f"--micro-batch-size {plan.micro_batch // stage.dp}",
        f"--global-batch-size {plan.global_batch}",
        "--num-layers 16",
        {"bf16": "--bf16", "f16": "--fp16", "fp8": "--bf16 --fp8-format hybrid"}[plan.precision],
        {0: "", 1: "--use-distributed-optimizer", 3: "--use-torch-fsdp2"}[plan.zero],
        {
            "none": "",
            "selective": "--recompute-granularity selective --recompute-modules core_attn",
            "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        }[plan.recomputation],
        "--sequence-parallel" if stage.sp else "",
        f"--num-virtual-stages-per-pipeline-rank {plan.chunks}" if plan.chunks > 1 else "",
    ]
    return [text for text in texts if text]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero", 2),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "zero", 2),
        ("--optimizer-cpu-offload --bf16", "offload", Offload.OPTIMIZER),
        ("--recompute-granularity full", "recomputation", Recomputation.FULL),
        (
            "--tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4",
            "expert_tp",
            2,
        ),
        ("--fp8-hybrid --bf16", "precision", Precision.FP8),
        ("--nproc-per-node=8 --nnodes=4 --bf16", "gpus", 32),
        ("--nproc-per-node gpu --nnodes 4 --bf16", "gpus", None),
        (speed(zero_optimization={"stage": 2, "cpu_offload": True}), "offload", Offload.OPTIMIZER),
        (
            speed(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
            "offload",
            Offload.PARAMETERS,
        ),
        (speed(bf16={"enabled": "auto"}), "precision", None),
        (speed(tensor_parallel={"autotp_size": 4}), "tp", 4),
        (speed(pipeline={"stages": 4, "activation_checkpoint_interval": 1}), "pp", 4),
        (speed(amp={"enabled": False}), "zero", 3),
        (titan("data_parallel_shard_degree = -1", "data_parallel_shard_degree = 1"), "zero", 0),
        (titan('schedule = "Interleaved1F1B"', 'schedule = "GPipe"'), "schedule", Schedule.GPIPE),
        (titan("pipeline_parallel_degree = 2", ""), "zero", 3),
        (titan('mode = "full"', 'mode = "selective"'), "recomputation", Recomputation.SELECTIVE),
        (titan('converters = ["float8"]', ""), "precision", None),
        (titan('converters = ["float8"]', 'converters = "float8"'), "precision", Precision.FP8),
    ],
)
def test_a_field_is_read_as_its_runtime_means_it(text: str, field: str, value: object) -> None:
    assert getattr(read(text), field) == value


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        (
            "--tensor-model-parallel-siz 4 --bf16",
            "--tensor-model-parallel-siz",
            "not an argument of Meg",
        ),
        (
            "--tensor-model-parallel-size two",
            "--tensor-model-parallel-size",
            "a whole number from 1",
        ),
        (
            "--tensor-model-parallel-size $TP --bf16",
            "--tensor-model-parallel-size",
            "takes --tp",
        ),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size", "lacks its value"),
        ("--bf16 --fp16", "--fp16", "cannot be combined with --bf16"),
        (
            "--pipeline-model-parallel-layout E|t*3|L",
            "--pipeline-model-parallel-layout",
            "is not read",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --num-layers 9",
            "--recompute-num-layers",
            "every layer on its own",
        ),
        (
            "--recompute-granularity selective --recompute-modules moe_act",
            "--recompute-modules",
            "core_attn",
        ),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers", "host's memory"),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "--optimizer-offload-fraction",
            "1.0",
        ),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances",
            "must be 1",
        ),
        (
            "bf16: true\ntensor_model_parallel_size: {a: 1}",
            "--tensor-model-parallel-size",
            "not a mapping",
        ),
        (speed(zero_optimisation={}), "zero_optimisation", "not a field of DeepSpeed"),
        (
            speed(zero_optimization={"stages": 1}),
            "zero_optimization.stages",
            "not a field that is known",
        ),
        (speed(zero_optimization={"stage": 4}), "zero_optimization.stage", "from 0 to 3"),
        (
            speed(zero_optimization={"stage": 3, "zero_quantized_weights": True}),
            "zero_optimization.zero_quantized_weights",
            "ZeRO",
        ),
        (
            speed(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
            "zero_optimization.offload_param.device",
            "use cpu",
        ),
        (speed(fp16={"enabled": True}), "fp16.enabled", "contradicts bf16.enabled"),
        (speed(elasticity={"enabled": True}), "elasticity", "changes the batch"),
        (speed(optimizer={"type": "OneBitAdam"}), "optimizer.type", "compressed gradients"),
        (speed(train_batch_size="many"), "train_batch_size", "a whole number"),
        (
            speed(activation_checkpointing={"cpu_checkpointing": True}),
            "activation_checkpointing.cpu_checkpointing",
            "set it to false",
        ),
        (titan("[profiling]", "[profilings]"), "profilings", "not a section of torchtitan"),
        (
            titan("tensor_parallel_degree = 2", "tensor_parallel = 2"),
            "parallelism.tensor_parallel",
            "not a field of torchtitan",
        ),
        (
            titan('"Interleaved1F1B"', '"ZBVZeroBubble"'),
            "parallelism.pipeline_parallel_schedule",
            "the schedules of plans are",
        ),
        (
            titan("replicate_degree = 1", "replicate_degree = 2"),
            "parallelism.data_parallel_replicate_degree",
            "HSDP",
        ),
        (
            titan('mode = "full"', 'mode = "selective"\nselective_ac_option = "2"'),
            "activation_checkpoint.selective_ac_option",
            "every layer alike",
        ),
        (
            titan("context_parallel_degree = 1", 'pipeline_parallel_split_points = ["layers.4"]'),
            "parallelism.pipeline_parallel_split_points",
            "is not read",
        ),
        ("tensor: 4\n", "file", "in no known format"),
        ('{"zero_optimisation": {"stage": 1}}', "file", "did you mean 'zero_optimization'"),
        ("tensor_model_paralel_size: 2\n", "file", "did you mean '--tensor-model-parallel-size'"),
        ("just some words", "file", "in no known format"),
        ("", "file", "in no known format"),
    ],
)
def test_a_field_that_a_plan_cannot_have_is_refused_by_its_name(
    text: str, field: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        complete_plan(read(text), a_context())
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("'" + "--a " * 100, "a quotation has no end"),
        ("--bf16 " * 20_000, "at most 65,536 bytes"),
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 200 + "--bf16 $A", "1,000,000 characters"),
        ("A=(--bf16)\n" + "A=( ${A[@]} ${A[@]} )\n" * 200, "1,000,000 characters"),
        ("[training]\n" + "x = " + "[" * 60_000, "is not valid TOML"),
        ("[training]\n" + ".".join("a" * 5000) + " = 1", "levels deep"),
        ("[training]\nseq_len = " + "9" * 5000, "is not valid TOML"),
        ("[training]\nsteps = nan\n", "finite number"),
        ("[training\n--bf16", "has no arguments of Megatron-LM"),
        ("--lr 1e-4\ntensor-model-parallel-size 8", "lacks its dashes"),
        ("[training]\nseq_len = 1\nseq_len = 2", "is not valid TOML"),
        ('{"zero_optimization": ' * 100 + "1" + "}" * 100, "levels deep"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "occurs twice"),
        ("a: &x 1\nb: *x", "anchor"),
        (
            '{"stages": [{"start": 0, "end": 1, "pp": 2}], "micro_batch": 1}',
            "not a field of a plan",
        ),
        ("--bf16 \0", "a control character"),
        ("( " * 10_000 + "--bf16", "is missing"),
        ("A=" + "${A:-" * 10_000 + " --bf16", "levels of nesting"),
        ("A=" + "$((" * 10_000 + " --bf16", "levels of nesting"),
        ("A=" + "${X=1}" * 8_000 + " --bf16", "1,000,000 characters"),
        ("f() { f; f; }; f --bf16", "starts no training"),
        ("$[" * 30_000 + " --bf16", "starts no training"),
        ("a\n" * 30_000 + "--bf16", "starts no training"),
        ("torchrun a.py --moe-layer-freq ([0]*3) --bf16", "'\\(' is not quoted"),
        ("cat <<A\nfoo \\\nA\nTP=1\nA\n--bf16", "joins lines"),
        ("cat <<A\n$((TP=1))\nA\n--bf16", "here-document sets a variable"),
        ("cat 2> $((TP=1)) --bf16", "redirection sets a variable"),
        ("done\n--bf16", "'done' is not expected here"),
        (
            "if x; then\n"
            + "".join(f"A{i}=$A{i + 1}\n" for i in range(3000))
            + "fi; torchrun a.py --bf16 "
            + " ".join(f"$A{i}" for i in range(1500)),
            "1,000,000 characters",
        ),
    ],
)
def test_hostile_texts_are_refused_quickly(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_stated_plan("file", text)


@given(st.text(alphabet="-=abf16$(){}[]'\"#\\\n ;|&.", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_stated_plan("file", text)
    except InvalidInput as refused:
        assert refused.problem  # noqa: PT017 - either outcome is right


MEGATRON = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 --bf16"
)


@pytest.mark.parametrize(
    ("text", "gpus", "batch", "field", "said"),
    [
        (
            f"{MEGATRON} --global-batch-size 32",
            16,
            64,
            "--global-batch-size",
            "is 32, but the batch",
        ),
        (MEGATRON, 16, 60, "--micro-batch-size", "a multiple of 8, but is 60"),
        (MEGATRON, 18, 64, "--tensor-model-parallel-size", "does not fit 18 GPUs"),
        (f"{MEGATRON} --num-layers 24", 16, 64, "--num-layers", "the model decoder has 16 blocks"),
        (f"{MEGATRON} --num-attention-heads 32", 16, 64, "--num-attention-heads", "24 heads"),
        (
            f"{MEGATRON} --tensor-model-parallel-size 16",
            32,
            64,
            "--tensor-model-parallel-size",
            "must divide the 24 attention heads",
        ),
        (
            f"{MEGATRON} --pipeline-model-parallel-size 3",
            12,
            64,
            "--pipeline-model-parallel-size",
            "which must be equal",
        ),
        (
            f"{MEGATRON} --num-layers-per-virtual-pipeline-stage 3",
            16,
            64,
            "--num-layers-per-virtual-pipeline-stage",
            "must divide the model's 16 blocks",
        ),
        (
            f"{MEGATRON} --decoder-first-pipeline-num-layers 20",
            16,
            64,
            "--decoder-first-pipeline-num-layers",
            "leaves -4 of 16 blocks",
        ),
        (
            "--bf16 --num-virtual-stages-per-pipeline-rank 2",
            16,
            64,
            "--num-virtual-stages-per-pipeline-rank",
            "need pp of at least 2",
        ),
        (
            f"{MEGATRON} --expert-model-parallel-size 4",
            16,
            64,
            "--expert-model-parallel-size",
            "no experts",
        ),
        (
            "--nproc-per-node 8 --nnodes 4 --bf16",
            16,
            64,
            "--nproc-per-node x --nnodes",
            "states 32 GPUs",
        ),
        (
            speed(gradient_accumulation_steps=4),
            16,
            64,
            "gradient_accumulation_steps",
            "are 128 samples",
        ),
        (
            speed(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}}),
            16,
            64,
            "zero_optimization.offload_param.device",
            "needs ZeRO stage 3",
        ),
        (TITAN, 16, 32, "training.local_batch_size", "the batch is 32"),
        (
            titan("context_parallel_degree = 1", "pipeline_parallel_layers_per_stage = 6"),
            16,
            16,
            "parallelism.pipeline_parallel_layers_per_stage",
            "3 parts of 16 blocks",
        ),
    ],
)
def test_contradictions_are_refused_by_the_files_own_name(
    text: str, gpus: int, batch: int, field: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        complete(text, gpus, batch)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ("", [9, 9]),
        ("--decoder-first-pipeline-num-layers 6", [7, 11]),
        ("--decoder-last-pipeline-num-layers 6", [11, 7]),
        ("--num-virtual-stages-per-pipeline-rank 2", [5, 4, 4, 5]),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4",
            [3, 6, 2, 7],
        ),
    ],
)
def test_blocks_are_divided_as_megatron_does_it(more: str, sizes: list[int]) -> None:
    plan = complete(f"{MEGATRON} {more}")
    assert [stage.end - stage.start for stage in plan.stages] == sizes


def test_the_embedding_and_the_head_may_count_as_blocks() -> None:
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    plan = complete(f"--pipeline-model-parallel-size 3 --micro-batch-size 2 {both}", 12)
    assert [stage.end - stage.start for stage in plan.stages] == [6, 6, 6]


def test_experts_are_divided_by_both_of_megatrons_degrees() -> None:
    text = (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --num-experts 8"
        " --micro-batch-size 2 --bf16"
    )
    assert complete(text, graph=a_mixture()).stages[0].ep == 8
    assert complete(f"{text} --expert-tensor-parallel-size 1", graph=a_mixture()).stages[0].ep == 4
    with pytest.raises(InvalidInput, match="must divide the 8 experts"):
        complete(text.replace("parallel-size 4", "parallel-size 8"), graph=a_mixture())


def test_what_is_not_stated_is_as_in_the_training() -> None:
    context = a_context()
    plan = complete_plan(StatedPlan(tp=2), context)
    assert (plan.stages[0].dp, plan.micro_batch, plan.accumulation) == (8, 8, 8)
    checkpointed = replace(context, training=replace(context.training, checkpointing=True))
    assert complete_plan(StatedPlan(tp=2), checkpointed).recomputation is Recomputation.FULL
    # A Megatron-LM file without the argument means that nothing is recomputed.
    assert complete_plan(read(MEGATRON), checkpointed).recomputation is Recomputation.NONE


def test_statements_are_joined_and_may_not_contradict_each_other() -> None:
    names: Mapping[str, str] = {"tp": "--tp", "pp": "--pp"}
    joined = combine([read("--tensor-model-parallel-size 2 --bf16"), StatedPlan(pp=2, names=names)])
    assert (joined.tp, joined.pp, joined.name("tp")) == (2, 2, "--tensor-model-parallel-size")
    with pytest.raises(
        InvalidInput, match="states 4, but --tensor-model-parallel-size states 2"
    ) as no:
        combine([joined, StatedPlan(tp=4, names=names)])
    assert no.value.field == "--tp"


def test_the_format_can_be_stated() -> None:
    with pytest.raises(InvalidInput, match="stages"):
        read_stated_plan("file", "{}", PlanFormat.JSON)
    with pytest.raises(InvalidInput, match="has no field of DeepSpeed that states a plan"):
        read_stated_plan("file", "{}", PlanFormat.DEEPSPEED)
    stated = read_stated_plan("file", '{"gradient_accumulation_steps": 4}', PlanFormat.DEEPSPEED)
    assert isinstance(stated, StatedPlan)
    assert stated.accumulation == 4


def test_the_plan_in_the_documents_can_be_stated() -> None:
    page = (Path(__file__).parents[3] / "docs" / "execution-plans.md").read_text(encoding="utf-8")
    text = page[page.index("    {\n") : page.index("    }\n") + 6]
    plan = read_stated_plan("page", text)
    assert isinstance(plan, ExecutionPlan)
    assert (plan.gpus, plan.global_batch, plan.model) == (16, 256, "bert/6.7B")


@given(
    tp=degrees,
    pp=degrees,
    micro=st.sampled_from([1, 3]),
    recomputation=st.sampled_from(Recomputation),
    zero=st.sampled_from(ZeroStage),
)
def test_ours_is_never_slower_than_a_stated_plan_that_the_search_considers(**drawn: Any) -> None:
    graph = a_decoder(layers=14)  # with both ends as many layers as the search has
    setting = a_setting(16, 48, graph)
    stated = StatedPlan(
        tp=drawn["tp"],
        pp=drawn["pp"],
        micro_batch=drawn["micro"],
        recomputation=drawn["recomputation"],
        zero=drawn["zero"],
        precision=Precision.BF16,
    )
    compared = compare_plan(setting, complete_plan(stated, a_context(16, 48, graph)))
    assert not compared.stated_wins


def test_ours_has_all_that_differs_named() -> None:
    setting = a_setting(8, 64)
    stated = StatedPlan(tp=2, pp=2, chunks=2, sp=True, micro_batch=2, precision=Precision.BF16)
    compared = compare_plan(setting, complete_plan(stated, a_context(8, 64)))
    assert compared.best is not None
    texts = describe_differences(compared.best.plan, compared.stated.plan)
    assert "no chunks instead of 2 chunks for each stage" in texts
