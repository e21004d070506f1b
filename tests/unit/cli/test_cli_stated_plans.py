"""``tessera estimate`` with a stated plan: its options, its table, its JSON and its sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.formulation.execution_plan import execution_plan_of
from tessera.service.cli import main

GPT = ["--model", "bert/6.7B", "--offline", "--gpu", "a100-80"]
ARGUMENTS = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    " --global-batch-size 256 --fp16 --use-distributed-optimizer"
)
INTERLEAVED = (
    f"{ARGUMENTS} --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel"
    " --recompute-activations"
)


def run_estimate(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["estimate", *arguments])


def estimate_json(*arguments: str) -> dict[str, Any]:
    result = run_estimate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(ARGUMENTS)
    return path


def test_the_stated_plan_is_shown_next_to_ours(plan_file: Path) -> None:
    result = run_estimate(*GPT, "--plan", str(plan_file), "--count", "16")
    assert result.exit_code == 0, result.stderr
    header, stated, ours, *more = result.stdout.splitlines()
    assert header.split()[:3] == ["ITERATION", "SAMPLES/S", "SPEED"]
    assert "2 x (dp2 tp4), 1F1B, ZeRO-1, f16, micro-batch 4 x 32" in stated
    assert stated.split()[0:5:4] == ["stated", "1.00"]
    assert ours.startswith("ours ")
    assert all(row.startswith("ours, 2 stages") for row in more)
    assert "ours has " in result.stderr


def test_options_and_a_file_mean_the_same(plan_file: Path) -> None:
    by_file = estimate_json(*GPT, "--plan", str(plan_file), "--count", "16")
    options = "--dp 2 --tp 4 --pp 2 --micro-batch 4 --zero 1 --precision f16 --recompute none"
    by_options = estimate_json(*GPT, *options.split(), "--batch", "256")
    assert by_file == by_options


def test_the_json_has_whole_plans_that_can_be_stated_again(plan_file: Path, tmp_path: Path) -> None:
    first = estimate_json(*GPT, "--plan", str(plan_file), "--count", "16")
    plan = execution_plan_of("stated", first["stated"]["plan"])
    assert plan.digest == first["stated"]["digest"]
    assert (plan.model, plan.shape) == ("bert/6.7B", (8, 8))
    again = tmp_path / "plan.json"
    again.write_text(plan.to_json())
    second = estimate_json(*GPT, "--plan", str(again))
    assert second["stated"] == first["stated"]
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps(first["ours"]["plan"]))
    third = estimate_json(*GPT, "--plan", str(ours))
    assert third["stated"]["iter_time_s"] == pytest.approx(first["ours"]["iter_time_s"])
    assert third["ratio"] == pytest.approx(1.0)


def test_ratio_is_how_much_faster_ours_is(plan_file: Path) -> None:
    found = estimate_json(*GPT, "--plan", str(plan_file), "--count", "16")
    assert found["ratio"] == found["stated"]["iter_time_s"] / found["ours"]["iter_time_s"]
    assert found["ratio"] > 1
    assert found["stated_is_faster"] is False


def test_it_is_said_where_the_stated_plan_is_faster_and_why(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(INTERLEAVED.replace("size 256", "size 16"))
    # On slow links between nodes, tensor groups in nodes and a short bubble are best.
    slow = ["--model", "bert/6.7B", "--offline", "--gpu", "a100-80", "--count", "16"]
    found = estimate_json(*slow, "--plan", str(path))
    assert found["stated_is_faster"], found["ratio"]
    assert found["unsearched"][:2] == [
        "sequence parallelism",
        "2 chunks of layers on each stage's GPUs",
    ]
    (sentence,) = [text for text in found["notes"] if "faster than the best" in text]
    assert "the search does not consider sequence parallelism, 2 chunks" in sentence
    assert "without chunks, the stated plan would take" in sentence


def test_a_stated_plan_that_does_not_fit_says_by_how_much(plan_file: Path) -> None:
    options = ["--plan", str(plan_file), "--count", "16", "--gpu", "a10"]
    result = run_estimate("--model", "bert/15B", "--offline", *options)
    assert result.exit_code == 0, result.stderr
    assert "the stated plan does not fit, by " in result.stderr
    assert "GiB: stage 0 needs " in result.stderr
    assert "too much" in result.stdout.splitlines()[1]


def test_more_gpus_than_a_search_can_have_are_priced_alone() -> None:
    options = "--dp 128 --tp 8 --micro-batch 1 --batch 1024 --recompute full"
    found = estimate_json(*GPT, *options.split())
    assert (found["gpus"], found["ours"], found["ratio"]) == (1024, None, None)
    assert found["notes"] == ["ours was not searched on that many GPUs"]
    refused = run_estimate(*GPT, "--count", "1024", "--batch", "1024")
    assert refused.exit_code == 2
    assert "--count: must be at most 512 for a search; state a plan" in refused.stderr


def test_notes_of_a_file_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"profile": False}}
        )
    )
    result = run_estimate(*GPT, "--plan", str(path), "--count", "8", "--batch", "64", "--zero", "1")
    assert result.exit_code == 0, result.stderr
    assert "does not say whether activations are recomputed: state --recompute" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tp 4", "--batch: is required, or a plan that states it"),
        ("--tp 4 --batch 256", "--count: is required, or a plan that states it"),
        ("--plan {plan}", "--count: is required"),
        (
            "--plan {plan} --count 16 --tp 2",
            "--tp: states 2, but --tensor-model-parallel-size states 4",
        ),
        (
            "--plan {plan} --count 16 --zero 3",
            "--zero: states 3, but --use-distributed-optimizer states 1",
        ),
        (
            "--plan {plan} --count 16 --batch 128",
            "--global-batch-size: is 256, but the batch to be priced is",
        ),
        ("--plan {plan} --count 12", "--tensor-model-parallel-size: does not fit 12 GPUs"),
        ("--plan {plan} --count 16 --all", "--all: cannot be combined with a stated plan"),
        ("--plan {plan} --count 16 --stages 2", "--stages: cannot be combined"),
        (
            "--plan {plan} --count 16 --plan-format deepspeed",
            "is neither JSON nor YAML|must be a mapping",
        ),
        ("--plan /none/plan.json --count 16", "/none/plan.json: cannot be read"),
        ("--plan-format json --count 16 --batch 16", "--plan-format: needs --plan"),
        ("--dp 2 --tp 4 --batch 256 --count 16", "--dp: is 2, so the plan has 8 GPUs"),
        ("--sp --batch 256 --count 16", "--sp: needs --tp of at least 2"),
        ("--vp 2 --batch 256 --count 16", "--vp: is 2, but chunks need --pp of at least 2"),
        (
            "--pp 2 --vp 2 --schedule gpipe --batch 256 --count 16",
            "--schedule: is gpipe, but there are 2",
        ),
        ("--ep 2 --batch 256 --count 16", "--ep: is 2, but the model has no experts"),
        ("--micro-batch 3 --batch 256 --count 16", "--micro-batch: is 3 in each of 16 replicas"),
        ("--precision fp8 --batch 256 --count 16", "precision: of fp8 is not possible on a100-80"),
        (
            "--offload parameters --batch 256 --count 16",
            "--offload: of parameters needs ZeRO stage 3",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_the_name_that_the_user_wrote(
    plan_file: Path, options: str, said: str
) -> None:
    result = run_estimate(*GPT, *options.format(plan=plan_file).split())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert any(part in result.stderr for part in said.split("|")), result.stderr


def test_a_whole_plan_takes_no_further_options(tmp_path: Path, plan_file: Path) -> None:
    whole = tmp_path / "plan.json"
    found = estimate_json(*GPT, "--plan", str(plan_file), "--count", "16")
    whole.write_text(json.dumps(found["stated"]["plan"]))
    result = run_estimate(*GPT, "--plan", str(whole), "--tp", "4")
    assert result.exit_code == 2
    assert "--tp: cannot change the whole plan in plan.json" in result.stderr
    other = run_estimate(
        "--model", "bert/1.3B", "--offline", "--gpu", "a100-80", "--plan", str(whole)
    )
    assert "was made for the model bert/6.7B, not for bert/1.3B" in other.stderr


def test_a_plan_may_state_the_tokens_of_a_sample(tmp_path: Path, plan_file: Path) -> None:
    net = tmp_path / "net.yaml"
    sizes = "architecture: transformer\nlayers: 8\nhidden: 512\nheads: 8\nvocabulary: 1000\n"
    net.write_text(f"{sizes}sequence: 4096\n")
    plan_file.write_text(f"{ARGUMENTS} --seq-length 1024")
    options = ["--offline", "--gpu", "a100-80", "--count", "16", "--plan", str(plan_file)]
    by_plan = estimate_json("--architecture", str(net), *options)
    by_option = estimate_json("--architecture", str(net), *options, "--sequence", "1024")
    assert by_plan == by_option
    refused = run_estimate("--architecture", str(net), *options, "--sequence", "4096")
    assert "--sequence: states 4096, but --seq-length states 1024" in refused.stderr
