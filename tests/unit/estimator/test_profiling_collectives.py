"""Collectives timed on JAX devices, which are CPU devices of a separate process here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.estimator.collectives import read_curves
from tessera.estimator.plans import Primitive
from tests.support.patience import PATIENCE_S

pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[3]

MEASURE = """
import itertools, sys
from pathlib import Path
from tessera.estimator.collectives import write_records
from tessera.estimator.plans import Primitive, Shape
from tessera.estimator.profiling.collectives import MeasurementConditions, time_collectives

clock = itertools.count(step=0.5)
bench = MeasurementConditions(
    gpu_type="cpu", network="host", date="2026-01-31", repeats=2, clock=lambda: next(clock)
)
groups = [Shape(nodes=1, gpus_per_node=2), Shape(nodes=1, gpus_per_node=4)]
write_records(Path(sys.argv[1]), time_collectives(list(Primitive), [6, 1024], groups, bench))
"""

RESULTS = """
import json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tessera.estimator.plans import Primitive, Shape
from tessera.estimator.profiling.collectives import available_shape, group_mesh, collective_program

over = group_mesh(Shape(nodes=1, gpus_per_node=2), available_shape())
cut = NamedSharding(over, PartitionSpec(over.axis_names))
found = {}
for primitive in Primitive:
    x = jax.device_put(jnp.arange(8.0), cut)
    run = jax.jit(collective_program(primitive, over, 3))
    text = run.lower(x).compile().as_text()
    once = jax.jit(collective_program(primitive, over, 1))(x)
    found[primitive.value] = [once.tolist(), text]
print(json.dumps(found))
"""

REFUSED = """
import sys
from tessera.formulation.base.errors import InvalidInput
from tessera.estimator.plans import Primitive, Shape
from tessera.estimator.profiling.collectives import MeasurementConditions, time_collectives

bench = MeasurementConditions(gpu_type="cpu", network="host", date="2026-01-31", repeats=1, clock=lambda: 1.0)
pair = Shape(nodes=1, gpus_per_node=2)
for sizes, group in (
    ([8], Shape(nodes=1, gpus_per_node=3)),
    ([8], Shape(nodes=2, gpus_per_node=1)),
    ([8], Shape(nodes=1, gpus_per_node=1)),
    ([0], pair),
    ([8], pair),
):
    try:
        time_collectives([Primitive.ALL_REDUCE], sizes, [group], bench)
    except InvalidInput as error:
        print(error)
"""


def run_on_four_devices(script: str, *arguments: str) -> str:
    """Run a script in a process with four CPU devices; return its output."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure all primitives on groups of two and of four GPUs."""
    path = tmp_path_factory.mktemp("measured") / "own.csv"
    run_on_four_devices(MEASURE, str(path))
    return path


@pytest.mark.full
def test_measured_rows_are_tables_of_the_published_format(measured: Path) -> None:
    curves = read_curves(measured)
    places = {(c.layout.primitive, c.layout.size, c.layout.node_groups) for c in curves}
    collectives = set(Primitive) - {Primitive.SEND}
    assert places == {(p, 2, 2) for p in Primitive} | {(p, 4, 1) for p in collectives}
    assert {(c.layout.machine.nodes, c.layout.machine.gpus_per_node) for c in curves} == {(1, 4)}


def test_indivisible_sizes_are_rounded_up_to_what_was_sent(measured: Path) -> None:
    for curve in read_curves(measured):
        least = 4 * curve.layout.size * -(-6 // (4 * curve.layout.size))
        assert curve.payload_bytes.tolist() == [least, 1024]


def test_a_recorded_time_is_of_one_iteration_of_the_loop(measured: Path) -> None:
    for curve in read_curves(measured):
        assert curve.seconds.tolist() == pytest.approx([0.5 / 50] * 2)


def test_rows_record_their_origin(measured: Path) -> None:
    text = measured.read_text(encoding="utf-8")
    assert "4 x cpu" in text
    assert "2026-01-31" in text
    assert "jaxlib" in text


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[list[float], str]]:
    """Return each program's result for 0 to 7 on four devices in pairs, and its compiled text."""
    found: dict[str, tuple[list[float], str]] = json.loads(run_on_four_devices(RESULTS))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("primitive", "expected"),
    [
        (Primitive.ALL_REDUCE, [2, 4, 2, 4, 10, 12, 10, 12]),
        (Primitive.REDUCE_SCATTER, [2, 1, 4, 3, 10, 5, 12, 7]),
        (Primitive.ALL_GATHER, [0, 1, 0, 1, 4, 5, 4, 5]),
        (Primitive.ALL_TO_ALL, [0, 2, 1, 3, 4, 6, 5, 7]),
        (Primitive.SEND, [0, 0, 0, 1, 0, 0, 4, 5]),
    ],
)
def test_each_program_does_what_its_primitive_means(
    results: dict[str, tuple[list[float], str]], primitive: Primitive, expected: list[float]
) -> None:
    assert results[primitive.value][0] == expected


def test_compiled_programs_run_the_collective_itself_in_a_loop(
    results: dict[str, tuple[list[float], str]],
) -> None:
    operations = {p: p.value for p in Primitive} | {Primitive.SEND: "collective-permute"}
    for primitive, operation in operations.items():
        text = results[primitive.value][1]
        assert f" {operation}(" in text
        assert " while(" in text


def test_collectives_that_cannot_be_measured_are_refused_by_name() -> None:
    tile, across, alone, size, stopped = run_on_four_devices(REFUSED).splitlines()
    assert "1 nodes x 3 GPUs do not divide the available 1 nodes x 4 GPUs evenly" in tile
    assert "2 nodes x 1 GPUs do not divide" in across
    assert "a group of one GPU sends nothing" in alone
    assert "sizes_bytes: must be positive, not 0" in size
    assert "measured 0.0 s for" in stopped
