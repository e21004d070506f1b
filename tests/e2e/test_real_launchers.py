"""Launchers that users have, with the arguments that agents give them; skipped where they are missing.

No part of Tessera needs them. Megatron-LM's parser is in no package, so its arguments are checked
against the configurations of ``megatron-core``, and its own division of layers.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.job.blocks import block_counts
from tessera.formulation.job.execution_plan import (
    ExecutionPlan,
    Offload,
    PlanStage,
    Precision,
    Recomputation,
    Schedule,
    ZeroStage,
)
from tessera.formulation.job.runtimes import MEGATRON
from tessera.service.agent.keeper.spec import LaunchArguments
from tessera.service.agent.runtimes.arguments.deepspeed import (
    CONFIGURATION,
    deepspeed_arguments,
    deepspeed_configuration,
)
from tessera.service.agent.runtimes.arguments.layout import RankLayout
from tessera.service.agent.runtimes.arguments.megatron import megatron_arguments
from tessera.service.agent.runtimes.arguments.torchrun import torchrun_arguments
from tessera.service.agent.runtimes.arguments.words import read_flags
from tests.support.patience import PATIENCE_S
from tests.support.program_runs import free_port
from tests.support.programs import SUCCESS, ProgramBench, end_of, observed
from tests.support.stated import a_plan
from tests.support.torch_python import find_torch_python

SCRIPT = "train.py"
NOTE_PLACE = (
    "/bin/sh",
    "-c",
    'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_PORT $CUDA_VISIBLE_DEVICES" > "$0/$RANK"',
)
"""A program that notes a rank's place in the folder that follows, and does not start the script."""


