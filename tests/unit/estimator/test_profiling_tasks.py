"""Profiling tasks: their choice, their states, and the estimates made from their measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.architectures.published import find_published, jax_step, published_models
from tessera.estimator.calibration import Residual
from tessera.estimator.cell_estimator import Estimator
from tessera.estimator.fingerprints import estimates_fingerprint
from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.hardware.cluster_types import catalogue_of
from tessera.estimator.models import known_models
from tessera.estimator.plans import Training
from tessera.estimator.profiling.stages import StepMaker as StepSource
from tessera.estimator.profiling.stages import kinds_of
from tessera.estimator.profiling.tasks import (
    ProfilingOptions,
    StepTarget,
    TaskState,
    arguments_of,
    missing_tasks,
    profiles_of,
    profiling_status,
    step_of,
    task_name,
    task_of,
)
from tessera.estimator.profiling.totals import ProfiledTotals
from tessera.estimator.rooflines import RooflineCompute
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import PROFILING, Cell, EstimateSource, GpuType, Workload
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.estimates import (
    ClusterGpuType,
    EstimationInputs,
    MeasurementRecord,
    ModelSpec,
    ProfileRow,
    ProfilingJob,
    UnestimatedWorkload,
)
from tessera.service.cli.jobs.jobview import profiling_facts
from tessera.service.server.convert.models import to_model
from tessera.service.server.convert.profiles import of_status, to_profiles
from tessera.service.server.settings.config import Config
from tessera.v1 import estimates_pb2 as pb
from tessera.v1 import jobs_pb2
from tests.support.laws import examples

BERT = Workload(model="bert", params="1.3B", global_batch=256)
OWL = Workload(model="owl", params="3B", global_batch=2)
SPEC = ModelSpec(
    model="owl", params="3B", architecture="{}", step="my.module:step", step_arguments=("layers=2",)
)
OWL_STEP = StepTarget(target="my.module:step", arguments=(("layers", 2),))
HARDWARE = {kind.name: kind for kind in CATALOGUE}
TRAINING = Training(global_batch=16)


def a_row(**changed: Any) -> ProfileRow:
    step = step_of(BERT, ())
    assert step is not None
    fields: dict[str, Any] = {
        "workload": BERT,
        "gpu_type": "a100",
        "task": "t",
        "source": step.source,
        "kind": "dot",
        "layers": 24,
        "samples": 1.0,
        "tp": 1,
        "dtype": "f16",
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "method": "kernels",
        "repeats": 5,
        "device_s": 3.0,
        "device": "NVIDIA A100",
        "versions": (("jax", "0.10.2"),),
        "date": "2026-11-21",
    }
    return ProfileRow(**(fields | changed))


def a_cluster(
    *wanted: UnestimatedWorkload, types: tuple[str, ...] = ("a100", "v100"), **rest: Any
) -> EstimationInputs:
    kinds = tuple(
        ClusterGpuType(gpu_type=GpuType(name=t, memory_bytes=40 * 2**30), node_gpus=8, gpus=16)
        for t in types
    )
    return EstimationInputs(kinds=kinds, models=(SPEC,), measurements=(), wanted=wanted, **rest)


def a_wanted_workload(workload: Workload, *, profile: bool = True) -> UnestimatedWorkload:
    return UnestimatedWorkload(
        workload=workload, requests=(8,), counts=(), derived_from="", profile=profile
    )


def a_task(workload: Workload, gpu_type: str, state: JobState, error: str = "") -> ProfilingJob:
    step = step_of(workload, (SPEC,))
    assert step is not None
    name = task_name(workload, step, gpu_type)
    return ProfilingJob(
        name=name, gpu_type=gpu_type, state=state, last_error=error, service_gpu_s=40.0
    )


def test_a_task_uses_one_gpu_of_one_type_and_has_almost_no_value() -> None:
    tasks = missing_tasks(a_cluster(a_wanted_workload(BERT)), HARDWARE, ProfilingOptions())
    assert {spec.requested_gpu_type for spec in tasks.values()} == {"a100", "v100"}
    for name, spec in tasks.items():
        assert (spec.name, spec.requested_gpus, spec.pinned_gpu_type) == (name, 1, True)
        assert (spec.workload.model, spec.runtime) == (PROFILING, "profile")
        assert (spec.weight, spec.priority, spec.guaranteed) == (1e-6, 100, False)
        assert spec.iterations == 4


def test_nothing_is_profiled_unless_a_job_or_the_server_requests_it() -> None:
    cluster = a_cluster(a_wanted_workload(BERT, profile=False))
    assert not missing_tasks(cluster, HARDWARE, ProfilingOptions())
    assert len(missing_tasks(cluster, HARDWARE, ProfilingOptions(always=True))) == 2
    assert not profiling_status(cluster, HARDWARE, ProfilingOptions(), BERT).asked


def test_types_without_nodes_or_outside_the_catalogue_get_no_task() -> None:
    cluster = a_cluster(a_wanted_workload(BERT), types=("a100", "mystery"))
    gone = replace(cluster, kinds=(*cluster.kinds, replace(cluster.kinds[0], gpus=0)))
    assert [
        s.requested_gpu_type for s in missing_tasks(gone, HARDWARE, ProfilingOptions()).values()
    ] == ["a100"]


@pytest.mark.parametrize("state", list(JobState))
def test_a_task_is_made_once_whatever_its_end(state: JobState) -> None:
    existing = (a_task(BERT, "a100", state),)
    tasks = missing_tasks(
        a_cluster(a_wanted_workload(BERT), profiling=existing), HARDWARE, ProfilingOptions()
    )
    assert [spec.requested_gpu_type for spec in tasks.values()] == ["v100"]


def test_batches_of_a_model_share_a_task_and_its_records() -> None:
    other = replace(BERT, global_batch=512)
    cluster = a_cluster(a_wanted_workload(BERT), a_wanted_workload(other))
    assert len(missing_tasks(cluster, HARDWARE, ProfilingOptions())) == 2
    cluster = replace(cluster, profiles=(a_row(),))
    assert [
        s.requested_gpu_type for s in missing_tasks(cluster, HARDWARE, ProfilingOptions()).values()
    ] == ["v100"]
    assert profiles_of(cluster.profiles, other, step_of(other, ()), "f16").keys() == {"a100"}


def test_a_user_defined_step_is_measured_with_its_arguments_up_to_its_sample_limit() -> None:
    spec = task_of(OWL, OWL_STEP, "a100", ProfilingOptions(samples=(1, 2, 4), tp=(1, 2)))
    task = json.loads(spec.command[0])
    assert task["sizes"] == [[1, 1], [2, 1], [1, 2], [2, 2]]
    assert (task["step"], task["arguments"]) == ("my.module:step", {"layers": 2})
    assert task["source"] == "my.module:step(layers=2)"
    assert step_of(OWL, [SPEC]) == OWL_STEP


def test_workloads_that_cannot_be_profiled_say_why_and_stay_analytic() -> None:
    bare = replace(SPEC, step="")
    cluster = replace(a_cluster(a_wanted_workload(OWL)), models=(bare,))
    assert not missing_tasks(cluster, HARDWARE, ProfilingOptions())
    status = profiling_status(cluster, HARDWARE, ProfilingOptions(), OWL)
    assert status.asked
    assert "owl 3B has no step in JAX" in status.problem
    assert "--step" in status.problem


def test_a_task_that_succeeded_without_records_has_failed() -> None:
    task = a_task(BERT, "a100", JobState.SUCCEEDED)
    cluster = a_cluster(a_wanted_workload(BERT), types=("a100",), profiling=(task,))
    (status,) = profiling_status(cluster, HARDWARE, ProfilingOptions(), BERT).tasks
    assert (status.state, status.problem) == (
        TaskState.FAILED,
        "it ended without a record of any layer",
    )


def test_the_status_is_given_for_each_type() -> None:
    there = (
        a_task(BERT, "a100", JobState.SUCCEEDED),
        a_task(BERT, "v100", JobState.RUNNING),
        a_task(BERT, "a40", JobState.FAILED, "JAX is not there"),
    )
    cluster = a_cluster(
        a_wanted_workload(BERT),
        types=("a100", "v100", "a40", "a10"),
        profiling=there,
        profiles=(a_row(),),
    )
    status = profiling_status(cluster, HARDWARE, ProfilingOptions(), BERT)
    assert [t.state for t in status.tasks] == [
        TaskState.DONE,
        TaskState.RUNS,
        TaskState.FAILED,
        TaskState.PLANNED,
    ]
    assert status.tasks[2].problem == "JAX is not there"
    assert (status.tasks[0].device_s, status.tasks[0].service_gpu_s) == (3.0, 40.0)
    (head, *rest) = profiling_facts(jobs_pb2.Job(profile=True), of_status(status))
    assert head == (
        "profiling",
        "done on 1 of 4 GPU types; its other estimates are analytic; 120 GPU-seconds used",
    )
    assert "a40: failed" in rest[2][1]
    assert rest[2][1].endswith("JAX is not there")


def test_a_job_with_user_estimates_says_that_nothing_is_measured() -> None:
    ((_, text),) = profiling_facts(jobs_pb2.Job(profile=True), pb.Profiling())
    assert "given by a user" in text
    assert profiling_facts(jobs_pb2.Job(), pb.Profiling()) == []


def test_only_the_latest_of_several_tasks_on_a_type_counts() -> None:
    rows = [
        a_row(task="old", samples=4.0),
        a_row(task="new", forward_s=5e-3),
        a_row(task="new", kind="norm", layers=2, forward_s=1e-3, backward_s=0.0),
        a_row(task="new", samples=2.0, source="another"),
        a_row(task="new", samples=8.0, dtype="f32"),
    ]
    found = profiles_of(rows, BERT, step_of(BERT, ()), "f16")["a100"]
    (point,) = found.points[1]
    assert point == pytest.approx((1.0, 24 * 5e-3 + 2 * 1e-3, 24 * 2e-3))
    assert (found.records, found.device_s) == (2, 6.0)


def test_arguments_are_converted_to_numbers_if_possible() -> None:
    arguments = arguments_of("f", ["b=x", "a=3", "c=0.5"])
    assert arguments == (("a", 3), ("b", "x"), ("c", 0.5))
    for wrong in (["a"], ["a=1", "a=2"], ["=1"], ["a b=1"]):
        with pytest.raises(InvalidInput, match="NAME=VALUE"):
            arguments_of("f", wrong)


@pytest.mark.parametrize("key", [k for k in published_models() if jax_step(*k) is not None])
def test_steps_of_published_models_accept_their_arguments(key: tuple[str, str]) -> None:
    step = jax_step(*key)
    assert step is not None
    assert step[0].startswith("tessera.estimator.tracing.models.steps:")
    assert all(isinstance(value, int | str) for value in step[1].values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "within"),
    [
        (("bert", "760M"), 0.005),
        (("wide_resnet", "500M"), 0.005),
        (("vit", "86M"), 0.005),
        pytest.param(("gpt2", "1.5B"), 0.005, marks=pytest.mark.night),
        (("moe", "690M"), 0.08),
        pytest.param(("t5_3B", "3B"), 0.005, marks=pytest.mark.night),
    ],
)
def test_steps_of_published_models_do_the_work_of_their_graphs(
    key: tuple[str, str], within: float
) -> None:
    step = jax_step(*key)
    assert step is not None
    graph, traced = (
        find_published(*key).graph,
        kinds_of(StepSource(target=step[0], arguments=step[1])),
    )
    assert traced.dtype == graph.dtype
    assert traced.flops.sum() == pytest.approx(graph.flops.sum(), rel=within)


@examples(30)
@given(
    scale=st.floats(0.1, 10.0),
    samples=st.sampled_from([1.0, 2.0, 3.0, 8.0]),
    tp=st.sampled_from([1, 2, 4]),
)
def test_totals_proportional_to_the_data_sheet_scale_all_layers_equally(
    scale: float, samples: float, tp: int
) -> None:
    graph, sheet = find_published("bert", "760M").graph, RooflineCompute(hardware=HARDWARE["a100"])
    at = np.array([1.0, 4.0])
    plain = np.stack(sheet.layer_s(graph, TRAINING, at, np.ones(2, np.int64))).sum(axis=2)
    points = {1: tuple((s, scale * f, scale * b) for s, (f, b) in zip(at, plain.T, strict=True))}
    totals = ProfiledTotals(points=points, fallback=sheet)
    where = (np.array([samples]), np.array([tp]))
    found = np.stack(totals.layer_s(graph, TRAINING, *where))
    expected = scale * np.stack(sheet.layer_s(graph, TRAINING, *where))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_totals_add_up_to_the_measurement_and_grow_like_data_sheets_beyond_it() -> None:
    graph, sheet = find_published("bert", "760M").graph, RooflineCompute(hardware=HARDWARE["a100"])
    totals = ProfiledTotals(points={1: ((1.0, 0.1, 0.3), (4.0, 0.3, 0.0))}, fallback=sheet)
    one = np.ones(3, np.int64)
    forward, backward = totals.layer_s(graph, TRAINING, np.array([1.0, 4.0, 8.0]), one)
    plain_f, plain_b = sheet.layer_s(graph, TRAINING, np.array([1.0, 4.0, 8.0]), one)
    np.testing.assert_allclose(forward.sum(axis=1)[:2], [0.1, 0.3])
    assert backward.sum(axis=1)[0] == pytest.approx(0.3)
    grown = plain_f.sum(axis=1)[2] / plain_f.sum(axis=1)[1]
    assert forward.sum(axis=1)[2] == pytest.approx(0.3 * grown)
    # too short to separate: the same ratio as the forward pass
    ratio = forward.sum(axis=1)[1] / plain_f.sum(axis=1)[1]
    assert backward.sum(axis=1)[1] == pytest.approx(ratio * plain_b.sum(axis=1)[1])
    with pytest.raises(InvalidInput, match="nothing was measured"):
        ProfiledTotals(points={}, fallback=sheet)


def a_slow_device(times: float) -> list[ProfileRow]:
    """Return rows in which the whole model takes ``times`` as long as by the data sheet."""
    model = find_published("bert", "1.3B")
    sheet = RooflineCompute(hardware=HARDWARE["a100"])
    at = np.array([1.0, 2.0, 4.0, 8.0])
    plain = np.stack(sheet.layer_s(model.graph, model.training, at, np.ones(4, np.int64)))
    return [
        a_row(samples=s, layers=1, forward_s=times * f, backward_s=times * b)
        for s, (f, b) in zip(at.tolist(), plain.sum(axis=2).T.tolist(), strict=True)
    ]


def test_profiled_cells_follow_the_device_and_have_less_uncertainty() -> None:
    hardware = catalogue_of()
    analytic = Estimator(hardware, known_models([BERT], ()))
    slow = Estimator(hardware, known_models([BERT], (), a_slow_device(2.0)))
    for gpus, degree in ((1, 1), (8, 1), (8, 4)):
        (before,) = analytic.cells(BERT, "a100", gpus, [degree], nodes=2)
        (after,) = slow.cells(BERT, "a100", gpus, [degree], nodes=2)
        assert (before.record.source, after.record.source) == (
            EstimateSource.ANALYTIC,
            EstimateSource.PROFILED,
        )
        assert 1.3 < after.record.iter_time_s / before.record.iter_time_s <= 2.0 + 1e-6
        assert before.record.sd is not None
        assert after.record.sd is not None
        assert Residual().noise_sd < after.record.sd < before.record.sd
        assert "profiled on NVIDIA A100, 2026-11-21, 4 records" in after.record.provenance
    (elsewhere,) = slow.cells(BERT, "v100", 8, [1], nodes=1)
    assert elsewhere.record.source is EstimateSource.ANALYTIC


def test_measured_kernels_are_not_corrected_by_other_jobs_measurements() -> None:
    other = Workload(model="bert", params="760M", global_batch=256)
    hardware = catalogue_of()
    (plain,) = Estimator(hardware, known_models([other], ())).cells(other, "a100", 1, [1])
    taught = [
        MeasurementRecord(
            workload=other,
            cell=Cell(gpu_type="a100", gpus=1, pipeline_degree=1, nodes=1),
            iter_time_s=2 * plain.record.iter_time_s,
        )
    ]

    def ratio(rows: list[ProfileRow]) -> float:
        models = known_models([BERT, other], (), rows)
        (before,) = Estimator(hardware, models).cells(BERT, "a100", 1, [1])
        (after,) = Estimator(hardware, models, taught).cells(BERT, "a100", 1, [1])
        return math.log(after.record.iter_time_s / before.record.iter_time_s)

    assert 0 < ratio(a_slow_device(1.0)) < 0.8 * ratio([])


def test_a_profile_changes_the_fingerprint_of_the_estimates() -> None:
    profiles = profiles_of(a_slow_device(2.0), BERT, step_of(BERT, ()), "f16")
    asked, hardware = {"a100": [8]}, catalogue_of()
    before = estimates_fingerprint(BERT, None, asked, hardware, ())
    assert estimates_fingerprint(BERT, None, asked, hardware, (), {}) == before
    assert estimates_fingerprint(BERT, None, asked, hardware, (), profiles) != before
    assert estimates_fingerprint(
        BERT, None, {"v100": [8]}, hardware, (), profiles
    ) == estimates_fingerprint(BERT, None, {"v100": [8]}, hardware, ())


def a_request(**changed: Any) -> pb.AddProfilesRequest:
    layer: dict[str, Any] = {
        "kind": "dot",
        "layers": 2,
        "samples": 1.0,
        "tensor_parallel": 1,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "method": "kernels",
        "repeats": 5,
        "device_s": 1.0,
    }
    layers = [layer | each for each in changed.pop("layers", [{}])]
    fields: dict[str, Any] = {
        "parent": "clusters/c",
        "gpu_type": "a100",
        "task": "t",
        "source": "m:f()",
        "dtype": "f16",
        "workload": pb.Workload(model="bert", params="1.3B", global_batch=8),
        "device": "A100",
        "versions": {"jax": "1"},
        "date": "2026-11-21",
    }
    return pb.AddProfilesRequest(
        **(fields | changed), layers=[pb.LayerProfile(**x) for x in layers]
    )


def test_records_are_received_as_sent() -> None:
    (row,) = to_profiles(a_request())
    assert (row.kind, row.layers, row.tp, row.forward_s) == ("dot", 2, 1, 1e-3)
    assert (row.versions, row.device) == ((("jax", "1"),), "A100")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"layers": [{"forward_s": math.nan}]}, r"layers\[0\].forward_s"),
        ({"layers": [{"backward_s": -1.0}]}, r"layers\[0\].backward_s"),
        ({"layers": [{"method": "guess"}]}, r"layers\[0\].method"),
        ({"layers": [{"layers": 0}]}, r"layers\[0\].layers"),
        ({"layers": [{}, {}]}, r"layers\[1\]"),
        ({"layers": [{}, {"kind": "norm", "samples": 2.0}]}, "layers"),
        ({"layers": []}, "layers"),
        ({"dtype": "f8"}, "dtype"),
        ({"source": ""}, "source"),
    ],
)
def test_bad_records_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}"):
        to_profiles(a_request(**changed))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"step": "module"}, "models.step"),
        ({"step": "my.module:"}, "models.step"),
        ({"step": "rm -rf:f"}, "models.step"),
        ({"step_arguments": ["a=1"]}, "models.step_arguments"),
        ({"step": "m:f", "step_arguments": ["a"]}, "models.step_arguments"),
        ({"step": "m:f", "step_arguments": ["a=1"] * 65}, "models.step_arguments"),
    ],
)
def test_a_models_step_is_a_function_with_named_arguments(
    changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}"):
        to_model("models", pb.Model(model="owl", architecture="{}", **changed))


def test_a_models_step_is_stored_unchanged() -> None:
    message = pb.Model(model="owl", architecture="{}", step="my.m:f", step_arguments=["a=1"])
    spec = to_model("models", message)
    assert (spec.step, spec.step_arguments) == ("my.m:f", ("a=1",))


def test_settings_say_what_is_measured() -> None:
    found = Config(profile=True, profile_samples="4, 1", profile_tp="2,1").profiling()
    assert found == ProfilingOptions(always=True, samples=(1, 4), tp=(1, 2))
    for wrong in ("", "0", "1;2", "5000"):
        with pytest.raises(InvalidInput, match="profile_samples"):
            Config(profile_samples=wrong)
