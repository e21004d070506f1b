"""Cells: best shapes, other shapes and dominance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.cells import build_cells
from tessera.formulation.dominance import find_undominated
from tests.support.builders import a_snapshot, an_estimate, some_nodes


def test_a_wider_shape_is_kept_if_it_is_faster() -> None:
    """Arena's ``wide_resnet`` 2B at batch 256 on 16 V100."""
    estimates = [
        an_estimate(gpus=16, nodes=1, iter_time_s=14.0),
        an_estimate(gpus=16, nodes=2, iter_time_s=8.29),
        an_estimate(gpus=16, nodes=4, iter_time_s=9.0),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 16)), jobs=[], estimates=estimates))
    kept = find_undominated(cells)
    assert cells.nodes[kept].tolist() == [2, 1]  # fastest first
    assert cells.rate[kept] == pytest.approx([256 / 8.29, 256 / 14.0])


def test_a_narrow_shape_is_not_dominated_by_fewer_gpus_on_more_nodes() -> None:
    estimates = [
        an_estimate(gpus=2, nodes=1, iter_time_s=math.inf),
        an_estimate(gpus=2, nodes=2, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=1, iter_time_s=2.0),
        an_estimate(gpus=8, nodes=2, iter_time_s=2.0),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 8)), jobs=[], estimates=estimates))
    assert cells.gpus[find_undominated(cells)].tolist() == [2, 4]


def test_a_shape_for_which_the_cluster_has_too_few_nodes_is_left_out() -> None:
    estimates = [
        an_estimate(gpus=8, nodes=1, iter_time_s=2.0),
        an_estimate(gpus=8, nodes=2, iter_time_s=1.0),
        an_estimate(gpus=8, nodes=4, iter_time_s=0.5),
    ]
    nodes = some_nodes((0, 1, 8), (0, 1, 4), (0, 2, 2))
    snapshot = a_snapshot(
        nodes=[node | {"name": f"n{i}"} for i, node in enumerate(nodes)],
        jobs=[],
        estimates=estimates,
    )
    assert sorted(build_cells(snapshot).nodes.tolist()) == [1, 2, 4]
    one_less = a_snapshot(
        nodes=[snapshot.nodes.row(n) for n in (0, 2, 3)], jobs=[], estimates=estimates
    )
    assert build_cells(one_less).nodes.tolist() == [1]


def test_a_job_on_another_shape_than_its_column_gets_the_fastest_cell_there() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=1, degree=1, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=2, degree=2, iter_time_s=2.0),
        an_estimate(gpus=4, nodes=2, degree=4, iter_time_s=1.6),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    (first,) = np.flatnonzero(cells.nodes == 1).tolist()
    assert cells.pipeline_degree[cells.row_on(first, 2)] == 4
    assert cells.placed_rate(first, 2) == 160.0
    assert cells.row_on(first, 4) == first  # nothing is known of this shape
    assert cells.placed_rate(first, 4) == pytest.approx(256 * 0.9**2)


def test_a_worse_shape_uses_its_own_estimate_or_nine_tenths_of_the_speed_per_halving() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=1, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=2, iter_time_s=1.6),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    assert cells.rate_on(0, 1) == 256.0
    assert cells.rate_on(0, 2) == 160.0  # nearest narrower shape that runs, for 4 nodes
    assert cells.rate_on(0, 4) == pytest.approx(160.0 * 0.9)


def test_a_shape_that_this_cluster_cannot_have_is_scaled_to_a_possible_one() -> None:
    """Measured on one 8-GPU node, run on 4-GPU nodes."""
    snapshot = a_snapshot(
        nodes=some_nodes((0, 4, 4)), jobs=[], estimates=[an_estimate(gpus=8, nodes=1)]
    )
    cells = build_cells(snapshot)
    assert (cells.nodes[0], cells.rate[0]) == (2, pytest.approx(256 * 0.9))


def test_a_shape_better_than_any_measured_one_is_not_extrapolated_upwards() -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 4, 4)), jobs=[], estimates=[an_estimate(gpus=4, nodes=4)]
    )
    cells = build_cells(snapshot)
    assert (cells.nodes.tolist(), cells.rate.tolist()) == ([1, 4], [256.0, 256.0])
    assert find_undominated(cells).tolist() == [True, False]


def test_nothing_is_inferred_from_a_complete_profile() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=2),
        an_estimate(gpus=8, nodes=1) | {"complete": True},
        an_estimate(1, gpus=4, nodes=2) | {"complete": False},
    ]
    rows = [{"complete": False} | estimate for estimate in estimates]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=rows))
    shapes = list(zip(cells.workload, cells.gpus, cells.nodes, strict=True))
    assert sorted(shapes) == [(0, 4, 2), (1, 4, 1), (1, 4, 2)]  # eight GPUs are two nodes here
    (complete,) = np.flatnonzero(cells.workload == 0).tolist()
    assert cells.complete[complete]
    assert [cells.rate_on(complete, nodes) for nodes in (1, 2, 4)] == [0.0, 256.0, 0.0]
    incomplete = int(np.flatnonzero(cells.workload == 1)[0])
    assert cells.rate_on(incomplete, 4) == pytest.approx(256.0 * 0.9)


@pytest.mark.parametrize("seed", range(20))
def test_dominance_agrees_with_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimates = [
        an_estimate(w, t, g, n, degree=d, iter_time_s=float(rng.integers(1, 9)))
        for w in range(3)
        for t in range(2)
        for g in (1, 2, 4, 8, 16)
        for d in (1, 2)
        for n in (1, 2, 3, 4)
        if n <= g and rng.random() < 0.7
    ]
    nodes = some_nodes((0, 4, 8), (1, 5, 8))
    cells = build_cells(a_snapshot(nodes=nodes, jobs=[], estimates=estimates))
    keep = find_undominated(cells)
    for c in range(len(cells)):
        baselines = [
            r
            for r in range(len(cells))
            if r != c
            and cells.workload[r] == cells.workload[c]
            and cells.gpu_type[r] == cells.gpu_type[c]
            and cells.gpus[r] <= cells.gpus[c]
            and cells.nodes[r] <= cells.nodes[c]
            and cells.rate[r] >= cells.rate[c]
        ]
        needs = (cells.gpus, cells.nodes, cells.rate)
        strictly = [r for r in baselines if any(n[r] != n[c] for n in needs) or r < c]
        assert keep[c] == (not strictly)
