from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.estimator import choice_of_plan, tuning
from tessera.benchmarks.estimator.bench_gpu_estimates import (
    JudgedPlan,
    judge_gpu_estimates,
    read_judged_plans,
)
from tessera.benchmarks.estimator.bench_plan_search import judge_plan_search
from tessera.benchmarks.estimator.collectives import artifact_s, run_collective_section
from tessera.benchmarks.estimator.drawn_settings import draw_setting
from tessera.benchmarks.estimator.latency import RecordedPlan, run_latency_section
from tessera.benchmarks.estimator.listed_stages import PlanList, list_divisions, list_switches
from tessera.benchmarks.estimator.memory import (
    DEFAULT_COPIES,
    TriedPlan,
    fit_copies,
    run_memory_section,
)
from tessera.benchmarks.estimator.recorded_cells import RecordedCell, read_cells
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.architectures.transformer import Transformer, transformer_graph
from tessera.estimator.cells import Setting, data_sheet_setting
from tessera.estimator.collectives import (
    CommRecord,
    Curve,
    LinkNetwork,
    LinkRates,
    curves_of,
    write_records,
)
from tessera.estimator.collectives.fitting import groups_of
from tessera.estimator.hardware import A10, A40, A100, H100, Hardware
from tessera.estimator.memory import States, UsableMemory
from tessera.estimator.planning.tuning import whole_space
from tessera.estimator.plans import Primitive, Shape, Training
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats
from tessera.simulator.data import data_dir
from tests.support.estimates import FlatNetwork

BYTES = "model,params,global_batch,dp_degree,mem_per_gpu_gib,status\n"
SEARCH = (
    "model,params,global_batch,gpu_type,num_nodes,gpus_per_node,mem_per_gpu_gib,stage_layers,"
    "stage_logical_shapes,stage_sharding\n"
)


def a_run(parts: Floats | None = None, **given: object) -> TriedPlan:
    """Return a run of one stage that needs 4 GiB, and 2, 1 and 3 GiB for one copy of each kind."""
    of_stages = (
        np.array([[[4.0, 2.0, 1.0, 3.0]], [[1.0, 2.0, 1.0, 0.0]]]) if parts is None else parts
    )
    fields: dict[str, object] = {
        "source": "x",
        "job": ("bert", "1.3B", 128),
        "hardware": A40,
        "gpus": 1,
        "group": ("bert", "fine"),
        "free": np.zeros(of_stages.shape[1], dtype=bool),
        "parameters_gib": 1.0,
        "measured_gib": 10.0,
    }
    return TriedPlan(parts=of_stages, **(fields | given))  # type: ignore[arg-type]


def test_the_fullest_stage_is_predicted() -> None:
    stages = np.array([[4.0, 2.0, 1.0, 3.0], [8.0, 0.0, 0.0, 2.0]])
    run = a_run(np.stack([stages, stages]))
    assert run.predicted_gib(np.array([1.0, 0.0, 0.0])) == 8.0
    assert run.predicted_gib(np.array([1.0, 0.0, 1.0])) == 10.0
    assert run.predicted_gib(np.array([4.0, 0.0, 0.0])) == 12.0


def test_free_sharding_divides_weights_only_if_they_do_not_fit() -> None:
    copies = np.array([1.0, 0.0, 1.0])
    tight = a_run(10 * a_run().parts, free=np.array([True]))
    assert tight.predicted_gib(copies) == 30.0
    assert replace(tight, free=np.array([False])).predicted_gib(copies) == 90.0
    assert a_run(free=np.array([True])).predicted_gib(copies) == 9.0


def test_fitting_recovers_the_copies_that_made_the_measurements() -> None:
    rng = np.random.default_rng(3)
    truth = np.array([0.7, 0.0, 1.3])
    runs = [a_run(rng.uniform(1, 9, (2, 3, 4))) for _ in range(40)]
    runs = [replace(run, measured_gib=run.predicted_gib(truth)) for run in runs]
    runs[0] = replace(runs[0], measured_gib=500.0)  # one absurd row changes nothing
    assert fit_copies(runs, rounds=20) == pytest.approx(truth, abs=0.02)


