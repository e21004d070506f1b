"""Profiles: records and their errors, times from records, kernels in traces, layers measured on the CPU."""

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from tessera.estimator.graph import Graph, Layer, Untraceable, graph_of, merge_layers
from tessera.estimator.plans import Training
from tessera.estimator.profiling.compute import ProfiledCompute
from tessera.estimator.profiling.pieces import example_inputs, piece_of
from tessera.estimator.profiling.records import (
    ProfileMismatch,
    ProfileRecord,
    append_records,
    read_profile_records,
)
from tessera.estimator.profiling.stages import (
    StepMaker,
    kinds_of,
    profile_stage,
)
from tessera.estimator.profiling.timing import TimingEffort, kernel_seconds
from tessera.estimator.tracing.models import steps
from tessera.estimator.tracing.trace import trace_program
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints

PERCEPTRON = StepMaker(
    target="tessera.estimator.tracing.models.steps:perceptron", arguments={"layers": 3}
)
QUICK = TimingEffort(warmups=1, repeats=2, host_s=0.0)
TRAINING = Training(global_batch=16)


def a_record(**changed: Any) -> ProfileRecord:
    fields: dict[str, Any] = {
        "kind": "dot-a",
        "samples": 4.0,
        "tp": 1,
        "dtype": "bf16",
        "forward_s": 1.0,
        "backward_s": 2.0,
        "method": "kernels",
        "repeats": 5,
        "device_s": 3.0,
        "device": "NVIDIA A40",
        "versions": {"jax": "0.10.2", "driver": "cuda 12"},
        "date": "2026-11-21",
    }
    return ProfileRecord(**(fields | changed))


def a_layer(kind: str, flops: float = 1e9) -> Layer:
    return Layer(kind=kind, flops=flops, touched=1.0, kernels=1.0, weights=1.0, boundary=1.0)


def a_graph(*kinds: str) -> Graph:
    return graph_of("m", "bf16", [a_layer(kind) for kind in kinds])


@dataclass(frozen=True)
class LinearCompute:
    """A device that takes 1 ns for each FLOP of a forward pass and twice that backward."""

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        forward = 1e-9 * samples[:, None] / tp[:, None] * graph.flops
        return forward, 2 * forward


def layer_seconds(
    compute: ProfiledCompute, graph: Graph, samples: float, tp: int = 1
) -> tuple[Any, Any]:
    forward, backward = compute.layer_s(graph, TRAINING, np.array([samples]), np.array([tp]))
    assert forward.shape == (1, len(graph))
    return forward[0].tolist(), backward[0].tolist()


def test_records_read_back_as_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.jsonl"
    append_records([a_record()], path)
    append_records([a_record(tp=2)], path)
    assert read_profile_records(path) == [a_record(), a_record(tp=2)]
    assert read_profile_records(
        path, versions={"jax": "0.10.2"}, device="NVIDIA A40"
    ) == read_profile_records(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"forward_s": math.nan},
        {"backward_s": math.inf},
        {"forward_s": 0.0},
        {"forward_s": -1.0},
        {"samples": 0.0},
        {"tp": 0},
        {"method": "guess"},
    ],
)
def test_an_invalid_measurement_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        a_record(**changed)


def test_a_file_with_nan_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    append_records([a_record()], path)
    path.write_text(path.read_text() + path.read_text().replace("1.0", "NaN"))
    with pytest.raises(InvalidInput, match="line 2: forward_s: must be a finite number, not nan"):
        read_profile_records(path)
    path.write_text("{}\n")
    with pytest.raises(InvalidInput, match="line 1"):
        read_profile_records(path)
    path.write_text("forward\n")
    with pytest.raises(InvalidInput, match="is not JSON"):
        read_profile_records(path)


