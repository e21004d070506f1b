"""The benchmark of collectives, on small tables that are generated from links."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tessera.benchmarks.estimator.collectives import artifact_s, run_collective_section
from tessera.benchmarks.estimator.section import EstimatorSection
from tessera.estimator.collectives import (
    CommRecord,
    Curve,
    LinkNetwork,
    LinkRates,
    curves_of,
    write_records,
)
from tessera.estimator.collectives.fitting import groups_of
from tessera.estimator.hardware import A10, A40, Hardware
from tessera.estimator.plans import Primitive
from tessera.simulator.data import data_dir

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
