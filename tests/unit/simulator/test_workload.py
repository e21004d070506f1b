from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tessera.estimator.samples import sample_profiles
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.values import Cell, EstimateSource, Workload
from tessera.simulator.clusters import NODES_PER_RACK, arena_table1
from tessera.simulator.data import data_dir
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.philly_like import (
    DAY_S,
    Habits,
    arrival_times_s,
    philly_like,
    runnable_workloads,
)


@pytest.fixture(scope="module")
def profiles() -> list[EstimateRecord]:
    return sample_profiles()


@pytest.fixture(scope="module")
def jobs(profiles: list[EstimateRecord]) -> list[Arrival]:
    return philly_like(3000, seed=7, profiles=profiles)


def test_the_same_seed_gives_the_same_jobs(
    profiles: list[EstimateRecord], jobs: list[Arrival]
) -> None:
    assert philly_like(3000, seed=7, profiles=profiles) == jobs
    assert philly_like(3000, seed=8, profiles=profiles) != jobs


def test_every_job_requests_a_feasible_cell(
    profiles: list[EstimateRecord], jobs: list[Arrival]
) -> None:
    runs = {
        (e.workload, e.cell.gpu_type, e.cell.gpus) for e in profiles if math.isfinite(e.iter_time_s)
    }
    assert all((s.workload, s.requested_type, s.requested_gpus) in runs for _, s in jobs)
    assert len({s.name for _, s in jobs}) == len(jobs)


def test_most_jobs_are_small_and_a_few_take_sixteen_gpus(jobs: list[Arrival]) -> None:
    count = Counter(s.requested_gpus for _, s in jobs)
    assert count[1] + count[2] + count[4] > 0.8 * len(jobs)
    assert 0.03 < count[16] / len(jobs) < 0.07
    assert set(count) == {1, 2, 4, 8, 16}


def test_durations_have_a_heavy_tail(profiles: list[EstimateRecord], jobs: list[Arrival]) -> None:
    known = runnable_workloads(profiles, Habits().gpus)
    seconds = np.array(
        [
            s.iterations
            * dict(known[s.requested_gpus][s.requested_type][s.workload.model])[s.workload]
            for _, s in jobs
        ]
    )
    assert 1200 < np.median(seconds) < 2700
    assert np.mean(seconds) > 3 * np.median(seconds)


def test_arrivals_have_the_requested_mean_and_come_in_bursts(jobs: list[Arrival]) -> None:
    times = np.array([a.arrival_s for a in jobs])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(20.0, rel=0.15)
    assert np.std(gaps) > 1.5 * np.mean(gaps)  # the ratio of an exponential distribution is 1


def test_more_jobs_arrive_by_day_than_by_night() -> None:
    times = arrival_times_s(np.random.default_rng(3), 20_000, Habits(mean_gap_s=60.0))
    by_day = np.mean((times % DAY_S > DAY_S / 4) & (times % DAY_S < 3 * DAY_S / 4))
    assert by_day == pytest.approx(0.5 + 0.6 / math.pi, abs=0.05)


def test_infeasible_counts_are_not_requested() -> None:
    only = EstimateRecord(
        workload=Workload(model="m", params="1B", global_batch=8),
        cell=Cell(gpu_type="a40", gpus=4, pipeline_degree=1, nodes=2),
        iter_time_s=2.0,
        source=EstimateSource.ANALYTIC,
    )
    arrivals = philly_like(20, seed=1, profiles=[only])
    assert {(s.requested_gpus, s.requested_type) for _, s in arrivals} == {(4, "a40")}


def test_the_papers_cluster_has_320_gpus_of_each_type() -> None:
    types, nodes = arena_table1()
    assert Counter(n.gpu_type for n in nodes) == {"a100": 80, "v100": 20, "a40": 160, "a10": 160}
    gpus = Counter[str]()
    for node in nodes:
        gpus[node.gpu_type] += node.gpus
    assert dict(gpus) == {t.name: 320 for t in types}
    assert max(Counter(n.rack for n in nodes).values()) == NODES_PER_RACK
    assert len({n.name for n in nodes}) == len(nodes)


def test_the_data_folder_is_the_configured_one_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "absent"))
    assert data_dir() is None
