"""``tessera estimate`` and ``tessera profile``: their output, their files and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.job.execution_plan import PlanStage, execution_plan_of
from tessera.service.cli import main
from tessera.service.cli.estimates import modelling
from tessera.service.cli.estimates.estimateview import stage_layers
from tessera.simulator.traces.files import profiles_of

BERT = "--model bert/1.3B --batch 256"
LARGE = "--model bert/6.7B --offline --gpu a100-80"
ON_2 = "--gpu a100 --count 2"
ON_8 = "--gpu a100 --count 8"
TINY = ["hidden=32", "layers=2", "heads=2", "vocabulary=64", "sequence=16", "dtype=f32"]
STEP = " ".join(
    ["--step tessera.estimator.tracing.models.steps:decoder", *(f"--argument={a}" for a in TINY)]
)
MEGATRON = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    " --global-batch-size 256 --fp16 --use-distributed-optimizer"
)


@pytest.fixture(autouse=True)
def _no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a server that runs at the default address from answering with its node shapes."""
    monkeypatch.setattr("tessera.service.cli.estimates.nodeshapes.DEFAULT_SERVER", "127.0.0.1:1")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON)
    return path


def run_estimate(options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main.app, ["estimate", *options.split()])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def estimate_json(options: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run_estimate(f"{options} --json").stdout)
    return document


def cells_of(options: str, field: str) -> list[Any]:
    """Return a field of all Cells that an estimate has."""
    return [cell[field] for cell in estimate_json(options)["cells"]]