def test_a_profile_of_other_versions_or_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    append_records([a_record()], path)
    with pytest.raises(ProfileMismatch, match=r"jax 0.10.2, not 0.11"):
        read_profile_records(path, versions={"jax": "0.11"})
    with pytest.raises(ProfileMismatch, match="not on NVIDIA H100"):
        read_profile_records(path, device="NVIDIA H100")
    mixed = [a_record(), a_record(tp=2, versions={"jax": "0.11", "driver": "cuda 12"})]
    with pytest.raises(ProfileMismatch):
        ProfiledCompute(records=mixed, fallback=LinearCompute())


def test_measured_seconds_are_interpolated_over_samples() -> None:
    records = [
        a_record(samples=2, forward_s=1.0),
        a_record(samples=6, forward_s=2.0, backward_s=4.0),
    ]
    compute = ProfiledCompute(records=records, fallback=LinearCompute())
    assert layer_seconds(compute, a_graph("dot-a"), 2) == ([1.0], [2.0])
    assert layer_seconds(compute, a_graph("dot-a"), 4) == ([1.5], [3.0])


def test_beyond_the_measured_samples_times_grow_like_the_fallback() -> None:
    records = [a_record(samples=2, forward_s=1.0), a_record(samples=6, forward_s=2.0)]
    compute = ProfiledCompute(records=records, fallback=LinearCompute())
    assert layer_seconds(compute, a_graph("dot-a"), 12)[0] == pytest.approx([4.0])
    assert layer_seconds(compute, a_graph("dot-a"), 1)[0] == pytest.approx([0.5])


def test_a_missing_kind_is_scaled_from_the_fallback_by_similar_kinds() -> None:
    records = [
        a_record(samples=4, forward_s=8.0, backward_s=4.0),
        a_record(kind="conv-c", samples=4, forward_s=20.0, backward_s=20.0),
    ]
    compute = ProfiledCompute(records=records, fallback=LinearCompute())
    graph = a_graph("dot-a", "dot-b", "conv-c")
    forward, backward = layer_seconds(compute, graph, 2)  # fallback: 2 s and 4 s
    assert forward[1] == pytest.approx(2 * 2.0)  # dot-a took 8 s; fallback: 4 s
    assert backward[1] == pytest.approx(4 * 0.5)
    divided, _ = layer_seconds(compute, graph, 4, tp=2)
    assert divided[0] == pytest.approx(2 * 2.0)  # its own ratio, measured at the other degree
    assert divided[2] == pytest.approx(2 * 5.0)
    cover = compute.coverage(graph, 1)
    assert (cover.measured, cover.scaled, cover.unscaled) == pytest.approx((2 / 3, 1 / 3, 0))
    assert compute.coverage(graph, 2).measured == 0


def test_a_graph_of_unknown_kinds_uses_the_fallback_and_reports_it() -> None:
    compute = ProfiledCompute(records=[a_record()], fallback=LinearCompute())
    graph = a_graph("dot-x", "dot-y")
    assert layer_seconds(compute, graph, 2) == ([2.0, 2.0], [4.0, 4.0])
    assert compute.coverage(graph, 1).unscaled == 1


def test_merged_layers_take_the_sum_of_their_parts() -> None:
    records = [a_record(), a_record(kind="dot-b", forward_s=3.0)]
    compute = ProfiledCompute(records=records, fallback=LinearCompute())
    joined = merge_layers(a_graph("dot-a", "dot-b", "dot-a", "dot-b"), 2)
    assert joined.kind == ("dot-a+dot-b",) * 2
    assert layer_seconds(compute, joined, 4)[0] == [4.0, 4.0]


def test_a_profile_of_another_type_or_an_empty_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must not be empty"):
        ProfiledCompute(records=[], fallback=LinearCompute())
    with pytest.raises(InvalidInput, match="must all have one data type"):
        ProfiledCompute(records=[a_record(), a_record(dtype="f32")], fallback=LinearCompute())
    compute = ProfiledCompute(records=[a_record(dtype="f32")], fallback=LinearCompute())
    with pytest.raises(InvalidInput, match="the graph has bf16"):
        layer_seconds(compute, a_graph("dot-a"), 1)


