"""Cells: best shapes, other shapes and dominance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.formulation.cells import build_cells, find_undominated
from tests.support.builders import a_snapshot, an_estimate, some_nodes


def test_a_cell_runs_at_its_own_estimate_on_the_fewest_nodes() -> None:
    estimates = [
        an_estimate(gpus=8, nodes=2, iter_time_s=2.0),
        an_estimate(gpus=8, nodes=4, iter_time_s=4.0),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    assert (cells.nodes.tolist(), cells.rate.tolist()) == ([2], [128.0])


def test_a_worse_shape_uses_its_own_estimate_or_nine_tenths_of_the_speed_per_halving() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=1, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=2, iter_time_s=1.6),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    assert cells.rate_on(0, 1) == 256.0
    assert cells.rate_on(0, 2) == 160.0
    assert cells.rate_on(0, 4) == pytest.approx(256.0 * 0.9**2)


def test_a_shape_that_was_tried_and_failed_does_not_run() -> None:
    estimates = [an_estimate(gpus=4, nodes=1), an_estimate(gpus=4, nodes=2, iter_time_s=math.inf)]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    assert cells.rate_on(0, 2) == 0.0


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
    assert build_cells(snapshot).rate.tolist() == [256.0]


def test_failed_or_oversized_cells_are_left_out() -> None:
    estimates = [
        an_estimate(gpus=2, iter_time_s=math.inf),
        an_estimate(gpus=32),
        an_estimate(gpus=4),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=[], estimates=estimates))
    assert cells.gpus.tolist() == [4]


def test_a_type_without_schedulable_nodes_has_no_cells() -> None:
    nodes = some_nodes((0, 2, 4))
    nodes = [n | {"schedulable": False} for n in nodes]
    assert len(build_cells(a_snapshot(nodes=nodes, jobs=[], estimates=[an_estimate()]))) == 0


@pytest.mark.parametrize("seed", range(20))
def test_dominance_agrees_with_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimates = [
        an_estimate(w, t, g, degree=d, iter_time_s=float(rng.integers(1, 6)))
        for w in range(3)
        for t in range(2)
        for g in (1, 2, 4)
        for d in (1, 2)
    ]
    nodes = some_nodes((0, 2, 4), (1, 2, 4))
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
            and cells.rate[r] >= cells.rate[c]
        ]
        strictly = [
            r
            for r in baselines
            if (cells.gpus[r], cells.rate[r]) != (cells.gpus[c], cells.rate[c]) or r < c
        ]
        assert keep[c] == (not strictly)
