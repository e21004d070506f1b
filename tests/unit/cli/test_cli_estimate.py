"""The output, files and error messages of ``tessera estimate`` and ``tessera profile``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tessera.estimator.cells import degrees_of
from tessera.formulation.execution_plan import PlanStage
from tessera.service.cli import main, modelling
from tessera.service.cli.estimateview import short_plan, stage_layers
from tessera.simulator.traces.files import profiles_of

BERT = ["--model", "bert/1.3B", "--batch", "256"]
ON_8 = ["--gpu", "a100", "--count", "8"]
TINY = [
    f"--argument={a}"
    for a in ("hidden=32", "layers=2", "heads=2", "vocabulary=64", "sequence=16", "dtype=f32")
]
STEP = ["--step", "tessera.estimator.tracing.models.steps:decoder", *TINY]


@pytest.fixture(autouse=True)
def _no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a server that runs at the default address from answering with its node shapes."""
    monkeypatch.setattr("tessera.service.cli.nodeshapes.DEFAULT_SERVER", "127.0.0.1:1")


def run_estimate(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["estimate", *arguments])


def estimate_json(*arguments: str) -> dict[str, Any]:
    result = run_estimate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refusal_message(*arguments: str) -> str:
    result = run_estimate(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def test_there_is_a_row_for_each_pipeline_degree_and_the_fastest_is_marked() -> None:
    lines = run_estimate(*BERT, *ON_8).stdout.splitlines()
    rows = [text.removeprefix("*").split() for text in lines[1:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    (marked,) = [text for text in lines if text.startswith("*")]
    seconds = [float(row[1]) for row in rows]
    assert float(marked.split()[2]) == min(seconds)
    assert "of 36.0 GiB" in marked


def test_json_contains_all_of_a_plan() -> None:
    output = estimate_json(*BERT, *ON_8)
    assert (output["model"], output["params"], output["global_batch"]) == ("bert", "1.3B", 256)
    assert [cell["pipeline_degree"] for cell in output["cells"]] == [1, 2, 4, 8]
    assert [cell["best"] for cell in output["cells"]].count(True) == 1
    for cell in output["cells"]:
        assert sum(stage["dp"] * stage["tp"] for stage in cell["stages"]) == 8
        assert cell["samples_per_s"] == pytest.approx(256 / cell["iter_time_s"])
        stage_bytes = [stage["memory_bytes"] for stage in cell["stages"]]
        assert 0 < max(stage_bytes) <= cell["memory_limit_bytes"]


def test_a_degree_that_does_not_fit_is_reported_with_the_memory_that_it_needs() -> None:
    result = run_estimate("--model", "bert/6.7B", "--batch", "256", "--gpu", "a10", "--count", "4")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "4 x a10, 1 stage: does not fit: stage 0 needs" in result.stderr
    assert "has 21.6 GiB" in result.stderr
    dropped = estimate_json(
        "--model", "bert/6.7B", "--batch", "256", "--gpu", "a10", "--count", "4"
    )
    assert [d["pipeline_degree"] for d in dropped["dropped"]] == [1, 2, 4]
    assert all(d["needed_bytes"] > d["limit_bytes"] for d in dropped["dropped"])


def test_all_shows_the_best_of_each_type_at_half_the_full_and_twice_the_gpus() -> None:
    result = run_estimate(*BERT, "--count", "2", "--all")
    rows = [text.removeprefix("*").split() for text in result.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} >= {"a100", "v100", "h100", "b200", "mi300x"}
    assert [row[1] for row in rows if row[0] == "a100"] == ["1", "2", "4"]


def test_all_with_a_hardware_file_covers_the_types_of_the_file(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("hardware: [{name: lab, like: h100, memory_gib: 40}]\n")
    output = estimate_json(*BERT, "--count", "2", "--all", "--hardware", str(own))
    assert {cell["gpu_type"] for cell in output["cells"]} == {"lab"}
    assert estimate_json(*BERT, "--count", "2", "--gpu", "lab", "--hardware", str(own))["cells"]


def test_written_estimates_can_be_read_as_profiles(tmp_path: Path) -> None:
    to = tmp_path / "profiles.csv"
    assert run_estimate(*BERT, "--gpu", "a10", "--count", "2", "--write", str(to)).exit_code == 0
    cells = estimate_json(*BERT, "--gpu", "a10", "--count", "2")["cells"]
    records = profiles_of(to)
    assert [(r.workload.key, r.cell.gpu_type, r.cell.gpus, r.cell.nodes) for r in records] == [
        ("bert/1.3B/256", "a10", 2, 1)
    ] * 2
    assert [r.iter_time_s for r in records] == [cell["iter_time_s"] for cell in cells]
    assert {(r.source.name, r.provenance) for r in records} == {("ANALYTIC", "analytic v2")}


def test_a_cell_that_does_not_fit_is_written_as_infeasible(tmp_path: Path) -> None:
    to = tmp_path / "profiles.csv"
    arguments = ["--model", "bert/6.7B", "--batch", "256", "--gpu", "a10", "--count", "2"]
    assert run_estimate(*arguments, "--write", str(to)).exit_code == 0
    assert [r.iter_time_s for r in profiles_of(to)] == [float("inf")] * 2


def test_a_users_architecture_is_named_by_its_file_or_by_the_option_model(tmp_path: Path) -> None:
    file = tmp_path / "my net.yaml"
    file.write_text(
        "architecture: transformer\nlayers: 4\nhidden: 256\nheads: 4\nsequence: 128\nvocabulary: 1000\n"
    )
    output = estimate_json("--architecture", str(file), "--batch", "32", *ON_8)
    assert (output["model"], output["dtype"]) == ("my-net", "bf16")
    assert output["params"].endswith("M")
    named = estimate_json("--architecture", str(file), "--batch", "32", *ON_8, "--model", "net/4M")
    assert (named["model"], named["params"]) == ("net", "4M")


def test_a_hugging_face_configuration_is_estimated(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 512,
                "vocab_size": 1000,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "max_position_embeddings": 4096,
            }
        )
    )
    short_one = estimate_json("--hf", str(file), "--sequence", "128", "--batch", "32", *ON_8)
    long_one = estimate_json("--hf", str(file), "--batch", "32", *ON_8)
    assert short_one["parameters"] == long_one["parameters"]
    assert short_one["cells"][0]["iter_time_s"] < long_one["cells"][0]["iter_time_s"]


@pytest.mark.parametrize(
    ("rule", "counts"), [("stages", [1, 2, 4, 8]), ("4-stages", [4, 8, 16, 32]), ("8", [8] * 4)]
)
def test_micro_batches_are_as_requested(rule: str, counts: list[int]) -> None:
    output = estimate_json(*BERT, *ON_8, "--micro-batches", rule)
    assert [cell["micro_batches"] for cell in output["cells"]] == counts


def test_gpus_are_placed_on_the_fewest_nodes_with_equal_shares() -> None:
    output = estimate_json(*BERT, "--gpu", "a100", "--count", "6")
    assert {cell["nodes"] for cell in output["cells"]} == {2}
    spread = estimate_json(*BERT, "--gpu", "a100", "--count", "6", "--nodes", "6")
    assert {cell["nodes"] for cell in spread["cells"]} == {6}


def test_only_the_named_degrees_are_searched() -> None:
    output = estimate_json(*BERT, *ON_8, "--stages", "2,3")
    assert [cell["pipeline_degree"] for cell in output["cells"]] == [2, 3]


@pytest.mark.parametrize(("gpus", "deepest"), [(1, 1), (12, 8), (16, 16), (512, 16)])
def test_very_deep_pipelines_are_not_searched_on_many_gpus(gpus: int, deepest: int) -> None:
    assert degrees_of(gpus)[-1] == deepest


def test_searched_micro_batches_are_never_worse() -> None:
    def times_s(micro_batches: str) -> dict[int, float]:
        cells = estimate_json(*BERT, *ON_8, "--micro-batches", micro_batches)["cells"]
        return {cell["pipeline_degree"]: cell["iter_time_s"] for cell in cells}

    searched = times_s("searched")
    for fixed in ("4", "16"):
        other = times_s(fixed)
        assert other
        assert all(searched[degree] <= other[degree] * (1 + 1e-9) for degree in other)


def test_degrees_whose_micro_batches_do_not_divide_the_batch_are_reported() -> None:
    output = estimate_json(
        "--model", "bert/1.3B", "--batch", "100", *ON_8, "--micro-batches", "stages"
    )
    assert [cell["pipeline_degree"] for cell in output["cells"]] == [1, 2, 4]
    reasons = {d["pipeline_degree"]: d["reason"] for d in output["dropped"]}
    assert reasons == {8: "8 micro-batches do not divide a batch of 100"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "8", *ON_8], "--model: is required"),
        (
            ["--model", "brt", "--batch", "8", *ON_8],
            "unknown model 'brt'; the models are wide_resnet, bert",
        ),
        (
            ["--model", "bert", "--batch", "8", *ON_8],
            "needs a size; choose from bert/760M, bert/1.3B",
        ),
        (
            ["--model", "bert/9B", "--batch", "8", *ON_8],
            "unknown size bert/9B; choose from bert/760M",
        ),
        (
            [*BERT, "--gpu", "a1000", "--count", "8"],
            "unknown GPU type 'a1000'; did you mean a100? the types are",
        ),
        ([*BERT, "--count", "8"], "--gpu: is required, or --all"),
        (
            [*BERT, *ON_8, "--nodes", "3"],
            "8 GPUs cannot be spread evenly over 3 nodes; give one of 2, 4, 8",
        ),
        ([*BERT, *ON_8, "--nodes", "1"], "a node has 4 x a100, so 8 GPUs need at least 2 nodes"),
        ([*BERT, *ON_8, "--all"], "--all: cannot be combined with --gpu or --nodes"),
        (
            ["--model", "bert/1.3B", "--batch", "250", *ON_8, "--micro-batches", "16"],
            "16 does not divide a batch of 250; give one of 2, 5, 10, 25, 50, 125",
        ),
        (
            [*BERT, *ON_8, "--micro-batches", "some"],
            "--micro-batches: must be a positive whole number, or",
        ),
        ([*BERT, *ON_8, "--stages", "two"], "--stages: 'two': write whole numbers from 1"),
        ([*BERT, *ON_8, "--dtype", "f8"], "--dtype: must be one of f32, bf16, f16"),
        ([*BERT, *ON_8, "--sequence", "8"], "need --architecture or --hf"),
        ([*BERT, *ON_8, "--argument", "a=1"], "--argument: needs --step"),
        ([*BERT, *ON_8, "--network", "ib"], "--network: needs --collectives"),
        ([*BERT, *ON_8, "--hf", "/none/config.json"], "/none/config.json: cannot be read"),
        ([*BERT, *ON_8, "--hf", "a", "--step", "b"], "--hf, --step: describe different models"),
        ([*BERT, *ON_8, "--collectives", "/none/comm.csv"], "comm.csv: cannot be read"),
        ([*BERT, *ON_8, "--profile", "/none/p.jsonl"], "/none/p.jsonl: cannot be read"),
        ([*BERT, *ON_8, "--hardware", "/none/h.yaml"], "h.yaml: cannot be read"),
        ([*BERT, *ON_8, "--write", "/none/out.csv"], "/none/out.csv: cannot be written"),
    ],
)
def test_bad_input_is_refused_with_a_hint(arguments: list[str], message: str) -> None:
    result = run_estimate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_plans_are_abbreviated() -> None:
    stages = [
        PlanStage(start=0, end=3, dp=4, tp=2),
        PlanStage(start=3, end=5, dp=4, tp=2),
        PlanStage(start=5, end=6, dp=1, tp=8),
        PlanStage(start=6, end=9, dp=1, tp=1),
        PlanStage(start=9, end=10, dp=4, tp=2, ep=4, sp=True),
    ]
    assert short_plan(stages) == "2 x dp4 tp2 + tp8 + dp1 + dp4 tp2 ep4 sp"
    assert stage_layers(stages) == "3+2+1+3+1"