def test_there_is_a_row_for_each_pipeline_degree_and_the_fastest_is_marked() -> None:
    lines = run_estimate(f"{BERT} {ON_8}").stdout.splitlines()
    rows = [text.removeprefix("*").split() for text in lines[1:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    (marked,) = [text for text in lines if text.startswith("*")]
    assert float(marked.split()[2]) == min(float(row[1]) for row in rows)
    assert "of 36.0 GiB" in marked


def test_json_contains_all_of_a_plan() -> None:
    output = estimate_json(f"{BERT} {ON_8}")
    assert (output["model"], output["params"], output["global_batch"]) == ("bert", "1.3B", 256)
    assert [cell["pipeline_degree"] for cell in output["cells"]] == [1, 2, 4, 8]
    assert [cell["best"] for cell in output["cells"]].count(True) == 1
    for cell in output["cells"]:
        assert sum(stage["dp"] * stage["tp"] for stage in cell["stages"]) == 8
        assert cell["samples_per_s"] == pytest.approx(256 / cell["iter_time_s"])
        stage_bytes = [stage["memory_bytes"] for stage in cell["stages"]]
        assert 0 < max(stage_bytes) <= cell["memory_limit_bytes"]


def test_a_degree_that_does_not_fit_is_reported_with_the_memory_that_it_needs(
    tmp_path: Path,
) -> None:
    to = tmp_path / "profiles.csv"
    options = "--model llama30/30B --batch 64 --gpu a10 --count 2"
    result = run_estimate(f"{options} --write {to}")
    assert result.stdout == ""
    assert "2 x a10, 1 stage: does not fit: stage 0 needs" in result.stderr
    assert "has 21.6 GiB" in result.stderr
    dropped = estimate_json(options)["dropped"]
    assert [d["pipeline_degree"] for d in dropped] == [1, 2]
    assert all(d["needed_bytes"] > d["limit_bytes"] for d in dropped)
    assert [r.iter_time_s for r in profiles_of(to)] == [math.inf] * 2
    run_estimate(f"{BERT} --gpu a10 --count 2 --write {to}")  # which can be read as profiles
    records = profiles_of(to)
    assert [(r.workload.key, r.cell.gpu_type, r.cell.gpus) for r in records] == [
        ("bert/1.3B/256", "a10", 2)
    ] * 2
    times_s = cells_of(f"{BERT} --gpu a10 --count 2", "iter_time_s")
    assert [r.iter_time_s for r in records] == times_s
    assert {(r.source.name, r.provenance) for r in records} == {("ANALYTIC", "analytic v2")}


def test_all_shows_the_best_of_each_type_at_half_the_full_and_twice_the_gpus(
    tmp_path: Path,
) -> None:
    result = run_estimate(f"{BERT} --count 2 --all")
    rows = [text.removeprefix("*").split() for text in result.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} >= {"a100", "v100", "h100", "b200", "mi300x"}
    assert [row[1] for row in rows if row[0] == "a100"] == ["1", "2", "4"]
    own = tmp_path / "own.yaml"
    own.write_text("hardware: [{name: lab, like: h100, memory_gib: 40}]\n")
    assert set(cells_of(f"{BERT} --count 2 --all --hardware {own}", "gpu_type")) == {"lab"}


def test_a_users_architecture_is_named_by_its_file_or_by_the_option_model(tmp_path: Path) -> None:
    net = tmp_path / "my_net.yaml"
    net.write_text(
        "{architecture: transformer, layers: 4, hidden: 256, heads: 4, sequence: 128,"
        " vocabulary: 1000}"
    )
    output = estimate_json(f"--architecture {net} --batch 32 {ON_8}")
    assert (output["model"], output["dtype"], output["params"][-1]) == ("my_net", "bf16", "M")
    named = estimate_json(f"--architecture {net} --batch 32 {ON_8} --model net/4M")
    assert (named["model"], named["params"]) == ("net", "4M")


@pytest.mark.parametrize(
    ("options", "field", "values"),
    [
        (f"{ON_8} --micro-batches 8", "micro_batches", [8] * 4),
        (f"{ON_8} --stages 2,3", "pipeline_degree", [2, 3]),
        (f"{ON_8} --node-gpus 16 --stages 1", "node_gpus", [16]),
        ("--gpu a100 --count 6 --stages 3", "nodes", [2]),  # the fewest, with equal shares
        ("--gpu a100 --count 6 --nodes 6 --stages 3", "nodes", [6]),
    ],
)
def test_an_estimate_is_as_its_options_say(options: str, field: str, values: list[int]) -> None:
    assert cells_of(f"{BERT} {options}", field) == values


@pytest.mark.parametrize(
    ("options", "switches"),
    [
        ("--zero 3", {"zero": 3}),
        ("--checkpointing", {"recomputation": "full"}),
        ("--no-checkpointing", {"recomputation": None}),
        ("--micro-batches 8", {"accumulation": 8}),
        ("--micro-batches 64 --zero 2", {"accumulation": 64, "zero": 2}),
    ],
)
def test_what_is_stated_of_plans_is_kept_and_else_all_is_searched(
    options: str, switches: dict[str, Any]
) -> None:
    cells = estimate_json(f"{BERT} {ON_8} {options}")["cells"]
    for cell in cells:
        assert {name: cell["plan"].get(name) for name in switches} == switches
    best_s = min(cells_of(f"{BERT} {ON_8}", "iter_time_s"))
    assert best_s <= min(cell["iter_time_s"] for cell in cells)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"--batch 8 {ON_8}", "--model: is required"),
        (f"--model brt --batch 8 {ON_8}", "unknown model 'brt'; the models are wide_resnet, bert"),
        (f"--model bert --batch 8 {ON_8}", "needs a size; choose from bert/760M, bert/1.3B"),
        (f"--model bert/9B --batch 8 {ON_8}", "unknown size bert/9B; choose from bert/760M"),
        (f"{BERT} --gpu a1000 --count 8", "unknown GPU type 'a1000'; did you mean a100? the types"),
        (f"{BERT} --count 8", "--gpu: is required, or --all"),
        (f"{BERT} {ON_8} --nodes 3", "8 GPUs cannot be spread evenly over 3 nodes; give one of 2"),
        (f"{BERT} {ON_8} --nodes 1", "a node has 4 x a100, so 8 GPUs need at least 2 nodes"),
        (f"{BERT} {ON_8} --all", "--all: cannot be combined with --gpu or --nodes"),
        (
            f"--model bert/1.3B --batch 250 {ON_8} --micro-batches 16",
            "16 does not divide a batch of 250; give one of 2, 5, 10, 25, 50, 125",
        ),
        (f"{BERT} {ON_8} --sequence 8", "need --architecture or --hf"),
        (f"{BERT} {ON_8} --argument a=1", "--argument: needs --step"),
        (f"{BERT} {ON_8} --network ib", "--network: needs --collectives"),
        (f"{BERT} {ON_8} --write /none/out.csv", "/none/out.csv: cannot be written"),
        (f"{LARGE} --tp 4", "--batch: is required, or a plan that states it"),
        (f"{LARGE} --plan PLAN --count 16 --tp 2", "--tp: states 2, but --tensor-model"),
        (f"{LARGE} --plan PLAN --count 12", "--tensor-model-parallel-size: does not fit 12 GPUs"),
        (f"{LARGE} --plan PLAN --count 16 --all", "--all: cannot be combined with a stated plan"),
        (f"{LARGE} --plan PLAN --count 16 --stages 2", "--stages: cannot be combined"),
    ],
)
def test_bad_input_is_refused_with_a_hint(plan_file: Path, options: str, message: str) -> None:
    result = run_estimate(options.replace("PLAN", str(plan_file)), code=2)
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_layers_and_sizes_are_abbreviated() -> None:
    stages = [
        PlanStage(start=0, end=3, dp=4, tp=2),
        PlanStage(start=3, end=5, dp=4, tp=2),
        PlanStage(start=5, end=6, dp=1, tp=8),
        PlanStage(start=6, end=9, dp=1, tp=1),
        PlanStage(start=9, end=10, dp=4, tp=2, ep=4, sp=True),
    ]
    assert stage_layers(stages) == "3+2+1+3+1"
    sizes = {1.4247e9: "1.42B", 7.6e8: "760M", 9.999e8: "1B", 12: "12"}
    assert {size: modelling.size_of(size) for size in sizes} == sizes


