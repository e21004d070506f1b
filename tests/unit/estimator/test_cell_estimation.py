"""Estimates of Cells, derived from models, GPU types and measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.cell_estimator import CellEstimate, Estimator
from tessera.estimator.cells import COARSE_LAYERS
from tessera.estimator.fingerprints import estimates_fingerprint
from tessera.estimator.gpu_counts import gpu_counts_of
from tessera.estimator.hardware import GIB
from tessera.estimator.hardware.cluster_types import catalogue_of, hardware_of
from tessera.estimator.measured_cells import measured_cells, measured_estimates
from tessera.estimator.models import known_models, model_of, read_model
from tessera.estimator.plans import shape_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.execution_plan import Offload, Precision, check_fits
from tessera.formulation.records.estimates import ClusterGpuType, MeasurementRecord, ModelSpec
from tessera.service.server.convert import estimates as convert
from tessera.service.server.convert.models import to_model
from tessera.service.server.settings.config import Config
from tessera.v1 import estimates_pb2 as pb
from tests.support.cells import with_cell

BERT = Workload(model="bert", params="1.3B", global_batch=256)
MINE = ModelSpec(
    model="mine",
    params="",
    architecture="{architecture: transformer, layers: 4, hidden: 256,"
    " heads: 4, sequence: 128, vocabulary: 1000}",
)
CELL = Cell(gpu_type="a100", gpus=1, pipeline_degree=1, plan="digest")
A100 = ClusterGpuType(gpu_type=GpuType(name="a100", memory_bytes=40 * GIB), node_gpus=4, gpus=16)


def an_estimator(*measurements: MeasurementRecord) -> Estimator:
    types = {"a100": hardware_of("t", A100, catalogue_of())}
    return Estimator(types, {BERT: model_of("w", BERT, ())}, measurements)


def a_measurement(iter_time_s: float, **changes: Any) -> MeasurementRecord:
    fields = {"workload": BERT, "gpus": 4, "nodes": 1, "iter_time_s": iter_time_s}
    return MeasurementRecord(**with_cell(fields | changes))


def test_a_published_model_has_cells_of_every_degree_with_their_uncertainty() -> None:
    cells = an_estimator().cells(BERT, "a100", 4, nodes=1)
    assert [c.record.cell.pipeline_degree for c in cells] == [1, 2, 4]
    for cell in cells:
        assert cell.price is not None
        assert cell.price.plan.pipeline_degree == cell.record.cell.pipeline_degree
        assert cell.record.iter_time_s == pytest.approx(cell.price.iter_time_s, rel=1e-6)
        assert cell.record.sd is not None
        assert 0.1 < cell.record.sd < 1.0
        assert (cell.record.source, cell.record.cell.nodes) == (EstimateSource.ANALYTIC, 1)


def test_the_plan_of_an_estimate_is_for_its_workload_shape_and_layers() -> None:
    for cell in an_estimator().cells(BERT, "a100", 8):
        plan, layers = cell.record.plan, len(model_of("w", BERT, ()).graph)
        assert plan is not None
        check_fits(plan, "plan", BERT, gpus=8, layers=layers)
        assert (plan.model, len(plan.shape)) == ("bert/1.3B", cell.record.cell.nodes)
        assert cell.record.cell.plan == plan.digest
        assert str(plan) in cell.record.provenance


def test_wider_shapes_are_estimated_up_to_the_nodes_of_the_cluster() -> None:
    def shapes(gpus: int, nodes: int | None) -> set[tuple[int, ...]]:
        cells = an_estimator().cells(BERT, "a100", gpus, [2], nodes=nodes)
        return {cell.record.plan.shape for cell in cells if cell.record.plan}

    assert shapes(8, None) == {(4, 4), (2,) * 4, (1,) * 8}
    assert shapes(8, 4) == {(4, 4), (2,) * 4}
    assert shapes(5, None) == {(4, 1)}
    assert shapes(12, None) == {(4,) * 3, (2,) * 6, (1,) * 12}


def test_replicas_always_have_equal_numbers_of_samples() -> None:
    odd = replace(BERT, global_batch=250)
    types = {"a100": hardware_of("t", A100, catalogue_of())}
    cells = Estimator(types, {odd: model_of("w", odd, ())}).cells(odd, "a100", 4)
    plans = [cell.record.plan for cell in cells if cell.record.plan is not None]
    assert {plan.global_batch for plan in plans} == {250}
    assert all(plan.micro_batch % stage.dp == 0 for plan in plans for stage in plan.stages)
    degrees = {plan.pipeline_degree: plan.stages[0] for plan in plans}
    assert degrees[1].dp < 4  # 250 samples cannot be shared by four replicas


def test_a_model_that_fits_on_no_type_is_infeasible_and_no_error() -> None:
    huge = replace(BERT, params="15B")

    def on_gpus_of(gib: int) -> CellEstimate:
        node_type = replace(A100, gpu_type=GpuType(name="a100", memory_bytes=gib * GIB))
        types = {"a100": hardware_of("t", node_type, catalogue_of())}
        (cell,) = Estimator(types, {huge: model_of("w", huge, ())}).cells(huge, "a100", 1)
        return cell

    # Gradients stay on the GPU: 30 GB of 15 billion parameters. All else can be in the host.
    fits, short = on_gpus_of(40), on_gpus_of(24)
    assert fits.price is not None
    assert fits.price.plan.offload is Offload.PARAMETERS
    assert (short.price, short.record.iter_time_s, short.record.sd) == (None, math.inf, None)
    assert "no plan fits in memory: stage 0 needs" in short.record.provenance


def test_a_plan_that_ran_out_of_memory_makes_way_for_the_best_that_needs_less() -> None:
    estimator = an_estimator()
    (best,) = estimator.cells(BERT, "a100", 4, [2], nodes=1)
    (other_degree,) = estimator.cells(BERT, "a100", 4, [1], nodes=1)
    (second,) = estimator.cells(BERT, "a100", 4, [2], nodes=1, exhausted=[best.record.cell])
    both = [best.record.cell, second.record.cell]
    (third,) = estimator.cells(BERT, "a100", 4, [2], nodes=1, exhausted=both)
    prices = [cell.price for cell in (best, second, third)]
    memory = [max(price.memory_bytes) for price in prices if price is not None]
    assert memory == sorted(memory, reverse=True)
    assert len({cell.record.cell.plan for cell in (best, second, third)}) == 3
    assert best.record.iter_time_s < second.record.iter_time_s < third.record.iter_time_s
    assert "2 plans ran out of memory here" in third.record.provenance
    (cell,) = estimator.cells(BERT, "a100", 4, [1], nodes=1, exhausted=both)
    assert (cell.price, cell.record.cell) == (other_degree.price, other_degree.record.cell)


def test_a_cell_is_infeasible_once_all_its_plans_ran_out_of_memory() -> None:
    small = replace(BERT, global_batch=2)
    types = {"a100": hardware_of("t", A100, catalogue_of())}
    estimator = Estimator(types, {small: model_of("w", small, ())})
    exhausted = list[Cell]()
    for _ in range(200):  # more than there are plans in order of memory
        (cell,) = estimator.cells(small, "a100", 2, [2], nodes=1, exhausted=exhausted)
        if cell.price is None:
            break
        assert cell.price.plan.precision is Precision.F16
        assert cell.record.cell not in exhausted
        exhausted.append(cell.record.cell)
    assert (cell.price, cell.record.iter_time_s) == (None, math.inf)
    assert len(exhausted) > 1
    assert f"{len(exhausted)} plans ran out of memory here: no other plan" in cell.record.provenance


def test_a_plan_that_ran_out_of_memory_elsewhere_is_still_searched() -> None:
    estimator = an_estimator()
    (best,) = estimator.cells(BERT, "a100", 4, [2], nodes=1)
    cell = best.record.cell
    for other in (replace(cell, gpu_type="v100"), replace(cell, gpus=2), cell.on(2)):
        (again,) = estimator.cells(BERT, "a100", 4, [2], nodes=1, exhausted=[other])
        assert again == best


def test_degrees_above_the_gpu_count_are_left_out() -> None:
    cells = an_estimator().cells(BERT, "a100", 2, [1, 2, 4], nodes=1)
    assert [c.record.cell.pipeline_degree for c in cells] == [1, 2]


def test_a_pipeline_deeper_than_the_coarse_layers_has_a_time_too() -> None:
    usual, deep = an_estimator().cells(BERT, "a100", 24, [8, COARSE_LAYERS + 8], nodes=6)
    assert deep.price is not None
    assert len(deep.price.plan.stages) == COARSE_LAYERS + 8
    assert 0.5 < deep.record.iter_time_s / usual.record.iter_time_s < 4


def test_a_measured_cell_corrects_similar_cells_and_reduces_their_uncertainty() -> None:
    before = an_estimator().cells(BERT, "a100", 4)
    slow = 1.5 * before[0].record.iter_time_s
    after = an_estimator(a_measurement(slow)).cells(BERT, "a100", 4)
    own, other = after[0].record, after[1].record
    assert own.iter_time_s == pytest.approx(slow, rel=0.05)
    assert other.iter_time_s > 1.25 * before[1].record.iter_time_s
    sds = [[cell.record.sd or math.inf for cell in cells] for cells in (after, before)]
    assert all(a < b for a, b in zip(*sds, strict=True))
    assert "calibrated on 1 measurements" in own.provenance


def test_measurements_outside_the_model_are_left_out() -> None:
    strange = [
        a_measurement(1.0, workload=replace(BERT, model="unknown")),
        a_measurement(1.0, gpu_type="abacus"),
        a_measurement(1.0, pipeline_degree=0),
        a_measurement(1.0, gpus=3, nodes=2),
    ]
    assert an_estimator(*strange).learned == 0


def test_runs_of_one_cell_count_as_one_by_their_median() -> None:
    runs = [a_measurement(s) for s in (2.0, 9.0, 3.0)] + [a_measurement(7.0, gpus=8, nodes=2)]
    assert [(r.cell.gpus, r.iter_time_s) for r in measured_cells(runs)] == [(4, 3.0), (8, 7.0)]
    first, second = measured_estimates(runs)
    assert (first.source, first.provenance) == (EstimateSource.MEASURED, "median of 3 runs here")
    assert first.sd is not None
    assert second.sd is not None
    assert first.sd < second.sd


def test_a_new_run_of_a_cell_moves_the_cell_to_the_end() -> None:
    runs = [a_measurement(1.0), a_measurement(2.0, gpus=8), a_measurement(1.0)]
    assert [r.cell.gpus for r in measured_cells(runs)] == [8, 4]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"architecture": "layers: [1"}, "m.architecture", "is neither JSON nor YAML"),
        ({"architecture": "just words"}, "m.architecture", "must map fields to values"),
        ({"architecture": "{layers: 2}"}, "m.architecture.architecture", "is missing"),
        (
            {"architecture": MINE.architecture.replace("4, hidden", "0, hidden")},
            "m.architecture.layers",
            "must",
        ),
        (
            {"architecture": MINE.architecture.replace("heads", "haeds")},
            "m.architecture.haeds",
            "unknown",
        ),
        ({"architecture": "{model_type: sphinx}"}, "m.architecture.model_type", "sphinx"),
        ({"state_bytes": 2.0}, "m.state_bytes", "weight and gradient alone need 4 in"),
    ],
)
def test_a_wrong_model_is_refused_by_the_field(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as wrong:
        read_model("m", replace(MINE, **changes))
    assert wrong.value.field == field


def test_a_hugging_face_configuration_is_accepted_as_a_model() -> None:
    text = (
        '{\t"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,'
        ' "n_positions": 1024, "architectures": ["GPT2LMHeadModel"]}'
    )
    model = read_model("m", replace(MINE, architecture=text, sequence=512, dtype="f16"))
    assert model.graph.dtype == "f16"
    assert model.graph.parameters == pytest.approx(124.4e6, rel=0.01)


def test_a_user_model_takes_precedence_over_a_published_one_of_its_name() -> None:
    own = replace(MINE, model="bert", params="1.3B", micro_batches=4)
    assert len(model_of("w", BERT, [own]).graph) < len(model_of("w", BERT, []).graph)
    assert model_of("w", BERT, [own]).training.at(2).micro_batches == 2


def test_an_unknown_model_is_an_error_that_says_what_to_do() -> None:
    unknown = replace(BERT, params="1.4B")
    with pytest.raises(InvalidInput, match=r"bert 1.4B is unknown.*760M.*`tessera models add`"):
        model_of("workload.model", unknown, [MINE])
    assert list(known_models([unknown, BERT], [MINE])) == [BERT]


def test_an_unknown_gpu_type_is_an_error_that_lists_the_known_ones() -> None:
    abacus = replace(A100, gpu_type=GpuType(name="abacus", memory_bytes=1))
    with pytest.raises(InvalidInput, match=r"abacus is not in the hardware catalogue.*a100, v100"):
        hardware_of("gpu_types[0]", abacus, catalogue_of())


def test_the_clusters_own_memory_and_node_size_are_used() -> None:
    hardware = hardware_of("t", replace(A100, node_gpus=2), catalogue_of())
    assert (hardware.memory_bytes, hardware.gpus_per_node) == (40 * GIB, 2)
    assert hardware_of("t", replace(A100, node_gpus=0), catalogue_of()).gpus_per_node == 4


@given(st.integers(1, 300), st.integers(1, 16))
def test_a_shape_has_equal_parts_that_fit_a_node(gpus: int, node_gpus: int) -> None:
    shape = shape_of(gpus, node_gpus)
    assert shape.gpus == gpus
    assert shape.gpus_per_node <= node_gpus
    fewer = range(1, shape.nodes)
    assert not any(gpus % n == 0 and gpus // n <= node_gpus for n in fewer)


def test_counts_are_multiples_of_the_requested_count() -> None:
    assert gpu_counts_of([4], (0.5, 1.0, 2.0)) == [2, 4, 8]
    assert gpu_counts_of([1, 3], (0.5, 1.0, 2.0)) == [1, 2, 3, 6]


@pytest.mark.parametrize("text", ["", "a", "0", "1,", "-1", "inf", "nan", "2000"])
def test_meaningless_multiples_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="estimate_counts"):
        Config(estimate_counts=text)


def test_a_fingerprint_changes_with_everything_that_estimates_depend_on() -> None:
    types = {"a100": hardware_of("t", A100, catalogue_of())}
    more = {"a100": hardware_of("t", replace(A100, node_gpus=8), catalogue_of())}
    base = estimates_fingerprint(BERT, None, {"a100": [1]}, types, [])
    assert base == estimates_fingerprint(BERT, None, {"a100": [1]}, dict(types), [])
    others = [
        estimates_fingerprint(replace(BERT, global_batch=8), None, {"a100": [1]}, types, []),
        estimates_fingerprint(BERT, MINE, {"a100": [1]}, types, []),
        estimates_fingerprint(BERT, None, {"a100": [1, 2]}, types, []),
        estimates_fingerprint(BERT, None, {"a100": [1]}, more, []),
        estimates_fingerprint(BERT, None, {"a100": [1]}, types, [a_measurement(1.0)]),
        estimates_fingerprint(BERT, None, {"a100": [1]}, types, [], exhausted=[CELL]),
        estimates_fingerprint(BERT, None, {"a100": [1]}, types, [], exhausted=[CELL.on(1)]),
    ]
    assert len({base, *others}) == 8


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": ""}, "m.model"),
        ({"params": "a/b"}, "m.params"),
        ({"architecture": ""}, "m.architecture"),
        ({"architecture": "x" * 65_537}, "m.architecture"),
        ({"dtype": "f8"}, "m.dtype"),
        ({"zero": 4}, "m.zero"),
        ({"sequence": -1}, "m.sequence"),
        ({"micro_batches": -1}, "m.micro_batches"),
        ({"state_bytes": math.nan}, "m.state_bytes"),
        ({"published": True}, "m.published"),
        ({"parameters": 1.0}, "m.parameters"),
    ],
)
def test_a_wrong_field_of_a_model_is_named(changes: dict[str, Any], field: str) -> None:
    message = pb.Model(model="m", architecture="x")
    message.MergeFrom(pb.Model(**changes))
    if "model" in changes:
        message.model = ""
    if "architecture" in changes:
        message.architecture = str(changes["architecture"])
    with pytest.raises(InvalidInput) as wrong:
        to_model("m", message)
    assert wrong.value.field == field


def a_cell(**changes: Any) -> pb.CellEstimate:
    return pb.CellEstimate(
        workload=pb.Workload(model="m", global_batch=8),
        cell=pb.Cell(gpu_type="a100", gpus=4),
        source=pb.ANALYTIC,
        **changes,
    )


@pytest.mark.parametrize("sd", [-0.1, math.nan, math.inf, 5.1])
def test_a_meaningless_uncertainty_is_refused(sd: float) -> None:
    with pytest.raises(InvalidInput, match="must be a number in 0 to 5") as wrong:
        convert.to_estimate("c", a_cell(iter_time_s=1.0, sd=sd), lambda *_: BERT)
    assert wrong.value.field == "c.sd"


def test_an_infeasible_cell_has_no_uncertainty() -> None:
    with pytest.raises(InvalidInput, match="has no meaning for an infeasible Cell"):
        convert.to_estimate("c", a_cell(infeasible=True, sd=0.1), lambda *_: BERT)


@pytest.mark.parametrize("sd", [None, 0.0, 0.3])
def test_uncertainty_reads_back_unchanged(sd: float | None) -> None:
    record = convert.to_estimate("c", a_cell(iter_time_s=1.0, sd=sd), lambda *_: BERT)
    assert record.sd == sd
    again = convert.to_estimate("c", convert.of_estimate(record), lambda *_: BERT)
    assert again == record