@pytest.mark.parametrize(
    ("parameters", "text"), [(1.4247e9, "1.42B"), (7.6e8, "760M"), (9.999e8, "1B"), (12, "12")]
)
def test_sizes_are_formatted_as_in_model_names(parameters: float, text: str) -> None:
    assert modelling.size_of(parameters) == text


def test_estimates_need_no_jax() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tessera.service.cli import main; "
        "r = CliRunner().invoke(main.app, 'estimate --model bert/1.3B --batch 256 -g a100 -n 2'.split()); "
        "assert r.exit_code == 0, r.output; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments",
    [["estimate", "--batch", "8", *ON_8, *STEP], ["profile", *STEP], ["profile", "collectives"]],
)
def test_without_jax_the_error_says_what_to_install(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "jax" else there(n))
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 1
    assert (
        "this needs jax; install it with: pip install 'tessera-scheduler[estimator]'"
        in result.stderr
    )


@pytest.mark.slow
def test_a_profiled_step_is_estimated_from_its_measured_layers(tmp_path: Path) -> None:
    to = tmp_path / "layers.jsonl"
    quick = ["--warmups", "1", "--repeats", "1", "--samples", "2", "--to", str(to), "--json"]
    step = ["--step", "tessera.estimator.tracing.models.steps:perceptron", "--argument=layers=4"]
    first = CliRunner().invoke(main.app, ["profile", *step, *quick])
    assert first.exit_code == 0, first.stderr
    measured = json.loads(first.stdout)
    assert len(to.read_text().splitlines()) == len(measured) > 2
    again = CliRunner().invoke(main.app, ["profile", *step, *quick])
    assert json.loads(again.stdout) == []  # everything has been measured already
    there = [*step, "--batch", "32", "--gpu", "a100", "--count", "1"]
    plain = estimate_json(*there)["cells"][0]["iter_time_s"]
    with_profile = run_estimate(*there, "--profile", str(to), "--json")
    assert "100 % of the work was measured" in with_profile.stderr
    seconds = sum(r["forward_s"] + r["backward_s"] for r in measured)
    profiled = json.loads(with_profile.stdout)["cells"][0]["iter_time_s"]
    assert profiled != plain
    assert profiled > 16 * seconds  # 16 micro-batches of two samples; some kinds of layer repeat
    other = refusal_message(*BERT, *ON_8, "--profile", str(to))
    assert "the graph has f16" in other or "contains no layer of bert" in other