def test_offline_the_assumed_nodes_are_reported_and_a_named_server_must_answer() -> None:
    plain = run_estimate(f"{BERT} {ON_8} --offline")
    assert "assumed nodes of 4 x a100, as in data sheets" in plain.stderr
    assert "--node-gpus" in plain.stderr
    lost = run_estimate(f"{BERT} {ON_8} --server 127.0.0.1:1", code=3)
    assert "no server answers at 127.0.0.1:1" in lost.stderr
    assert "--offline estimates from data sheets alone" in lost.stderr


def test_the_stated_plan_is_shown_next_to_ours(plan_file: Path) -> None:
    result = run_estimate(f"{LARGE} --plan {plan_file} --count 16")
    header, stated, ours, *more = result.stdout.splitlines()
    assert header.split()[:3] == ["ITERATION", "SAMPLES/S", "SPEED"]
    assert "2 x (dp2 tp4), 1F1B, ZeRO-1, f16, micro-batch 4 x 32" in stated
    assert stated.split()[0:5:4] == ["stated", "1.00"]
    assert ours.startswith("ours ")
    assert all(row.startswith("ours, 2 stages") for row in more)
    assert "ours has " in result.stderr


def test_a_stated_plan_is_the_same_in_options_and_files_and_can_be_stated_again(
    plan_file: Path, tmp_path: Path
) -> None:
    first = estimate_json(f"{LARGE} --plan {plan_file} --count 16")
    assert first["ratio"] == first["stated"]["iter_time_s"] / first["ours"]["iter_time_s"]
    assert (first["ratio"] > 1, first["stated_is_faster"]) == (True, False)
    options = "--dp 2 --tp 4 --pp 2 --micro-batch 4 --zero 1 --precision f16 --recompute none"
    assert estimate_json(f"{LARGE} {options} --batch 256") == first
    plan = execution_plan_of("stated", first["stated"]["plan"])
    assert (plan.digest, plan.model) == (first["stated"]["digest"], "bert/6.7B")
    again, ours = tmp_path / "plan.json", tmp_path / "ours.json"
    again.write_text(plan.to_json())
    assert estimate_json(f"{LARGE} --plan {again}")["stated"] == first["stated"]
    ours.write_text(json.dumps(first["ours"]["plan"]))
    assert estimate_json(f"{LARGE} --plan {ours}")["ratio"] == pytest.approx(1.0)
    changed = run_estimate(f"{LARGE} --plan {again} --tp 4", code=2)
    assert "--tp: cannot change the whole plan in plan.json" in changed.stderr
    other = f"--model bert/1.3B --offline --gpu a100-80 --plan {again}"
    assert "made for the model bert/6.7B, not for bert/1.3B" in run_estimate(other, code=2).stderr


def test_it_is_said_where_the_stated_plan_is_faster() -> None:
    # The search keeps the precision of the model, in which products take twice as long as in fp8.
    plan = "--tp 2 --sp --zero 2 --micro-batch 16 --recompute none --precision fp8"
    output = estimate_json(f"--model bert/6.7B --offline --gpu h100 --count 8 --batch 64 {plan}")
    assert output["stated_is_faster"]
    assert 0.5 < output["ratio"] < 1
    (sentence,) = [text for text in output["notes"] if "faster than the best" in text]
    assert "it has degrees, a precision or cuts that the search does not try" in sentence


