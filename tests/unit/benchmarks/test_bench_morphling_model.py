"""The benchmark of performance models on a small table of measurements."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.benchmarks.papers.bench_morphling_model import judge_performance_models
from tessera.benchmarks.papers.morphling_model.artifact import (
    MIB_PER_MS,
    ArtifactParameters,
    artifact_parts_s,
    fit_artifact,
)
from tessera.benchmarks.papers.morphling_model.judging import split_records
from tessera.benchmarks.papers.morphling_model.records import (
    FIGURE_SET,
    read_facts,
    read_records,
    with_micro_batch,
)
from tessera.estimator.reconfiguration.configurations import ConfigurationTable, MachineRates
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.errors import InvalidInput
from tessera.simulator.data import MissingData
from tests.support.configurations import a_configuration, a_table, a_transformer, an_offloaded

VIT = ArtifactParameters(
    k_bwd=2.118846909,
    k_sync=1.623044014,
    k_opt=1e-11,
    k_os_offload=2.626794104e-3,
    k_const=7.53543924e-3,
    k_off=16.6507081e-3,
    k_swap=18.44163169e-3,
)
"""The artifact's published parameters of ViT, in seconds."""
VIT_RATES = MachineRates(
    intra_bytes_per_s=34.057018390132875 * MIB_PER_MS,
    inter_bytes_per_s=20 * MIB_PER_MS,
    pcie_bytes_per_s=64 * MIB_PER_MS,
)


def test_the_artifacts_formulas_give_its_published_predictions() -> None:
    vit = a_transformer(parameters=81.97064971923828 * 2**20, forward_s_per_sample=0.04 / 64)
    given = {"facts": vit, "rates": VIT_RATES, "global_batch": 64}
    table = a_table(
        a_configuration(1, **given),
        a_configuration(8, **given),
        a_configuration(4, checkpointing=True, **given),
        an_offloaded(1, **given),
        an_offloaded(8, **given),
    )

    # Columns peer_pred_ms of validation.csv.
    published_ms = [150.7288, 52.3455, 73.5853, 231.4574, 77.0058]
    assert 1000 * artifact_parts_s(table, VIT)[0] == pytest.approx(published_ms, rel=1e-4)


def test_the_artifacts_model_fits_runs_that_follow_it() -> None:
    configurations = [a_configuration(n) for n in (1, 2, 4, 8)]
    configurations += [an_offloaded(n) for n in (1, 2, 4, 8)]
    true = replace(VIT, k_opt=1e-4)
    parts = artifact_parts_s(ConfigurationTable.of(configurations), true)
    runs = [
        MeasuredRun(configuration=c, iter_time_s=t, busy_s=b, update_s=u)
        for c, t, b, u in zip(configurations, *(part.tolist() for part in parts), strict=True)
    ]

    fitted = artifact_parts_s(ConfigurationTable.of(configurations), fit_artifact(runs))

    assert fitted[0] == pytest.approx(parts[0], rel=0.02)


MODELS = {
    "vit": (86e6, 64, 768, 512, 12, "40"),
    "roberta": (355e6, 64, 1024, 512, 24, "480"),
    "llama7": (6.7e9, 8, 4096, 2048, 32, "3"),
    "llama30": (33e9, 4, 5120, 2048, 40, ""),
}


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def a_row(
    model: str, family: str, placement: str, time_s: float, **fields: object
) -> dict[str, object]:
    row: dict[str, object] = {
        "model": model,
        "exec_plan_raw": family,
        "plan_family": family,
        "pp": 1,
        "tp": 1,
        "dp": sum(map(int, placement)),
        "placement": placement,
        "cpu_threads_per_gpu": "",
        "global_batch": MODELS[model][1],
        "feasible": 1,
        "iter_time_s": time_s,
        "forward_ms": "",
        "overlap_sync_ms": "",
        "optimize_ms": "",
        "note": "",
    }
    return row | fields