def test_copies_are_not_negative() -> None:
    runs = [a_run(np.full((2, 1, 4), x), measured_gib=x / 2) for x in (1.0, 2.0, 3.0)]
    assert (fit_copies(runs) >= 0).all()
    assert fit_copies(runs).sum() < DEFAULT_COPIES.sum()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "history").mkdir()
    rows = [
        ("bert", "1.3B", 128, 1, "", "infeasible"),
        ("bert", "1.3B", 128, 2, "", "infeasible"),
        ("bert", "1.3B", 128, 4, "13.8", "ok"),
        ("bert", "1.3B", 128, 8, "", "infeasible"),
        ("bert", "1.3B", 256, 1, "", "infeasible"),
        ("bert", "1.3B", 256, 4, "15.7", "ok"),
        ("bert", "6.7B", 128, 4, "", "infeasible"),
    ]
    lines = "\n".join(",".join(map(str, row)) for row in rows)
    (tmp_path / "dp_memory.csv").write_text(BYTES + lines)
    searched = [
        "bert,1.3B,128,a40,1,1,33.0,0-5,1x1,free",
        "bert,1.3B,128,a40,1,2,20.1,0-2|3-5,1x1|1x1,free|batch0",
        "bert,1.3B,256,a40,1,1,,0-5,1x1,free",
    ]
    (tmp_path / "history" / "alpa_search.csv").write_text(SEARCH + "\n".join(searched))
    return tmp_path


def test_rows_without_memory_figures_are_skipped_and_counted(small: Path) -> None:
    figures = run_memory_section(small, [0]).figures
    assert figures["left_out_above_a_fit"] == 1
    assert figures["left_out_ran_elsewhere"] == 1
    assert figures["left_out_untried"] == 1
    assert figures["oom_rows"] == 10 - 3
    assert figures["memory_rows"] == 4


def test_calibration_jobs_are_not_judged(small: Path) -> None:
    section = run_memory_section(small, range(4))
    judged = section.figures["oom_judged_rows"]
    assert isinstance(judged, float)
    assert 0 < judged < 7


@pytest.mark.full
def test_measured_memory_is_predicted_within_fifteen_percent() -> None:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "history").is_dir():
        pytest.skip("the Arena data set is not there (TESSERA_DATA)")
    figures = run_memory_section(folder / "arena", range(1)).figures
    assert figures["memory_rows"] == 278
    assert figures["memory_mape"] <= 0.15
    assert figures["memory_mape"] < figures["memory_mape_parameters"]
    assert figures["oom_accuracy"] >= 0.95


SIZES = [2**k for k in range(4, 31, 2)]


def a_table(
    kind: Hardware, primitive: Primitive, size: int, nodes: int, slower: float
) -> list[CommRecord]:
    """Return records on two nodes of two GPUs, ``slower`` times as long as by the data sheets."""
    row = CommRecord(
        primitive=primitive,
        gpu_type=kind.name,
        network="default",
        num_nodes=2,
        gpus_per_node=2,
        group_size=size,
        group_nodes=nodes,
        group_gpus_per_node=size // nodes,
        num_groups=4 // size,
        bytes=1,
        time_s=1.0,
    )
    (curve,) = curves_of([row])
    network = LinkNetwork(hardware=kind, shape=curve.layout.machine, rates=LinkRates.of(kind))
    places = groups_of([curve.layout] * len(SIZES))
    seconds = slower * network.seconds(primitive, np.array(SIZES, dtype=np.float64), places)
    return [
        CommRecord(**{**_fields(row), "bytes": b, "time_s": float(t)})
        for b, t in zip(SIZES, seconds, strict=True)
    ]


def _fields(row: CommRecord) -> dict[str, object]:
    return {name: getattr(row, name) for name in CommRecord.__dataclass_fields__}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> EstimatorSection:
    """Judge predictions of two types that are slower than their data sheets."""
    folder = tmp_path_factory.mktemp("tables")
    kinds = ((A10, 3.0), (A40, 2.5))
    places = ((2, 1), (2, 2), (4, 2))
    collectives = [p for p in Primitive if p is not Primitive.SEND]
    rows = [
        row
        for (kind, slower), primitive, (size, nodes) in product(kinds, collectives, places)
        for row in a_table(kind, primitive, size, nodes, slower)
    ]
    write_records(folder / "comm.csv", rows)
    return run_collective_section(folder, [0, 1])


