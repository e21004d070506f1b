"""Readers of stated plans, and the completion of the fields that they leave open."""

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
from tessera.estimator.stated.formats import read_stated_plan
from tessera.estimator.stated.statement import StatedPlan, combine
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tests.support.stated import a_context, a_decoder, a_mixture, a_plan, a_setting

COMMAND = r"""
# Don't run this on a login node; it's long.
torchrun --nproc_per_node 8 --nnodes 2 --master_addr node-0 pretrain_gpt.py \
    --num-layers 16 --hidden-size 2048 --num-attention-heads 24 --seq-length 2048 \
    --max-position-embeddings 2048 --attention-backend auto \
    --micro-batch-size 2 --global-batch-size 64 --lr 6.0e-5 --min-lr -1 --bf16 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce \
    --data-path "a folder/text" --recompute-activations
"""


def read(text: str) -> StatedPlan:
    """Return what a file states that is not a whole plan."""
    stated = read_stated_plan("file", text)
    assert isinstance(stated, StatedPlan)
    return stated


def complete(
    text: str, gpus: int = 16, batch: int = 64, graph: Graph | None = None
) -> ExecutionPlan:
    return complete_plan(read(text), a_context(gpus, batch, graph))


def test_a_command_of_megatron_becomes_a_plan() -> None:
    plan = complete(COMMAND)
    assert str(plan) == (
        "2 x (dp2 tp4 sp), 1F1B, ZeRO-1, selective recomputation, micro-batch 2 x 16"
    )
    assert [stage.end for stage in plan.stages] == [9, 18]
    assert plan.shape == (8, 8)


@pytest.mark.parametrize(
    "text",
    [
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 --bf16",
        "--tensor-model-parallel-size=4\n--pipeline-model-parallel-size=2\n--micro-batch-size=2\n--bf16",
        "--tensor-model-parallel-size\n4\n--pipeline-model-parallel-size\n2\n--micro-batch-size\n2\n--bf16",
        "python train.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
        " --micro-batch-size 2 --bf16",
        "--bf16 --tensor-model-parallel-size 1 --tensor-model-parallel-size 4 --micro-batch-size 2"
        " --pipeline-model-parallel-size 2 # the last one counts",
    ],
)
def test_arguments_may_be_written_in_many_ways(text: str) -> None:
    assert str(complete(text)) == "2 x (dp2 tp4), 1F1B, micro-batch 2 x 16"


def test_what_is_not_priced_or_not_understood_is_reported_next_to_the_plan() -> None:
    stated = read(
        "--tensor-model-parallel-size 2 --bf16 --rampup-batch-size 16 8 300000 --my-flag --foo 3 4"
        " --mtp-num-layers 0"
    )
    assert stated.tp == 2
    assert stated.notes == (
        "--rampup-batch-size is not priced: the batch grows to --global-batch-size, which alone is"
        " priced",
        "not understood, and ignored: --my-flag, --foo 3 4",
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
        ("seed: 1\nlr: 0.1\n", "neither Tessera's JSON"),
        ("[training]\nsteps = 3\n", "neither Tessera's JSON"),
        ("torchrun train.py --per_device_train_batch_size 4 --bf16 True", "options such as --tp"),
        ("python finetune.py --micro_batch_size 4 --base_model x --lora_r 8", "neither"),
        ("", "neither"),
        ('{"train_batch_size": 64}', "not a field of a plan"),
        ("TP=8\nbash ./launch.sh $TP\n", "'$TP', whose value only a shell knows"),
        ("torchrun a.py --bf16 --tensor-model-parallel-size `nproc`", "only a shell knows"),
        ("torchrun a.py --tensor-model-parallel-size 2 --bf16 2>&1 | tee log", "has '>&'"),
        ("cd x && torchrun a.py --tensor-model-parallel-size 2 --bf16", "has '&&'"),
    ],
)
def test_what_is_no_plan_and_no_single_command_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(text)
    assert said in str(refused.value)


def test_a_configuration_of_deepspeed_is_not_read_with_a_command() -> None:
    command = (
        "deepspeed train.py --tensor-model-parallel-size 2 --deepspeed --deepspeed_config ds.json"
        " --micro-batch-size 2 --bf16"
    )
    with pytest.raises(InvalidInput, match="--deepspeed-config: names a file that is not read"):
        read(command)
    stated = read(f"{command} --zero-stage 1")
    assert stated.zero is ZeroStage.OPTIMIZER
    assert "its settings are not in the plan" in stated.notes[-1]


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
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size", "lacks its value"),
        ("--bf16 --fp16", "--fp16", "cannot be combined with --bf16"),
        (
            "--pipeline-model-parallel-layout 'E|t*3|L'",
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
        ("'" + "--a " * 100, "No closing quotation"),
        ("--bf16 " * 20_000, "at most 65,536 bytes"),
        ("--lr 1e-4\ntensor-model-parallel-size 8", "lacks its dashes"),
        ('{"zero": ' * 100 + "1" + "}" * 100, "levels deep"),
        (
            '{"stages": [{"start": 0, "end": 1, "pp": 2}], "micro_batch": 1}',
            "not a field of a plan",
        ),
        ("a\n" * 30_000, "neither"),
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