def a_trace(*planes: tuple[str, str, int]) -> ProfileData:
    """Return a trace of planes (plane, line, microseconds), each with one line of one event."""
    text = "".join(
        f'planes {{ name: "{plane}" lines {{ name: "{line}" events {{ metadata_id: 1 '
        f"duration_ps: {microseconds * 10**6} }} }} "
        'event_metadata { key: 1 value { id: 1 name: "k" } } }\n'
        for plane, line, microseconds in planes
    )
    return ProfileData.from_text_proto(text)


def test_kernel_times_are_summed_over_device_streams_only() -> None:
    trace = a_trace(
        ("/device:GPU:0", "Stream #13(Compute)", 7),
        ("/host:CPU", "Stream of the host", 100),
        ("/device:GPU:1", "Stream #14(MemcpyD2D)", 5),
        ("/device:TPU:0", "XLA Ops", 2),
        ("/device:TPU:0 modules", "XLA Modules", 50),
    )
    assert kernel_seconds(trace) == pytest.approx(14e-6)
    assert kernel_seconds(a_trace(("/host:CPU", "tf_XLAEigen", 9))) == 0


def test_a_layer_alone_computes_the_same_as_in_the_step() -> None:
    step = trace_program(steps.perceptron(samples=4))
    piece = piece_of(step, 0)
    (into, out), (x,) = example_inputs(piece.floats, 2), example_inputs(piece.others, 2, seed=3)
    (result,) = piece.run([into, out], [x])
    assert jnp.allclose(result, jnp.maximum(x @ into, 0) @ out, atol=1e-5)
    _, (gradients,) = piece.with_backward([into, out], [x])
    assert [g.shape for g in gradients] == [(64, 256), (256, 64)]


@pytest.mark.full
def test_every_layer_of_every_model_runs_alone_with_its_masks() -> None:
    sizes: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 4, "vocabulary": 32, "sequence": 8}
    step = trace_program(steps.decoder(samples=2, experts=2, dtype="f32", **sizes))
    for layer in range(len(step.graph)):
        piece = piece_of(step, layer)
        floats = example_inputs(piece.floats, piece.largest_index)
        others = example_inputs(piece.others, piece.largest_index)
        results = jax.jit(piece.run)(floats, others)
        assert all(bool(jnp.isfinite(r).all()) for r in results)
        if layer:
            (x,) = [f for f in piece.floats if f.shape == (2, 8, 16)]
            assert x.dtype == jnp.float32


def test_each_kind_is_measured_once_for_all_cells_of_a_job() -> None:
    records = profile_stage(PERCEPTRON, 4, date="2026-11-21", effort=QUICK)
    graph = kinds_of(PERCEPTRON)
    assert len(graph) == 3
    assert {r.kind for r in records} == set(graph.kind)
    assert len(records) == len(set(graph.kind))
    assert all(r.method == "wall clock" and r.device == "cpu" and r.device_s > 0 for r in records)
    assert all({"jax", "jaxlib", "driver"} == set(r.versions) for r in records)
    again = profile_stage(PERCEPTRON, 4, date="2026-11-21", effort=QUICK, known=records)
    assert again == []
    compute = ProfiledCompute(records=records, fallback=LinearCompute())
    assert compute.coverage(graph, 1).measured == pytest.approx(1)


def test_a_tensor_part_is_measured_at_its_own_shapes() -> None:
    (record,) = profile_stage(PERCEPTRON, 4, 2, date="2026-11-21", effort=QUICK, end=1)
    assert (record.kind, record.tp) == (kinds_of(PERCEPTRON).kind[0], 2)
    with pytest.raises(Untraceable, match="cannot be called"):
        profile_stage(
            replace(
                PERCEPTRON,
                target="tessera.estimator.tracing.models.steps:wide_resnet",
                arguments={},
            ),
            1,
            2,
            date="2026-11-21",
        )


def test_reading_records_imports_no_jax() -> None:
    names = "tessera.estimator.profiling.records, tessera.estimator.profiling.compute"
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
