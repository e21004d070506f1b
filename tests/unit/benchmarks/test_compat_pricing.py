"""Arena's pricing rules: substitutes for iteration times that were not measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tessera.benchmarks.papers.arena.arena import price_profiles
from tessera.benchmarks.papers.arena.oddities import ALL_ODDITIES
from tessera.benchmarks.papers.arena.pricing import parameter_count, sizes_inferred, slow_left_out
from tessera.benchmarks.papers.bench_arena_compat import artifact_workload
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Workload
from tessera.simulator.clusters import arena_table1
from tessera.simulator.data import data_dir
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.trace import read_trace
from tests.support.worlds import a_profile, some_specs

NODES = some_specs(("a100", 2, 4))


def of_size(params: str, batch: int = 10) -> Workload:
    return Workload(model="bert", params=params, global_batch=batch)


def iter_time_s(profiles: list[EstimateRecord], params: str, gpus: int, batch: int = 10) -> float:
    [found] = [e for e in profiles if e.workload == of_size(params, batch) and e.cell.gpus == gpus]
    return found.iter_time_s


def test_each_step_in_model_size_is_a_factor_of_1_8() -> None:
    measured = [
        a_profile(1, 9.0, workload=of_size("2.6B")),
        a_profile(2, 1.0, workload=of_size("760M")),
        a_profile(2, 2.0, workload=of_size("1.3B")),
    ]
    estimates = sizes_inferred(measured, NODES, [])
    assert iter_time_s(estimates, "1.3B", 1) == pytest.approx(9.0 / 1.8)
    assert iter_time_s(estimates, "760M", 1) == pytest.approx(9.0 / 1.8**2)
    assert iter_time_s(estimates, "2.6B", 1) == 9.0
    assert math.isinf(iter_time_s(estimates, "2.6B", 2))


def test_the_next_larger_size_is_used_even_if_it_failed() -> None:
    measured = [
        a_profile(1, math.inf, workload=of_size("1.3B")),
        a_profile(1, 9.0, workload=of_size("2.6B")),
    ]
    assert math.isinf(iter_time_s(sizes_inferred(measured, NODES, [of_size("760M")]), "760M", 1))


def test_other_batches_and_shapes_are_not_used_for_inference() -> None:
    measured = [
        a_profile(1, 9.0, workload=of_size("2.6B", 20)),
        a_profile(4, 9.0, nodes=2, workload=of_size("2.6B")),
    ]
    estimates = sizes_inferred(measured, NODES, [of_size("1.3B")])
    assert math.isinf(iter_time_s(estimates, "1.3B", 1))
    assert math.isinf(iter_time_s(estimates, "1.3B", 4))


def test_a_cell_measured_only_at_a_worse_shape_does_not_run_at_the_best_one() -> None:
    measured = [a_profile(4, 9.0, nodes=2, workload=of_size("1.3B"))]
    estimates = [e for e in sizes_inferred(measured, NODES, []) if e.cell.gpus == 4]
    assert sorted((e.cell.nodes, e.iter_time_s) for e in estimates) == [(1, math.inf), (2, 9.0)]


def test_slow_iterations_are_dropped_and_not_used_for_inference() -> None:
    measured = slow_left_out([a_profile(1, 300.1, workload=of_size("2.6B"))])
    assert math.isinf(iter_time_s(sizes_inferred(measured, NODES, [of_size("1.3B")]), "1.3B", 1))
    assert slow_left_out([a_profile(1, 300.0)]) == [a_profile(1, 300.0)]


def test_model_sizes_are_parsed_in_millions_and_billions() -> None:
    assert parameter_count("760M") < parameter_count("1.3B") < parameter_count("10B")
    with pytest.raises(InvalidInput, match="large"):
        parameter_count("large")


def data_file(name: str) -> Path:
    folder = data_dir()
    if folder is None or not (folder / "arena" / name).is_file():
        pytest.skip(f"{name} is not there; set TESSERA_DATA to the folder that has arena/")
    return folder / "arena" / name


def test_the_rules_make_as_many_combinations_feasible_as_in_the_artifact() -> None:
    measured = read_profiles(data_file("alpa_optimal.csv"))
    _, nodes = arena_table1()
    jobs = [a.spec.workload for a in read_trace(data_file("trace_philly.csv"))]
    estimates = sizes_inferred(slow_left_out(measured), nodes, jobs)
    size = {n.gpu_type: n.gpus for n in nodes}
    best = [e for e in estimates if e.cell.nodes == math.ceil(e.cell.gpus / size[e.cell.gpu_type])]
    inferred = [e.provenance != "alpa_optimal.csv" for e in best]
    runs = [math.isfinite(e.iter_time_s) for e in best]
    assert len(best) == 900
    assert sum(r and not i for r, i in zip(runs, inferred, strict=True)) == 276
    assert sum(r and i for r, i in zip(runs, inferred, strict=True)) == 85


def test_39_of_986_philly_jobs_are_priced_by_inference_and_all_are_feasible() -> None:
    data_file("trace_philly.csv")
    scenario = price_profiles(artifact_workload(2000), ALL_ODDITIES)
    size = {n.gpu_type: n.gpus for n in scenario.nodes}
    at = {
        (e.workload, e.cell.gpu_type, e.cell.gpus): e
        for e in scenario.profiles
        if e.cell.nodes == math.ceil(e.cell.gpus / size[e.cell.gpu_type])
    }
    requested = [
        at[a.spec.workload, a.spec.requested_gpu_type, a.spec.requested_gpus]
        for a in scenario.arrivals
    ]
    assert len(requested) == 986
    assert sum(e.provenance != "alpa_optimal.csv" for e in requested) == 39
    assert all(math.isfinite(e.iter_time_s) for e in requested)