def test_held_back_tables_generated_from_links_are_predicted(found: EstimatorSection) -> None:
    figures = found.figures
    # 0 would mean that the predicted tables were known
    assert 1e-6 < figures["collectives_sizes_error"] < 0.1
    assert 1e-6 < figures["collectives_layouts_error"] < 0.2
    assert figures["collectives_layouts_error"] < figures["collectives_sheet_layouts_error"]
    assert figures["collectives_sheet_layouts_error"] == pytest.approx(0.63, abs=0.05)
    low, high = sorted([figures["collectives_sizes_error"], figures["collectives_layouts_error"]])
    assert low <= figures["collectives_median_error"] <= high


def test_every_table_is_held_back_once_completely_and_a_share_of_its_sizes_per_seed(
    found: EstimatorSection,
) -> None:
    assert found.figures["collectives_layouts_rows"] == 24 * len(SIZES)
    assert found.figures["collectives_sizes_rows"] == 2 * 24 * int(0.3 * len(SIZES))
    assert {row["section"] for row in found.rows} == {"collectives"}
    parts = {str(row["part"]) for row in found.rows}
    assert parts == {"sizes", "layouts", "new layouts", "unseen gpu"}


def test_the_artifacts_rule_is_linear_within_the_table_and_uses_multiples_above_it() -> None:
    (curve,) = curves_of(a_table(A10, Primitive.ALL_REDUCE, 2, 1, 1.0))
    known = Curve(
        layout=curve.layout,
        payload_bytes=np.array([10.0, 20.0]),
        seconds=np.array([1.0, 3.0]),
    )
    payload = np.array([5.0, 15.0, 20.0, 40.0, 55.0])
    assert artifact_s(known, payload).tolist() == [1.0, 2.0, 3.0, 6.0, 8.0]


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.night), 9])
def test_held_back_collectives_of_the_published_tables_are_within_ten_percent(stride: int) -> None:
    folder = data_dir()
    if folder is None:
        pytest.skip("no published data: set TESSERA_DATA")
    figures = run_collective_section(folder / "arena", [0], stride=stride).figures
    assert figures["collectives_median_error"] <= 0.1
    assert figures["collectives_layouts_error"] <= 0.1
    assert figures["collectives_sizes_error"] <= figures["collectives_small_sizes_error"] <= 0.1


def a_row(**changed: object) -> str:
    row: dict[str, object] = {
        "name": "gpt",
        "layers": 24,
        "hidden": 1_024,
        "sequence": 1_024,
        "head": 64,
        "batch": 16,
        "accumulation": 2,
        "checkpointing": False,
        "threads": 0,
    }
    return json.dumps(row | changed)


def plans_of(folder: Path, *rows: str) -> list[JudgedPlan]:
    measured = folder / "measured.jsonl"
    measured.write_text("\n".join(["{}", "{}", *rows]), encoding="utf-8")
    return read_judged_plans(measured, H100)


def test_a_plan_is_estimated_from_its_sizes_and_plans_of_the_host_are_left_out(
    tmp_path: Path,
) -> None:
    ran = a_row(iter_time_s=0.1, peak_bytes=16e9)
    (plan,) = plans_of(tmp_path, ran, a_row(threads=4, iter_time_s=1.0, peak_bytes=1.0))
    assert plan.estimate is not None
    assert plan.estimate.micro_batches == 2
    assert plan.time_error == pytest.approx(plan.estimate.iter_time_s / 0.1 - 1)
    estimated = max(plan.estimate.memory_bytes) - UsableMemory().context_bytes
    assert plan.memory_error == pytest.approx(estimated / 16e9 - 1)


def test_a_plan_that_ran_out_of_memory_takes_forever_and_is_not_expected_to_fit(
    tmp_path: Path,
) -> None:
    (plan,) = plans_of(tmp_path, a_row(sequence=8_192, accumulation=1, out_of_memory=True))
    assert (plan.measured_s, plan.estimated_s) == (math.inf, math.inf)
    assert not plan.is_judged


def test_no_plan_of_the_stored_measurements_is_left_out_and_memory_is_not_foretold_too_low() -> (
    None
):
    report = judge_gpu_estimates()
    figures = report.figures
    judged = [row for row in report.table if row["time_error"] != "-"]
    assert len(judged) == figures["points_h200"] + figures["points_h100"] == 53
    assert len(report.table) == 53 + figures["ran_out_of_memory"]
    assert min(float(row["memory_error"]) for row in judged) > -0.05
    assert figures["fits_wrong"] == 0


