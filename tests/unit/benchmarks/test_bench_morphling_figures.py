"""The benchmark that repeats Morphling's figures, on a few records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.papers.bench_morphling_figures import repeat_morphling_figures
from tessera.benchmarks.papers.morphling_figures.demands import figure_2_figures, list_demands
from tessera.benchmarks.papers.morphling_figures.pairs import share_gpus, without_defect
from tessera.benchmarks.papers.morphling_figures.pictures import plot_choices, plot_demands
from tessera.benchmarks.papers.morphling_figures.plans import MeasuredPlan
from tessera.benchmarks.papers.morphling_figures.runs import (
    Row,
    sweep_figures,
    sweep_rows,
    table_4_figures,
)
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
from tessera.benchmarks.papers.morphling_model.records import Record
from tessera.benchmarks.schedulers.bench_load import RunsByPoint
from tessera.estimator.reconfiguration.fitting import MeasuredRun
from tessera.formulation.errors import InvalidInput
from tessera.formulation.execution_plan import ZeroStage
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Cell, EstimateSource, Workload
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.data import MissingData
from tessera.simulator.report.write import write_pictures
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


def test_more_tensor_parts_send_more_bytes_than_replicas() -> None:
    tensor, replicas = (
        MeasuredPlan.of(a_record("llama7b_bsz16", plan, 8, 1.0, pp=pp))
        for plan, pp in (("181", 1), ("811", 8))
    )
    tensor_price, replicas_price = tensor.price(), replicas.price()

    assert tensor_price is not None
    assert replicas_price is not None
    assert tensor.sent_bytes(tensor_price) > 4 * replicas.sent_bytes(replicas_price) > 0


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
            plan="3d",
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


def test_demands_are_those_of_the_fewest_gpus_of_each_family() -> None:
    records = [
        a_record("gpt2", "ga", 4, 1.0, cpus=4),
        a_record("gpt2", "ga", 2, 2.0, cpus=2),
        a_record("gpt2", "151", 5, 1.0, cpus=5),
        a_record("gpt2", "zero-offload", 1, 5.0, cpus=8, host_bytes=24 * 10**9),
        a_record("gpt2", "zero-dp", 1, math.inf),
    ]

    demands = list_demands(records)
    figures = figure_2_figures(demands)

    assert [(d.family, d.gpus) for d in demands] == [("ga", 2), ("tp", 5), ("zero-offload", 1)]
    assert all(0 < d.gpu_bytes < 80e9 for d in demands)
    assert figures["figure2_offload_host_ratio"] == 24.0
    assert figures["figure2_offload_cpus_ratio"] == 8 / 5
    assert figures["figure2_tensor_cpus_share"] == 5 / 8
    assert float(figures["figure2_tensor_sent_ratio"]) > 1


def a_run(makespan_s: float, *jct_s: float) -> FinishedRun:
    """Return a run of jobs that arrived at 0."""
    return FinishedRun(
        figures={"makespan_s": makespan_s},
        said="",
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


def test_table_4_states_the_deviation_from_the_paper() -> None:
    def a_row(trace: str, policy: str, jct_h: float, deviation: float) -> Row:
        row: Row = {"what": trace, "choice": policy, "jct_h": jct_h, "paper_jct_h": 0.96}
        return row | {f"{name}_vs_paper": deviation for name in ("jct", "p99", "makespan")}

    rows = [
        a_row(f"morphling-{trace}", policy, jct_h, deviation)
        for trace in ("base", "bp", "mt")
        for policy, jct_h, deviation in (("morphling", 0.72, -0.25), ("ilp:jct", 0.48, math.nan))
    ]

    figures = table_4_figures(rows, "ilp:jct")

    assert figures["table4_base_jct_vs_peer"] == pytest.approx(-1 / 3)
    assert figures["table4_mt_jct_vs_paper"] == pytest.approx(-0.5)
    assert figures["table4_bp_peer_jct_vs_paper"] == -0.25
    assert figures["table4_mean_deviation"] == figures["table4_largest_deviation"] == 0.25


def test_each_picture_is_a_file(tmp_path: Path) -> None:
    steps = [a_step(1.0, 1.0)]
    demands = list_demands([a_record("gpt2", "gc", 1, 1.0)])

    names = write_pictures([plot_demands(demands), plot_choices(steps, steps, 16)], tmp_path)

    assert [name[:11] for name in names] == ["01-figure-2", "02-figure-7"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_missing_data_skip_the_benchmark_and_another_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, other = tmp_path / "data", tmp_path / "other" / "morphling"
    for folder in (data, other):
        folder.mkdir(parents=True)
    (other / "measured.csv").touch()
    monkeypatch.setenv("TESSERA_DATA", str(data))

    with pytest.raises(MissingData, match="--data"):
        repeat_morphling_figures()
    with pytest.raises(InvalidInput, match="set TESSERA_DATA to"):
        repeat_morphling_figures(data=other)


def test_a_published_policy_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "morphling").mkdir()
    (tmp_path / "morphling" / "measured.csv").touch()
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))

    with pytest.raises(InvalidInput, match="not ours"):
        repeat_morphling_figures(ours="fcfs")
