"""The benchmark that repeats Morphling's figures, on a few records."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.papers.bench_morphling_figures import repeat_morphling_figures
from tessera.benchmarks.papers.morphling_figures.pairs import share_gpus, without_defect
from tessera.benchmarks.papers.morphling_figures.plans import MeasuredPlan
from tessera.benchmarks.papers.morphling_figures.records import (
    FIGURE_SET,
    Record,
    choose_fitted,
    read_facts,
    read_records,
    with_micro_batch,
)
from tessera.benchmarks.papers.morphling_figures.runs import sweep_figures, sweep_rows
from tessera.benchmarks.papers.morphling_figures.scenes import (
    ResourceLimits,
    SceneJob,
    decide_cells,
    measured_s,
    records_within,
)
from tessera.benchmarks.papers.morphling_figures.shrinking import (
    ShrinkingStep,
    describe_cell,
    figure_3_figures,
    figure_7_figures,
    largest_gap,
    memory_mistakes,
    runs_without,
    shrink_by_measurements,
)
from tessera.benchmarks.schedulers.bench_load import RunsByPoint
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ZeroStage
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Cell, EstimateSource, Workload
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.data import MissingData
from tests.support.configurations import a_configuration

SIZES = {
    "gpt2": ("1.5B", 16),
    "llama7b_bsz16": ("7B", 16),
    "roberta": ("355M", 64),
    "t5_3B": ("3B", 4),
}
ONE_GPU = ResourceLimits(name="1 GPU", nodes=1, gpus=1)
TWO_NODES = ResourceLimits(name="2 x 4 GPUs", nodes=2, gpus=4)


def a_record(
    model: str,
    plan: str,
    gpus: int,
    time_s: float,
    *,
    nodes: int = 1,
    pp: int = 1,
    cpus: int = 1,
    host_bytes: int = 10**9,
) -> EstimateRecord:
    """Return the measured time of a plan of the artifact."""
    params, batch = SIZES[model]
    return EstimateRecord(
        workload=Workload(model=model, params=params, global_batch=batch),
        cell=Cell(gpu_type="a800", gpus=gpus, pipeline_degree=pp, plan=plan, nodes=nodes),
        iter_time_s=time_s,
        source=EstimateSource.MEASURED,
        cpus=cpus,
        host_bytes=host_bytes,
    )


def a_step(chosen_s: float, *best_s: float, limits: ResourceLimits = ONE_GPU) -> ShrinkingStep:
    """Return a step whose fitting plans have these times."""
    fitting = tuple(a_record("gpt2", "gc", 1, time_s) for time_s in best_s)
    return ShrinkingStep(
        limits=limits,
        cell=fitting[0].cell if fitting and math.isfinite(chosen_s) else None,
        chosen_s=chosen_s,
        fitting=fitting,
    )


@pytest.mark.parametrize(
    ("plan", "gpus", "family", "degrees"),
    [
        ("244", 32, "3d", (2, 4, 4)),
        ("141", 4, "tp", (1, 4, 1)),
        ("tp-ga", 3, "tp", (1, 3, 1)),
        ("zero-dp", 8, "zero-dp", (1, 1, 8)),
        ("zero-offload-gc-cpu4", 2, "zero-offload-gc", (1, 1, 2)),
    ],
)
def test_the_code_of_a_plan_gives_its_family_and_degrees(
    plan: str, gpus: int, family: str, degrees: tuple[int, int, int]
) -> None:
    measured = MeasuredPlan.of(a_record("llama7b_bsz16", plan, gpus, 1.0))

    assert measured.family == family
    assert (measured.pp, measured.tp, measured.dp) == degrees
    assert measured.offload == plan.startswith("zero-offload")
    assert measured.checkpointing == ("gc" in plan)
    assert (measured.zero is ZeroStage.GRADIENTS) == plan.startswith("zero")


def test_gpus_are_spread_evenly_over_nodes() -> None:
    assert MeasuredPlan.of(a_record("gpt2", "ga", 8, 1.0, nodes=3)).node_gpus == (3, 3, 2)


@pytest.mark.parametrize(
    ("plan", "gpus", "nodes", "runs"),
    [
        ("111", 1, 1, False),  # 16 bytes of 7 billion parameters are more than 80 GB
        ("zero-offload-gc-cpu2", 1, 1, True),
        ("141", 4, 1, True),
        ("182", 16, 4, False),  # tensor parts over nodes of 4 GPUs
        ("zero-offload-gc-cpu2", 32, 4, False),  # more replicas than samples
    ],
)
def test_the_memory_model_says_which_plans_run(
    plan: str, gpus: int, nodes: int, runs: bool
) -> None:
    record = a_record("llama7b_bsz16", plan, gpus, 1.0 if runs else math.inf, nodes=nodes)

    assert MeasuredPlan.of(record).runs() is runs
    assert memory_mistakes([record]) == 0
    assert memory_mistakes([replace(record, iter_time_s=math.inf if runs else 1.0)]) == 1


def test_the_fastest_plan_that_fits_is_chosen_and_none_if_host_memory_is_short() -> None:
    offload = a_record("t5_3B", "zero-offload", 1, 4.0, cpus=8, host_bytes=48 * 10**9)
    records = [
        a_record("t5_3B", "tp-ga", 4, 0.8),
        a_record("t5_3B", "tp-ga", 8, 0.5, nodes=2),
        offload,
    ]
    job = [SceneJob(workload=offload.workload)]
    little = replace(ONE_GPU, host_bytes=10 * 10**9)

    assert decide_cells(TWO_NODES, job, records) == [records[1].cell]
    assert decide_cells(ONE_GPU, job, records) == [offload.cell]
    assert decide_cells(little, job, records) == [None]
    assert records_within(ONE_GPU, records) == [offload]
    assert records_within(little, records) == []
    assert records_within(TWO_NODES, records)[0] is records[1]
    assert measured_s(records[1].cell, records) == 0.5
    assert measured_s(None, records) == math.inf


def test_cpus_of_a_node_limit_the_choice() -> None:
    slow, fast = (
        a_record("llama7b_bsz16", f"zero-offload-gc-cpu{cpus}", 1, time_s, cpus=cpus)
        for cpus, time_s in ((2, 66.0), (4, 46.0))
    )
    few, many = (replace(ONE_GPU, cpus=cpus) for cpus in (2, 4))

    steps = shrink_by_measurements([few, many], [slow, fast])

    assert [step.chosen_s for step in steps] == [66.0, 46.0]
    assert [step.regret for step in steps] == [0.0, 0.0]


def test_regret_is_the_lost_share_of_the_best_speed() -> None:
    assert a_step(1.25, 1.0, 1.25).regret == pytest.approx(0.2)
    assert a_step(1.0, 1.0, 2.0).regret == 0.0
    assert a_step(math.inf, 1.0).regret == 1.0
    assert a_step(math.inf).regret == 0.0


def test_a_step_shows_the_best_speed_of_each_family() -> None:
    step = replace(
        a_step(1.0),
        fitting=(
            a_record("gpt2", "gc", 2, 1.0),
            a_record("gpt2", "gc", 1, 2.0),
            a_record("gpt2", "151", 5, 4.0),
        ),
    )

    assert step.speeds() == {"gc": 16.0, "tp": 4.0}
    assert largest_gap([step, a_step(math.inf)]) == 4.0
    assert step.row("3", "measured")["best"] == "gc on 2 x a800, 1 node"
    assert describe_cell(None) == "none"


def test_the_largest_regret_of_the_steps_counts() -> None:
    measured = [a_step(time_s, time_s) for time_s in (1.165, 1.803, 5.107, 66.0, 46.0)]
    honest = [a_step(1.2, 1.0), *measured[1:]]

    unseen = [a_step(1.0, 1.0), a_step(2.0, 1.0)]

    figures = figure_7_figures(honest, unseen, measured)

    assert figures["figure7_regret"] == pytest.approx(1 / 6)
    assert figures["figure7_mean_regret"] == pytest.approx(1 / 30)
    assert figures["figure7_unseen_regret"] == 0.5
    assert figures["figure7_measured_regret"] == 0.0
    assert figures["figure7_over_paper"] == 0.0
    assert figures["figure7_cpu_speedup"] == pytest.approx(66 / 46)


def test_the_runs_that_score_are_not_fitted() -> None:
    fitted = [
        Record(
            model=model,
            label=f"{model} on {gpus}",
            run=MeasuredRun(configuration=a_configuration(gpus), iter_time_s=1.0),
        )
        for model in ("llama7", "llama7b_bsz16")
        for gpus in (1, 4)
    ]

    assert [r.label for r in runs_without(fitted, 4)] == [
        "llama7 on 1",
        "llama7 on 4",
        "llama7b_bsz16 on 1",
    ]
    assert [r.label for r in runs_without(fitted)] == ["llama7 on 1", "llama7 on 4"]


@pytest.mark.parametrize(("other", "expected"), [((), 1), (("tp-ga",), 0)])
def test_offload_must_be_alone_and_then_fail(other: Sequence[str], expected: int) -> None:
    plans = ["zero-offload", *other]
    fitting = tuple(a_record("t5_3B", plan, 1, 4.0) for plan in plans)
    alone = replace(a_step(4.0), cell=fitting[0].cell, fitting=fitting)
    steps = [alone, a_step(math.inf)]

    figures = figure_3_figures({"t5_3B": steps, "t5": steps, "roberta": steps})

    assert figures["figure3_only_offload_runs"] == expected
    assert figures["figure3_offload_fails"] == 1


def test_two_jobs_share_four_gpus_by_their_speeds() -> None:
    roberta = [
        a_record("roberta", plan, gpus, time_s)
        for plan, gpus, time_s in (("ga", 1, 0.7), ("gc", 1, 1.8), ("ga", 2, 0.7), ("ga", 4, 0.4))
    ]
    t5 = [
        a_record("t5_3B", plan, gpus, time_s)
        for plan, gpus, time_s in (
            ("zero-offload", 2, 3.2),
            ("tp-ga", 3, 1.0),
            ("tp-ga", 4, 0.8),
        )
    ]

    ours, equal = share_gpus([roberta, t5]), share_gpus([roberta, t5], gpus_each=2)
    sound = share_gpus([without_defect(roberta), t5])

    assert ours.speedups == pytest.approx((0.4 / 0.7, 0.8))
    assert equal.speedups == pytest.approx((0.4 / 0.7, 0.25))
    assert sound.speedups == pytest.approx((0.4 / 1.8, 0.8))
    assert ours.total == pytest.approx(0.4 / 0.7 + 0.8)
    assert sound.row("sound")["choice"] == "gc on 1 x a800, 1 node; tp-ga on 3 x a800, 1 node"


def a_run(makespan_s: float, *jct_s: float) -> FinishedRun:
    """Return a run of jobs that arrived at 0."""
    return FinishedRun(
        figures={"makespan_s": makespan_s},
        arrival_s=np.zeros(len(jct_s)),
        end_s=np.array(jct_s),
        alone_s=np.ones(len(jct_s)),
        course={},
        gaps=np.zeros((0, 2)),
        node_gpus=[8],
        node_types=["a800"],
        segments=[],
    )


def test_sweeps_give_the_baselines_jct_over_ours_and_over_the_peers() -> None:
    found: RunsByPoint = {
        "load": {
            1.0: {"synergy": [a_run(60, 40)], "morphling": [a_run(60, 20)], "ilp:jct": [a_run(50, 10)]},
            2.0: {"synergy": [a_run(90, 60)], "morphling": [a_run(60, 20)], "ilp:jct": [a_run(60, 20)]},
        }
    }  # fmt: skip

    figures, rows = sweep_figures(found, "ilp:jct"), sweep_rows(found, "ilp:jct")

    assert figures["figure10_least_jct_ratio"] == pytest.approx(3.0)
    assert figures["figure10_most_jct_ratio"] == pytest.approx(4.0)
    assert figures["figure10_peer_least_jct_ratio"] == pytest.approx(2.0)
    assert figures["figure10_peer_most_jct_ratio"] == pytest.approx(3.0)
    assert figures["figure10_most_makespan_ratio"] == pytest.approx(1.5)
    assert figures["figure10_unfinished"] == 0
    assert [(row["what"], row["choice"]) for row in rows][:2] == [
        ("load 1", "synergy"),
        ("load 1", "morphling"),
    ]
    assert rows[1]["jct_over_ours"] == pytest.approx(2.0)


def test_missing_data_skip_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))

    with pytest.raises(MissingData, match="set TESSERA_DATA"):
        repeat_morphling_figures()


def test_a_published_policy_is_not_ours() -> None:
    with pytest.raises(InvalidInput, match="not ours"):
        repeat_morphling_figures(ours="fcfs")


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
    return tmp_path


def test_rows_with_a_defect_are_left_out(folder: Path) -> None:
    records = read_records(folder)

    assert len(records) == 30
    assert {record.model for record in records} == {"vit", "roberta"}
    assert {"dp_gc on 35", "dp_ga on 1"}.isdisjoint(record.label for record in records)


def test_seven_runs_of_each_model_are_fitted(folder: Path) -> None:
    fitted = choose_fitted(read_records(folder))

    assert len({(record.model, record.label) for record in fitted}) == 14


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
    records = read_records(folder)
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