NETWORK = FlatNetwork(across_bytes_per_s=1.0)


def a_recorded_plan(data: list[int], tensor: list[int], **given: Floats) -> RecordedPlan:
    """Return a plan whose stages send 8 bytes each."""
    stages = len(data)
    nothing = np.zeros(stages)
    fields = {
        "forward_s": nothing,
        "backward_s": nothing,
        "sync_s": nothing,
        "update_s": nothing,
        "handed_bytes": np.array([8.0] * (stages - 1) + [0.0]),
    }
    return RecordedPlan(
        group="g",
        model="bert",
        params="1.3B",
        iter_time_s=1.0,
        data=np.array(data),
        tensor=np.array(tensor),
        **(fields | given),
    )


@pytest.mark.parametrize(
    ("data", "tensor", "there", "back"),
    [
        ([2, 2], [1, 1], 8, 8),  # halves in turn
        # the whole for each tensor part; half of the samples each on the way back
        ([2, 1], [1, 2], 16, 8),
        ([1, 2], [2, 1], 8, 16),
        ([1, 1], [2, 2], 16, 8),  # each partner sends back a part
    ],
)
def test_transfers_between_stages_with_unlike_degrees_take_turns(
    data: list[int], tensor: list[int], there: float, back: float
) -> None:
    transfers_s = a_recorded_plan(data, tensor).transfers_s(NETWORK)
    assert [x.tolist() for x in transfers_s] == [[there, 0.0], [back, 0.0]]


def test_an_iteration_is_rebuilt_as_the_artifact_does() -> None:
    plan = a_recorded_plan(
        [1, 1, 1],
        [1, 1, 1],
        forward_s=np.array([1.0, 2.0, 1.0]),
        sync_s=np.array([1.0, 0.0, 3.0]),
        backward_s=np.array([2.0, 2.0, 2.5]),
        update_s=np.array([0.5, 0.25, 0.0]),
    )
    assert plan.rebuilt_s(None) == 10.5 + 15 * 4.0 + 4.0 + 0.5
    assert plan.rebuilt_s(NETWORK) == plan.rebuilt_s(None) + 2 * 16 + 15 * 16
    phases = 4.0 + 15 * 2.0 + 6.5 + 15 * 2.5
    assert plan.two_phases_s(NETWORK) == phases + 2 * (16 + 15 * 8) + 4.0 + 0.5


def test_recorded_plans_are_rebuilt_within_five_percent() -> None:
    figures = run_latency_section(arena_folder(), range(1)).figures
    assert figures["latency_plans"] == 615
    assert figures["latency_median_error"] <= 0.05
    assert figures["latency_median_error_without_transfer"] > figures["latency_median_error"]


def arena_folder() -> Path:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "history").is_dir():
        pytest.skip("the Arena data set is not there (TESSERA_DATA)")
    return folder / "arena"


