"""Estimates whose times were measured: what one shape of a Cell says about its others."""

from __future__ import annotations

import math

import pytest

from tessera.formulation.snapshot import Estimates
from tessera.formulation.values import CellKey, EstimateSource
from tessera.simulator.measured_times import with_measured_time
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate

CELL = CellKey(gpu_type=0, gpus=2, pipeline_degree=1, plan=0)
ANALYTIC, MEASURED = int(EstimateSource.ANALYTIC), int(EstimateSource.MEASURED)


def estimates_of(
    one_node_s: float, two_nodes_s: float, source: int = ANALYTIC, sd: float = 0.1
) -> Estimates:
    """Return the times of a Cell on one and on two nodes, and of another Cell."""
    rows = [
        an_estimate(gpus=1, iter_time_s=9.0, sd=sd) | {"source": ANALYTIC},
        an_estimate(gpus=2, iter_time_s=one_node_s, sd=sd) | {"source": ANALYTIC},
        an_estimate(gpus=2, nodes=2, iter_time_s=two_nodes_s, sd=sd) | {"source": source},
    ]
    return a_snapshot(nodes=[a_node("n", gpus=4)], estimates=rows, jobs=[a_job("a")]).estimates


def test_the_other_shapes_of_a_cell_are_corrected_and_other_cells_are_not() -> None:
    found = with_measured_time(estimates_of(2.0, 3.0), 0, CELL, 1, 2.5)
    assert found.iter_time_s.tolist() == pytest.approx([9.0, 2.5, 3.75])
    assert found.source.tolist() == [ANALYTIC, MEASURED, MEASURED]
    assert [math.isnan(sd) for sd in found.sd.tolist()] == [False, True, True]


def test_a_shape_that_was_measured_itself_keeps_its_time() -> None:
    found = with_measured_time(estimates_of(2.0, 3.0, source=MEASURED), 0, CELL, 1, 2.5)
    assert found.iter_time_s.tolist() == pytest.approx([9.0, 2.5, 3.0])


@pytest.mark.parametrize(("expected_s", "measured_s"), [(2.0, math.inf), (math.inf, 2.0)])
def test_a_shape_says_nothing_about_others_if_it_ran_against_expectations_or_did_not(
    expected_s: float, measured_s: float
) -> None:
    found = with_measured_time(estimates_of(expected_s, 3.0), 0, CELL, 1, measured_s)
    assert found.iter_time_s.tolist() == [9.0, measured_s, 3.0]
    assert found.source.tolist() == [ANALYTIC, MEASURED, ANALYTIC]


def test_what_is_known_or_not_estimated_changes_nothing() -> None:
    known = estimates_of(2.0, 3.0, sd=0.0)
    assert with_measured_time(known, 0, CELL, 1, 2.0) is known
    assert with_measured_time(known, 0, CELL, 3, 2.5) is known
