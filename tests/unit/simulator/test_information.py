"""Information that policies may use, estimates after measurements, and jobs of unknown models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.estimator.profiling.tasks import NOMINAL_S, TASK_WORKLOAD
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, CellKey, EstimateSource, Workload
from tessera.formulation.state.information import (
    DpMemory,
    Information,
    data_parallel,
    searched_optimum,
    single_gpu,
)
from tessera.formulation.state.snapshot import Estimates, Snapshot
from tessera.simulator.comparison.information import GIB, read_dp_memory
from tessera.simulator.data import data_dir
from tessera.simulator.executor import replay_lines
from tessera.simulator.logfile import lines_of, log_of
from tessera.simulator.measured_times import with_measured_time
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.worlds import (
    a_profile,
    a_scenario,
    a_world,
    an_arrival,
    end_s,
    give,
    simulate_scenario,
)

HAS = 2**35  # bytes of memory of every GPU in these snapshots


def a_table(*rows: dict[str, Any]) -> Snapshot:
    return a_snapshot(
        nodes=[a_node("n0", 0, 16), a_node("n1", 1, 16)],
        jobs=[a_job("j")],
        estimates=sorted(
            rows, key=lambda r: (r["workload"], r["gpu_type"], r["gpus"], r["pipeline_degree"])
        ),
    )


def a_searched_estimate(
    gpus: int, iter_time_s: float, gpu_type: int = 0, nodes: int = 1
) -> dict[str, Any]:
    return an_estimate(0, gpu_type, gpus, nodes, degree=BEST_FOUND, iter_time_s=iter_time_s)


def best_times(snapshot: Snapshot, gpu_type: int = 0) -> dict[int, float]:
    """Return the least iteration time of each GPU count on a type."""
    e = snapshot.estimates
    found: dict[int, float] = {}
    for t, gpus, s in zip(
        e.gpu_type.tolist(), e.gpus.tolist(), e.iter_time_s.tolist(), strict=True
    ):
        if t == gpu_type:
            found[gpus] = min(s, found.get(gpus, math.inf))
    return found


def a_memory_table(**gib_by_count: float) -> DpMemory:
    """Return a table of the workload ``m/0B/256``, e.g. ``memory(x1=20, x2=math.inf)``."""
    counts = [int(name.removeprefix("x")) for name in gib_by_count]
    return DpMemory(
        workload=("m/0B/256",) * len(counts),
        gpus=np.array(counts),
        memory_bytes=np.array(list(gib_by_count.values())) * GIB,
    )


SCALES_BADLY = tuple(
    a_searched_estimate(n, t) for n, t in ((1, 8.0), (2, 5.0), (4, 3.0), (8, 2.0), (16, 1.5))
)


def test_the_optimum_information_has_only_rows_of_a_full_search() -> None:
    snapshot = a_table(a_searched_estimate(1, 8.0), an_estimate(0, 0, 1, degree=1, iter_time_s=7.0))
    assert best_times(searched_optimum(snapshot)) == {1: 8.0}


def test_without_a_full_search_the_optimum_is_the_measured_estimate() -> None:
    guess = an_estimate(0, 0, 2, iter_time_s=1.0) | {"source": int(EstimateSource.ANALYTIC)}
    assert best_times(searched_optimum(a_table(an_estimate(0, 0, 1, iter_time_s=4.0), guess))) == {
        1: 4.0
    }


def test_the_data_parallel_gate_excludes_counts_whose_replicas_do_not_fit() -> None:
    fits = 0.8 * HAS / 1.2 / GIB
    seen = data_parallel(a_memory_table(x1=fits + 0.01, x2=fits - 0.01, x4=math.inf, x8=1.0))(
        a_table(*SCALES_BADLY)
    )
    assert best_times(seen) == {1: math.inf, 2: 5.0, 4: math.inf, 8: 2.0, 16: math.inf}


@pytest.mark.parametrize(
    "information",
    [searched_optimum, data_parallel(a_memory_table(x1=math.inf)), single_gpu()],
)
def test_every_information_has_the_estimates_of_profiling_tasks(information: Information) -> None:
    task = an_estimate(1, 0, 1, iter_time_s=NOMINAL_S) | {"source": int(EstimateSource.ANALYTIC)}
    snapshot = a_snapshot(
        nodes=[a_node("n0", 0, 16)],
        jobs=[a_job("j"), a_job("task", workload=1)],
        estimates=[a_searched_estimate(1, 8.0), task],
        workloads=2,
    )
    snapshot = replace(snapshot, workloads=(snapshot.workloads[0], TASK_WORKLOAD))
    e = information(snapshot).estimates
    assert e.iter_time_s[e.workload == 1].tolist() == [NOMINAL_S]


@pytest.mark.parametrize(
    ("measured", "times_s", "expected_s"),
    [
        (1, {1: 8, 2: 5, 4: 3, 8: 2, 16: 1.5}, {1: 8, 2: 4, 4: 2, 8: 1, 16: 0.5}),
        (3, {1: 8, 2: 5, 4: 3, 8: 2, 16: 1.5}, {1: 8, 2: 5, 4: 3, 8: 1.5, 16: 0.75}),
        # a model too large for the measured counts: from its smallest feasible one
        (1, {1: math.inf, 2: math.inf, 4: 3, 8: 2}, {1: math.inf, 2: math.inf, 4: 3, 8: 1.5}),
        # a measured failure stays, one at a larger count is not known
        (3, {1: 8, 2: 5, 4: math.inf, 8: 2}, {1: 8, 2: 5, 4: math.inf, 8: 1.25}),
        (1, {1: 8, 2: math.inf}, {1: 8, 2: 4}),
    ],
)
def test_times_beyond_the_measured_counts_are_extrapolated_from_the_largest_of_them(
    measured: int, times_s: dict[int, float], expected_s: dict[int, float]
) -> None:
    table = a_table(*(a_searched_estimate(n, s) for n, s in times_s.items()))
    assert best_times(single_gpu(measured)(table)) == pytest.approx(expected_s)


def test_at_most_five_counts_can_be_measured() -> None:
    for count in (0, 6):
        with pytest.raises(InvalidInput, match=r"\[1, 5\]"):
            single_gpu(count)


def test_the_memory_table_reads_failures_as_infinite(tmp_path: Path) -> None:
    file = tmp_path / "dp.csv"
    file.write_text(
        "model,params,global_batch,dp_degree,mem_per_gpu_gib,status\n"
        "bert,1.3B,256,1,12.5,ok\nbert,1.3B,256,2,,infeasible\n"
    )
    table = read_dp_memory(file)
    assert table.workload == ("bert/1.3B/256",) * 2
    assert table.gpus.tolist() == [1, 2]
    assert table.memory_bytes.tolist() == [12.5 * GIB, math.inf]


def test_a_file_that_is_not_a_memory_table_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput, match=r"other\.csv"):
        read_dp_memory(file)


def test_arenas_memory_table_has_180_rows_and_half_of_them_are_infeasible() -> None:
    folder = data_dir()
    if folder is None or not (folder / "arena" / "dp_memory.csv").exists():
        pytest.skip("Arena's data set is not here; set TESSERA_DATA")
    table = read_dp_memory(folder / "arena" / "dp_memory.csv")
    assert len(table) == 180
    assert np.isinf(table.memory_bytes).sum() == 90


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


SPHINX = Workload(model="sphinx", params="9B", global_batch=8)

TRUTH = [
    a_profile(1, 1.0),
    a_profile(2, 3.0, workload=SPHINX, pipeline_degree=1),
    a_profile(2, 2.0, workload=SPHINX, pipeline_degree=2),
]

VISIBLE = TRUTH[:1]

STATED: dict[str, Any] = {
    "workload": SPHINX,
    "requested_gpus": 2,
    "requested_gpu_type": "a100",
    "iterations": 100,
}


def test_a_job_of_a_model_that_no_round_knows_runs_at_its_best_true_speed() -> None:
    scenario = a_scenario(an_arrival("s", **STATED), an_arrival("k"), profiles=TRUTH)
    result = simulate_scenario(scenario, visible=VISIBLE)
    ends = replay_lines(lines_of(log_of(result)))
    assert ends == {"s": 200.0, "k": 1000.0}


def test_it_is_measured_once_it_has_trained_and_is_then_known() -> None:
    scenario = a_scenario(an_arrival("s", **STATED), profiles=TRUTH)
    world = a_world(scenario, visible=VISIBLE, at_s=0.0)
    assert world.snapshot().jobs.unestimated.tolist() == [True]
    give(world, "s", ("a100-0", [0, 1]), degree=BEST_FOUND)
    world.advance(13.9)
    assert world.snapshot().jobs.unestimated.tolist() == [True]
    world.advance(14.0)
    seen = world.snapshot()
    assert seen.jobs.unestimated.tolist() == [False]
    row = seen.estimates.row(int(np.argmax(seen.estimates.workload)))
    assert (row["gpus"], row["pipeline_degree"], row["iter_time_s"]) == (2, BEST_FOUND, 2.0)
    assert row["source"] == EstimateSource.MEASURED
    assert end_s(world, "s") == 200.0


def test_a_request_on_which_it_does_not_run_in_truth_is_known_to_fail() -> None:
    arrival = an_arrival("s", **STATED | {"requested_gpus": 4})
    world = a_world(a_scenario(arrival, profiles=TRUTH), visible=VISIBLE, at_s=0.0)
    give(world, "s", ("a100-0", [0, 1, 2, 3]), degree=BEST_FOUND)
    world.advance(1.0)
    seen = world.snapshot()
    assert seen.jobs.unestimated.tolist() == [False]
    assert np.isinf(seen.estimates.iter_time_s).tolist() == [False, True]