def ask(python: str, code: str, value: object) -> Any:
    """Return the JSON that a program prints last, after it has read ``value`` as JSON."""
    done = subprocess.run(
        [python, "-c", code],
        input=json.dumps(value),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def layouts(python: str, counts: tuple[int, ...], program: Sequence[str] = ()) -> list[RankLayout]:
    """Return the layouts of a gang's nodes, all of them on this host."""
    first = RankLayout(
        node_rank=0,
        member_gpus=counts,
        address="127.0.0.1",
        port=str(free_port()),
        python=python,
        rank_program=tuple(program),
    )
    return [replace(first, node_rank=rank) for rank in range(len(counts))]


def run_together(nodes: Sequence[LaunchArguments], folder: Path, **environment: str) -> None:
    """Start the launchers of all nodes, and wait for their success."""
    base = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    processes = [
        subprocess.Popen(
            node.argv,
            env={**base, **node.environment},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in nodes
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()


def noted_places(folder: Path, ranks: int) -> list[list[str]]:
    return [(folder / str(rank)).read_text().split() for rank in range(ranks)]


PARSE_TORCHRUN = """
import json, sys
from torch.distributed.run import config_from_args, get_args_parser
parsed = get_args_parser().parse_args(json.load(sys.stdin))
config, program, words = config_from_args(parsed)
print(json.dumps([vars(parsed), program, words, config.max_nodes, config.nproc_per_node]))
"""


def test_torchrun_reads_its_arguments_as_they_are_meant() -> None:
    python = find_torch_python()
    layout = layouts(python, (4, 4), ("/opt/keeper", "--log-dir", "x"))[1]
    argv = torchrun_arguments(layout, ("-m", "lab.train", "--nnodes", "9", "a$$b"), None, 8).argv
    parsed, program, words, nodes, processes = ask(python, PARSE_TORCHRUN, argv[3:])
    assert (nodes, processes, parsed["node_rank"], parsed["max_restarts"]) == (2, 4, 1, 0)
    assert (parsed["master_addr"], parsed["master_port"]) == ("127.0.0.1", int(layout.port))
    assert parsed["rdzv_backend"] == "static"
    assert program == "/opt/keeper"
    rank = ["--log-dir", "x", python, "-u", "-m", "lab.train", "--nnodes", "9", "a$$$$b"]
    assert words == rank  # torchrun turns $$ into $


def test_torchrun_counts_the_ranks_of_nodes_with_unequal_gpus(tmp_path: Path) -> None:
    nodes = layouts(find_torch_python(), (1, 3, 2), (*NOTE_PLACE, str(tmp_path)))
    arguments = [torchrun_arguments(node, (SCRIPT,), None, 8) for node in nodes]
    run_together(arguments, tmp_path, TORCH_ELASTIC_WORKER_IDENTICAL="1")
    places = noted_places(tmp_path, 6)
    assert [place[:3] for place in places] == [
        [str(rank), str(local), "6"] for rank, local in enumerate((0, 0, 1, 2, 0, 1))
    ]
    assert {place[3] for place in places} == {str(nodes[0].port)}


def test_deepspeed_gives_the_ranks_of_unequal_nodes_the_gpus_of_the_gang(tmp_path: Path) -> None:
    python = find_torch_python("deepspeed")
    program = (*NOTE_PLACE, str(tmp_path))
    names = (("5",), ("7", "GPU-2"))
    nodes = [
        replace(node, devices=devices)
        for node, devices in zip(layouts(python, (1, 2), program), names, strict=True)
    ]
    run_together([deepspeed_arguments(node, (SCRIPT,), None, 8) for node in nodes], tmp_path)
    places = noted_places(tmp_path, 3)
    assert [(place[0], place[2], place[4]) for place in places] == [
        ("0", "3", "5"),
        ("1", "3", "7,GPU-2"),
        ("2", "3", "7,GPU-2"),
    ]
    assert sorted(place[1] for place in places[1:]) == ["0", "1"]


READ_DEEPSPEED = """
import json, sys, types
import deepspeed.runtime.config as config
config.dist.get_rank = lambda: 0
world = types.SimpleNamespace(get_data_parallel_world_size=lambda: 4)
answers = []
for settings in json.load(sys.stdin):
    read = config.DeepSpeedConfig(settings, mpu=world)
    zero = read.zero_config
    answers.append({
        "batches": [read.train_batch_size, read.train_micro_batch_size_per_gpu,
                    read.gradient_accumulation_steps],
        "stage": int(zero.stage),
        "offloads": [str(getattr(part.device, "value", part.device)) if part else "none"
                     for part in (zero.offload_optimizer, zero.offload_param)],
        "precisions": [read.bfloat16_config.enabled, read.float16_config.enabled],
        "recomputed": read.activation_checkpointing_config.number_checkpoints,
    })
print(json.dumps(answers))
"""


def test_deepspeed_reads_its_configuration_as_it_is_meant() -> None:
    python = find_torch_python("deepspeed")
    usual: dict[str, Any] = {"micro_batch": 16, "accumulation": 2}
    usual |= {"recomputation": Recomputation.FULL}
    plans = [
        a_plan((18,), {"dp": 4}, zero=zero, precision=precision, offload=offload, **usual)
        for zero, precision, offload in (
            (ZeroStage.NONE, Precision.BF16, Offload.NONE),
            (ZeroStage.OPTIMIZER, Precision.F16, Offload.NONE),
            (ZeroStage.GRADIENTS, Precision.F32, Offload.OPTIMIZER),
            (ZeroStage.PARAMETERS, Precision.BF16, Offload.PARAMETERS),
        )
    ]
    own = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    answers = ask(python, READ_DEEPSPEED, [deepspeed_configuration(p, 32, own) for p in plans])
    for plan, answer in zip(plans, answers, strict=True):
        place = {Offload.NONE: ["none", "none"], Offload.OPTIMIZER: ["cpu", "none"]}
        assert answer == {
            "batches": [32, 4, 2],
            "stage": plan.zero.value,
            "offloads": place.get(plan.offload, ["cpu", "cpu"]),
            "precisions": [plan.precision is Precision.BF16, plan.precision is Precision.F16],
            "recomputed": 18,
        }


TRAIN_DEEPSPEED = """
import argparse, json, os, sys
import deepspeed, torch
torch.set_num_threads(1)
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--out")
options = parser.parse_args()
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(
    args=options, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-2)
)
losses = []
inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 8)
for iteration in range(20):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = ((engine(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        engine.backward(loss)
        engine.step()
    losses.append(loss.item())
facts = [engine.zero_optimization_stage(), engine.train_batch_size(), engine.global_steps]
with open(f"{options.out}/{os.environ['RANK']}.json", "w") as file:
    json.dump([facts, losses], file)
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of its operators for CPUs abort an ordinary end
"""


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder in which DeepSpeed compiles its operators once, without stale locks."""
    return str(tmp_path_factory.mktemp("operators"))


@pytest.mark.night
@pytest.mark.parametrize("zero", [ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS])
def test_deepspeed_really_trains_under_a_plan(
    zero: ZeroStage, tmp_path: Path, operators: str
) -> None:
    python = find_torch_python("deepspeed", "ninja")
    script = tmp_path / "train.py"
    script.write_text(TRAIN_DEEPSPEED)
    (layout,) = layouts(python, (2,))
    plan = ExecutionPlan(
        stages=(PlanStage(start=0, end=3, dp=2),),
        micro_batch=8,
        accumulation=2,
        zero=zero,
        precision=Precision.F32,
    )
    command = (str(script), "--out", str(tmp_path))
    arguments = deepspeed_arguments(layout, command, plan, 16)
    (tmp_path / CONFIGURATION).write_text(arguments.files[CONFIGURATION])
    path = f"{Path(python).parent}:/usr/bin:/bin"
    run_together(
        [arguments.place_files(str(tmp_path))],
        tmp_path,
        PATH=path,
        DS_ACCELERATOR="cpu",
        TORCH_EXTENSIONS_DIR=operators,
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for facts, losses in ranks:
        assert facts == [zero.value, 16, 20]
        assert losses[-1] < losses[0] / 2


DIVIDE_MEGATRON = """
import json, sys
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches, init_num_microbatches_calculator, unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, optimizer_config
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
import torch
from megatron.core import parallel_state
optimizer_config.is_te_min_version = lambda _version: True  # Transformer Engine needs a GPU
answers = []
for case in json.load(sys.stdin):
    model = TransformerConfig(**case["model"], pipeline_dtype=torch.float)  # Megatron-LM adds it
    optimizer = OptimizerConfig(**case["optimizer"])
    degree, chunks = model.pipeline_model_parallel_size, case["chunks"]
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    counts = []
    for chunk in range(chunks):
        for rank in range(degree):
            stage = chunk if chunks > 1 else None
            parallel_state.set_pipeline_model_parallel_rank(rank)
            parallel_state.set_pipeline_model_parallel_world_size(degree)
            counts.append(get_num_layers_to_build(model, vp_stage=stage, pp_rank=rank))
    init_num_microbatches_calculator(0, None, case["batch"], case["micro"], case["dp"], False)
    answers.append([counts, get_num_microbatches(), optimizer.use_distributed_optimizer])
    unset_num_microbatches_calculator()
print(json.dumps(answers))
"""

FIELDS = {
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--fp8-format": "fp8",
}
"""Arguments whose fields in megatron-core's configurations have other names."""

OF_OPTIMIZER = (
    "--use-distributed-optimizer",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--use-precision-aware-optimizer",
)


def as_configurations(plan: ExecutionPlan, blocks: int) -> dict[str, Any]:
    """Return megatron-core's configurations of a plan's arguments, as Megatron-LM would make them."""
    layout = RankLayout(
        node_rank=0, member_gpus=(plan.gpus,), address="x", port="1", python="python"
    )
    arguments = megatron_arguments(layout, (SCRIPT,), plan, plan.global_batch)
    flags = read_flags(arguments.argv[arguments.argv.index(SCRIPT) :])
    micro, batch = (int(flags.pop(f"--{name}-batch-size")) for name in ("micro", "global"))
    fields = {
        FIELDS.get(name, name[2:].replace("-", "_")): plain_value(value)
        for name, value in flags.items()
        if name not in OF_OPTIMIZER
    }
    model = {"num_layers": blocks, "hidden_size": 64, "num_attention_heads": 8, **fields}
    optimizer = {
        name[2:].replace("-", "_"): plain_value(value)
        for name, value in flags.items()
        if name in OF_OPTIMIZER
    }
    dp = plan.stages[0].dp
    return {
        "model": model,
        "optimizer": optimizer,
        "chunks": plan.chunks,
        "micro": micro,
        "batch": batch,
        "dp": dp,
    }


def plain_value(value: str) -> object:
    """Return what an argument parser would: True for a flag, and numbers as such."""
    if not value:
        return True
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        return value


MEGATRON_CASES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((18,), {"recomputation": Recomputation.SELECTIVE, "precision": Precision.F16}),
    ((9, 18), {"zero": ZeroStage.OPTIMIZER, "recomputation": Recomputation.FULL}),
    ((6, 12, 18), {"zero": ZeroStage.OPTIMIZER, "offload": Offload.OPTIMIZER}),
    ((4, 9, 14, 18), {"precision": Precision.FP8}),
    ((5, 9, 13, 18), {"chunks": 2, "schedule": Schedule.INTERLEAVED}),
    ((3, 6, 9, 12, 15, 18), {"chunks": 2, "schedule": Schedule.INTERLEAVED, "accumulation": 6}),
    ((4, 9, 12, 18), {"chunks": 2, "schedule": Schedule.INTERLEAVED}),
)
"""Ends of the stages of plans for 16 blocks, with other fields of these plans."""


def test_megatron_divides_layers_and_batches_as_the_plan_does() -> None:
    python = find_torch_python("megatron.core")
    stage = {"dp": 2, "tp": 2, "sp": True}
    plans = [a_plan(ends, stage, **changes) for ends, changes in MEGATRON_CASES]
    cases = [as_configurations(plan, 16) for plan in plans]
    answers = ask(python, DIVIDE_MEGATRON, cases)
    for plan, (counts, micro_batches, is_divided) in zip(plans, answers, strict=True):
        expected = block_counts(plan)
        assert counts == expected
        assert sum(counts) == 16
        assert micro_batches == plan.accumulation
        assert is_divided == (plan.zero is ZeroStage.OPTIMIZER)


MEGATRON_LINES = """
import os, sys
rank, load = os.environ["RANK"], sys.argv[1] == "load"
if load and rank == "0":
    print("  successfully loaded checkpoint from /save [ t 1/1, p 1/1 ] at iteration 10")
elif rank == "0":
    print("saving checkpoint at iteration {:7d} to {} in torch_dist format".format(10, "/save"))
    print("  successfully saved checkpoint from iteration {:7d} to {}".format(10, "/save"))
elif not load:
    for done in (4, 8):
        words = f"iteration {done:8d}/{10:8d} | consumed samples: {8 * done:12d} |"
        print(f" [2026-01-01 00:00:00] {words} lm loss: {2 / done:.6E} | loss scale: 1.0 |")
"""
"""A script that prints, on two ranks, what Megatron-LM prints with --log-interval 4."""


@pytest.mark.parametrize(("word", "loss"), [("train", 0.25), ("load", None)])
async def test_the_lines_of_megatron_count_up_to_the_last_checkpoint(
    bench: ProgramBench, word: str, loss: float | None
) -> None:
    script = bench.root / SCRIPT
    script.write_text(MEGATRON_LINES)
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (pattern,) = re.findall(r"^`(iteration \+\(.*)` finds its lines", page, re.M)
    gang = bench.gang((str(script), word), runtime=MEGATRON, launch={"progress_pattern": pattern})
    handle = bench.start(gang, python=find_torch_python())
    assert await end_of(handle) == SUCCESS
    report = observed(handle)
    assert report.iterations_done == 10
    assert (report.loss if report.HasField("loss") else None) == loss