def test_one_device_has_no_collectives() -> None:
    result = CliRunner().invoke(main.app, ["profile", "collectives"])
    assert result.exit_code == 2
    assert "collectives need two or more" in result.stderr


def test_measured_collectives_are_used_by_estimate(tmp_path: Path) -> None:
    to = tmp_path / "comm.csv"
    arguments = (
        f"profile collectives --sizes 64KiB --repeats 2 --group 1x2 --gpu a100 --to {to} --json"
    )
    code = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'; "
        f"from tessera.service.cli.main import app; app({arguments.split()!r})"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert {r["primitive"] for r in json.loads(result.stdout)} >= {"all-reduce", "send"}
    own = estimate_json(*BERT, "--gpu", "a100", "--count", "2", "--collectives", str(to))
    plain = estimate_json(*BERT, "--gpu", "a100", "--count", "2")
    assert own["cells"][1]["iter_time_s"] != plain["cells"][1]["iter_time_s"]


def test_offline_the_assumed_nodes_are_reported_and_can_be_changed() -> None:
    plain = run_estimate(*BERT, "--gpu", "a100", "--count", "8", "--offline")
    assert "assumed nodes of 4 x a100, as in data sheets" in plain.stderr
    assert "--node-gpus" in plain.stderr
    fat = estimate_json(*BERT, "--gpu", "a100", "--count", "8", "--node-gpus", "16")
    thin = estimate_json(*BERT, "--gpu", "a100", "--count", "8", "--offline")
    assert {(c["nodes"], c["node_gpus"]) for c in fat["cells"]} == {(1, 16)}
    assert {(c["nodes"], c["node_gpus"]) for c in thin["cells"]} == {(2, 4)}


def test_a_named_server_must_answer() -> None:
    result = run_estimate(*BERT, *ON_8, "--server", "127.0.0.1:1")
    assert result.exit_code == 3
    assert "no server answers at 127.0.0.1:1" in result.stderr
    assert "--offline estimates from data sheets alone" in result.stderr