def test_the_notes_on_a_stated_plan_say_what_is_unusual_about_it(plan_file: Path) -> None:
    large = run_estimate(f"--model bert/15B --offline --plan {plan_file} --count 16 --gpu a10")
    assert "the stated plan does not fit, by " in large.stderr
    assert "GiB: stage 0 needs " in large.stderr
    assert "too much" in large.stdout.splitlines()[1]
    wide = estimate_json(f"{LARGE} --dp 128 --tp 8 --micro-batch 1 --batch 1024 --recompute full")
    assert (wide["gpus"], wide["stated_is_faster"]) == (1024, False)
    assert wide["ratio"] > 1


def test_a_plan_may_state_the_tokens_of_a_sample(tmp_path: Path, plan_file: Path) -> None:
    net = tmp_path / "net.yaml"
    net.write_text(
        "{architecture: transformer, layers: 8, hidden: 512, heads: 8, vocabulary: 1000,"
        " sequence: 4096}"
    )
    plan_file.write_text(f"{MEGATRON} --seq-length 1024")
    options = f"--architecture {net} --offline --gpu a100-80 --count 16 --plan {plan_file}"
    assert estimate_json(options) == estimate_json(f"{options} --sequence 1024")
    refused = run_estimate(f"{options} --sequence 4096", code=2)
    assert "--sequence: states 4096, but --seq-length states 1024" in refused.stderr


def test_estimates_need_no_jax() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tessera.service.cli import main; "
        f"r = CliRunner().invoke(main.app, 'estimate {BERT} {ON_2}'.split()); "
        "assert r.exit_code == 0, r.output; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "command",
    [f"estimate --batch 8 {ON_8} {STEP}", f"profile {STEP}", "profile collectives"],
)
def test_without_jax_the_error_says_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "jax" else there(n))
    result = CliRunner().invoke(main.app, command.split())
    assert result.exit_code == 1
    assert (
        "this needs jax; install it with: pip install 'tessera-scheduler[estimator]'"
        in result.stderr
    )


def test_a_profiled_step_is_estimated_from_its_measured_layers(tmp_path: Path) -> None:
    to = tmp_path / "layers.jsonl"
    step = "--step tessera.estimator.tracing.models.steps:perceptron --argument=layers=4"
    profile = f"profile {step} --warmups 1 --repeats 1 --samples 2 --to {to} --json".split()
    first = CliRunner().invoke(main.app, profile)
    assert first.exit_code == 0, first.stderr
    measured = json.loads(first.stdout)
    assert len(to.read_text().splitlines()) == len(measured) > 2
    again = CliRunner().invoke(main.app, profile)
    assert json.loads(again.stdout) == []  # everything has been measured already
    there = f"{step} --batch 32 --gpu a100 --count 1 --micro-batches 16"
    (plain_s,) = cells_of(there, "iter_time_s")
    with_profile = run_estimate(f"{there} --profile {to} --json")
    assert "100 % of the work was measured" in with_profile.stderr
    seconds = sum(r["forward_s"] + r["backward_s"] for r in measured)
    profiled_s = json.loads(with_profile.stdout)["cells"][0]["iter_time_s"]
    assert profiled_s != plain_s
    assert profiled_s > 16 * seconds  # 16 micro-batches of two samples; some layers repeat
    other = run_estimate(f"{BERT} {ON_8} --profile {to}", code=2).stderr
    assert "the graph has f16" in other or "contains no layer of bert" in other


@pytest.mark.full
def test_measured_collectives_are_used_by_estimate(tmp_path: Path) -> None:
    alone = CliRunner().invoke(main.app, ["profile", "collectives"])
    assert (alone.exit_code, "collectives need two or more" in alone.stderr) == (2, True)
    to = tmp_path / "comm.csv"
    command = f"profile collectives --sizes 64KiB --repeats 2 --group 1x2 --gpu a100 --to {to}"
    code = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'; "
        f"from tessera.service.cli.main import app; app({[*command.split(), '--json']!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert {r["primitive"] for r in json.loads(result.stdout)} >= {"all-reduce", "send"}
    own, plain = (
        cells_of(f"{BERT} {ON_2} {more}", "iter_time_s") for more in (f"--collectives {to}", "")
    )
    assert own[1] != plain[1]