@pytest.fixture(scope="module")
def folder() -> Path:
    found = data_dir()
    if found is None or not (found / "arena" / "history" / "cell_plans.csv").is_file():
        pytest.skip("the Arena artifact's cell_plans.csv is not here; see docs/results/method.md")
    return found / "arena"


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[RecordedCell]:
    return read_cells(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cell_plans\.csv"):
        read_cells(tmp_path)


def test_measurement_groups_of_one_cell_are_merged(cells: list[RecordedCell]) -> None:
    assert len(cells) == 9
    assert sum(len(cell.ends) for cell in cells) == 647
    assert {cell.groups for cell in cells} >= {("8d", "8d_2"), ("16d_moe",)}


def test_plans_are_rows_of_the_candidates(cells: list[RecordedCell]) -> None:
    for cell in cells:
        space = whole_space(cell.candidates, cell.gpus, cell.stages)
        assert tuning.kept_plans(space, cell).all()
        assert (cell.candidates.dp[cell.rows] == np.where(cell.data_parallel, 2, 1)).all()


def test_kernel_times_of_layers_add_up_to_those_of_stages(cells: list[RecordedCell]) -> None:
    for cell in cells:
        layers = np.concatenate([[0.0], cell.kernels_of_layers(True).cumsum()])
        stages = (layers[cell.ends] - layers[cell.starts])[cell.data_parallel]
        assert stages == pytest.approx(cell.kernels_s[cell.data_parallel], rel=0.03)


@pytest.mark.parametrize("load", [choice_of_plan.learned_compute, choice_of_plan.recorded_roofline])
def test_no_choice_depends_on_times_of_the_cell_that_is_judged(
    cells: list[RecordedCell], load: choice_of_plan.Load
) -> None:
    for k, cell in enumerate(cells):
        nothing = np.full_like(cell.kernels_s, np.nan)
        blind = replace(
            cell,
            iter_time_s=np.full_like(cell.iter_time_s, np.nan),
            kernels_s=nothing,
            comm_s=nothing,
            sync_s=nothing,
        )
        others = [*cells[:k], blind, *cells[k + 1 :]]
        assert (load(blind, others) == load(cell, cells)).all()
        assert choice_of_plan.proxy_plan(blind, load(blind, others)) == choice_of_plan.proxy_plan(
            cell, load(cell, cells)
        )
        latency = choice_of_plan.latency_of_candidates(blind, others)
        assert np.isfinite(latency.worst_s).all()


def test_proxies_come_close_to_the_best_plans(folder: Path) -> None:
    figures = choice_of_plan.run_plan_section(folder, [0]).figures
    assert figures["proxy_share"] >= 0.95
    assert figures["proxy_share_any"] < figures["proxy_share_even"] < figures["proxy_share"]
    assert figures["proxy_share_searched"] >= figures["proxy_share"]


def test_pruned_spaces_keep_good_plans_and_are_small(folder: Path) -> None:
    figures = tuning.run_tuning_section(folder, [0]).figures
    assert figures["tuning_quality"] >= 0.97
    assert figures["tuning_reduction"] >= 5
    wider = [figures[f"tuning_reduction_slack_{x}"] for x in ("1.1", "1.2", "1.3")]
    assert wider == sorted(wider, reverse=True)


def four_blocks_on_four_gpus() -> Setting:
    """Return six layers, of which the first and the last are no blocks, and six samples."""
    graph = transformer_graph(
        Transformer(name="small", layers=4, hidden=64, heads=4, sequence=64, vocabulary=512)
    )
    assert len(graph) == 6
    shape = Shape(nodes=1, gpus_per_node=4)
    return data_sheet_setting(graph, Training(global_batch=6), A100, shape, States())


def test_all_divisions_of_a_small_model_are_listed_once() -> None:
    setting = four_blocks_on_four_gpus()
    counts = {
        degree: [(stages.chunks, len(stages.rows)) for stages in list_divisions(setting, degree)]
        for degree in (1, 2, 3, 4)
    }
    # One stage: dp4, and dp2 tp2 and tp4, each with and without sequence parallelism.
    # Two stages: five cuts, two GPUs each, as dp2, tp2, or tp2 with sequence parallelism.
    # Three stages: ten pairs of cuts, and any stage may have two GPUs. Four stages: ten triples.
    # Two chunks are possible for two stages only, since each has at least one of the four blocks.
    assert counts == {1: [(1, 5)], 2: [(1, 45), (2, 3)], 3: [(1, 90)], 4: [(1, 10)]}
    for degree in counts:
        for stages in list_divisions(setting, degree):
            assert len(np.unique(stages.rows, axis=0)) == len(stages.rows)
    assert len(list(list_switches(setting))) == 4 * 4 * 3  # micro-batches of 6, 3, 2 and 1 samples


def test_the_fastest_listed_plan_is_the_fastest_of_all_that_fit() -> None:
    setting = draw_setting(np.random.default_rng(8))
    (stages, *_) = list_divisions(setting, 2)
    for switches in list(list_switches(setting))[::5]:
        plans = PlanList(setting, stages, stages.candidates, *switches)
        prices = [price for i in range(len(plans.rows)) if (price := plans.price(i)) is not None]
        times_s = [price.iter_time_s for price in prices if price.overflow is None]
        best = plans.fastest(np.inf)
        assert (best.iter_time_s if best else np.inf) == min(times_s, default=np.inf)


def test_a_small_run_compares_old_and_listed_plans() -> None:
    figures = judge_plan_search(cases=1).figures
    assert figures["exhaustive_cases"] == 1
    assert figures["cells_compared"] >= 1
    zero_figures = ("worse_than_old", "worse_than_exhaustive", "infeasible_but_feasible")
    assert all(figures[name] == 0 for name in zero_figures)
    assert "models_jax" not in figures