def a_validation_row(split: str, plan: str, gpus: int, time_ms: float) -> dict[str, object]:
    return {
        "model": "vit",
        "split": split,
        "plan_label": plan,
        "exec_plan_trace": plan,
        "pp": 1,
        "tp": 1,
        "dp": gpus,
        "num_nodes": 1,
        "gpus_per_node": gpus,
        "num_gpus": gpus,
        "cpu_threads_per_gpu": "1.0",
        "global_batch": 64,
        "alpha_fwd": "1.0",
        "alpha_bwd": "1.0",
        "forward_ms_input": 40 / gpus,
        "tcc_ms": time_ms / 2,
        "topt_ms": 10,
        "iter_ms_measured": time_ms,
        "peer_pred_ms": 1.1 * time_ms,
        "config_in_fit": int(gpus == 8),
        "note": "",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of measurements: two models that shrink with the GPUs, and some defects."""
    columns = ("param_count", "global_batch", "val_hidden", "val_seq", "val_layers")
    models = [
        {"model": name, **dict(zip(columns, sizes, strict=True)), "val_forward_ms_1gpu": forward}
        for name, (*sizes, forward) in MODELS.items()
    ]
    write_csv(tmp_path / "models.csv", models)
    rows = [
        a_row(model, family, placement, base_s / sum(map(int, placement)) + extra_s)
        for model, base_s in (("vit", 0.12), ("roberta", 1.4))
        for family, extra_s in (("dp_ga", 0.04), ("zero2_dp", 0.045), ("zero_offload", 0.2))
        for placement in ("2", "4", "8", "44", "2222")
    ]
    rows += [
        a_row("vit", "dp_gc", "35", 0.4),
        a_row("roberta", "dp_ga", "1", 0.7, note="suspect_roberta_1gpu_not_slower_than_2gpu"),
        a_row("llama7", "zero_offload", "1", 0.0, feasible=0),
    ]
    write_csv(tmp_path / "measured.csv", rows)
    write_csv(
        tmp_path / "validation.csv",
        [a_validation_row("fit", "ga", gpus, 150 / gpus + 20) for gpus in (2, 4, 8)]
        + [a_validation_row("validate", "ga", gpus, 150 / gpus + 20) for gpus in (1, 4, 8)],
    )
    return tmp_path


def test_exactly_the_listed_defects_are_left_out(folder: Path) -> None:
    records, left = read_records(folder)

    assert len(records) == 30
    assert [(one.model, one.label) for one in left] == [
        ("vit", "dp_gc on 35"),
        ("roberta", "dp_ga on 1"),
        ("llama7", "zero_offload on 1"),
    ]


def test_no_fitted_run_is_scored(folder: Path) -> None:
    records, _ = read_records(folder)
    fitted, others = split_records(records)

    labels = {(record.model, record.label) for record in fitted}
    assert len(labels) == 14
    assert labels.isdisjoint((record.model, record.label) for record in others)
    assert len(fitted) + len(others) == len(records)


def test_figures_compare_the_three_models_and_list_what_was_not_scored(folder: Path) -> None:
    report = judge_performance_models(folder)

    assert (report.figures["points"], report.figures["fitted_runs"]) == (16, 14)
    assert report.figures["left_out"] == 3
    assert report.figures["authors_published_mape"] == pytest.approx(0.1)
    assert 0 < float(report.figures["mape"]) <= float(report.figures["worst"])
    of = [row["of"] for row in report.table]
    assert (of.count("fitted"), of.count("left out")) == (14, 3)
    scored = [row for row in report.table if row["of"] == "measured"]
    assert sum(int(row["points"]) for row in scored) == 16


def test_forward_passes_of_a_larger_model_follow_from_its_parameters(folder: Path) -> None:
    facts = read_facts(folder / "models.csv")

    assert facts["llama7"].forward_s_per_sample == pytest.approx(
        3 / 8
    )  # the data are in seconds here
    assert facts["vit"].forward_s_per_sample == pytest.approx(0.04 / 64)
    assert facts["llama30"].forward_s_per_sample == pytest.approx(3 / 8 * 33 / 6.7)
    assert (facts["llama30"].hidden, facts["llama30"].layers) == (6656, 60)
    assert facts[FIGURE_SET].parameters == facts["llama7"].parameters


def test_a_micro_batch_divides_only_3d_plans(folder: Path) -> None:
    records, _ = read_records(folder)
    pipeline, tensor = (
        replace(
            records[0],
            run=replace(records[0].run, configuration=a_configuration(4, pp=pp, tp=tp, dp=2)),
        )
        for pp, tp in ((2, 1), (1, 2))
    )

    assert with_micro_batch(records[0], 1) is records[0]
    assert with_micro_batch(pipeline, 2).run.configuration.micro_batches == 4
    assert with_micro_batch(pipeline, 2).run.configuration.accumulation == 1
    assert with_micro_batch(tensor, 2).run.configuration.micro_batches == 1
    assert with_micro_batch(tensor, 2).run.configuration.accumulation == 4


def test_missing_data_skip_the_benchmark_and_a_wrong_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))

    with pytest.raises(MissingData, match="--data"):
        judge_performance_models()
    with pytest.raises(InvalidInput, match=r"measured\.csv"):
        judge_performance_models(tmp_path)
