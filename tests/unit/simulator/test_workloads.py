"""Workloads of simulations and named clusters, as drawn and as published."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.estimator.hardware import ALL, CATALOGUE
from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.clusters import (
    NODES_PER_RACK,
    PRESETS,
    arena_table1,
    hardware_of,
    preset_cluster,
)
from tessera.simulator.data import data_dir
from tessera.simulator.traces.screening import screen_jobs
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.philly_like import (
    DAY_S,
    philly_like,
)
from tessera.simulator.workloads.published import NAMES, PublishedScenario, load_published
from tessera.simulator.workloads.synthetic import SyntheticTrace

TYPES, NODES = preset_cluster("testbed-a")

GPUS = 64


@pytest.fixture(scope="module")
def profiles() -> list[EstimateRecord]:
    return sample_profiles(hardware_of("testbed-a"))


def draw_jobs(profiles: list[EstimateRecord], seed: int = 1, **settings: Any) -> list[Arrival]:
    return SyntheticTrace(**({"jobs": 400} | settings)).draw(profiles, NODES, seed)


@pytest.mark.parametrize("arrivals", ["poisson", "philly-like"])
@pytest.mark.parametrize("wanted", [0.3, 1.5])
def test_synthetic_jobs_produce_the_requested_load(
    profiles: list[EstimateRecord], arrivals: str, wanted: float
) -> None:
    jobs = draw_jobs(profiles, arrivals=arrivals, load=wanted)
    speeds = Speeds(profiles, ClusterRoom.of(NODES))
    assert requested_load(jobs, speeds, GPUS) == pytest.approx(wanted, rel=1e-6)
    assert [a.arrival_s for a in jobs] == sorted(a.arrival_s for a in jobs)


def test_synthetic_jobs_are_valid_and_reproducible_by_seed(
    profiles: list[EstimateRecord],
) -> None:
    jobs = draw_jobs(profiles)
    assert screen_jobs(jobs, profiles, TYPES, NODES).arrivals == jobs
    assert draw_jobs(profiles) == jobs != draw_jobs(profiles, seed=2)


def test_poisson_gaps_are_exponential_and_philly_like_ones_come_in_bursts(
    profiles: list[EstimateRecord],
) -> None:
    def spread(arrivals: str) -> float:
        gaps = np.diff([a.arrival_s for a in draw_jobs(profiles, jobs=2000, arrivals=arrivals)])
        return float(np.std(gaps) / np.mean(gaps))

    assert spread("poisson") == pytest.approx(1.0, abs=0.1)
    assert spread("philly-like") > 1.5


def test_philly_like_jobs_arrive_by_day_even_if_the_load_is_scaled(
    profiles: list[EstimateRecord],
) -> None:
    jobs = draw_jobs(profiles, jobs=4000, arrivals="philly-like", load=0.2)
    times = np.array([a.arrival_s for a in jobs])
    assert times[-1] > 5 * DAY_S
    whole = times[times < math.floor(times[-1] / DAY_S) * DAY_S]
    by_day = np.mean((whole % DAY_S > DAY_S / 4) & (whole % DAY_S < 3 * DAY_S / 4))
    assert by_day == pytest.approx(0.5 + 0.6 / math.pi, abs=0.06)


def test_counts_beyond_the_cluster_are_not_drawn_and_feasible_ones_are_not_refused(
    profiles: list[EstimateRecord],
) -> None:
    jobs = SyntheticTrace(jobs=50).draw(profiles, NODES[:4], 1)
    assert {a.spec.requested_gpus for a in jobs} == {1, 2, 4, 8}
    with pytest.raises(InvalidInput, match="run no workload"):
        draw_jobs([record for record in profiles if record.cell.gpus > 16])
    assert draw_jobs(profiles, jobs=0) == []


@pytest.mark.parametrize(
    "wrong",
    [{"jobs": -1}, {"load": 0.0}, {"load": math.inf}],
)
def test_meaningless_distributions_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        SyntheticTrace(**({"jobs": 1} | wrong))


def load_published_trace(name: str, **rest: Any) -> PublishedScenario:
    folder = data_dir()
    needed = "morphling/measured.csv" if "morphling" in name else "arena/trace_philly.csv"
    if folder is None or not (folder / needed).is_file():
        pytest.skip(f"{needed} is not there; set TESSERA_DATA to the folder that has it")
    return load_published(name, folder, **rest)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "jobs", "dropped", "gpus"),
    [
        ("arena-philly", 950, 36, 1280),
        ("arena-testbed-a", 219, 25, 64),
        ("arena-testbed-b", 244, 0, 384),
        ("arena-h100", 244, 0, 128),
        ("morphling-base", 406, 0, 64),
        ("morphling-bp", 406, 0, 64),
        ("morphling-mt", 406, 0, 64),
    ],
)
def test_published_traces_fit_their_clusters_except_for_unmeasured_jobs(
    name: str, jobs: int, dropped: int, gpus: int
) -> None:
    trace = load_published_trace(name)
    assert len(trace.scenario.arrivals) == jobs
    assert len(trace.screened.dropped) == dropped
    assert trace.scenario.gpus == gpus


def test_the_multi_tenant_trace_has_194_guaranteed_jobs_and_a_quota_of_64() -> None:
    scenario = load_published_trace("morphling-mt").scenario
    assert sum(a.spec.guaranteed for a in scenario.arrivals) == 194
    assert [t.quotas for t in scenario.tenants] == [{"": 64}, {}]
    other = load_published_trace("morphling-mt", seed=1).scenario
    assert scenario.arrivals != other.arrivals


def test_four_tenants_share_quotas_of_64_gpus_and_guaranteed_jobs_fit_theirs() -> None:
    scenario = load_published_trace("morphling-quotas").scenario
    quotas = {t.name: t.quotas[""] for t in scenario.tenants}
    owed = [a.spec for a in scenario.arrivals if a.spec.guaranteed]

    assert (len(quotas), sum(quotas.values()), len(owed)) == (4, 64, 194)
    assert all(gpus % 8 == 0 and gpus >= 8 for gpus in quotas.values())
    assert all(spec.requested_gpus <= quotas[spec.tenant] for spec in owed)
    other = load_published_trace("morphling-quotas", seed=1).scenario
    assert scenario.tenants != other.tenants


def test_morphlings_cells_have_their_plans_needs_and_its_nodes_their_capacity() -> None:
    scenario = load_published_trace("morphling-base").scenario

    assert {(n.cpus, n.host_bytes) for n in scenario.nodes} == {(96, 1_600 * 10**9)}
    assert all(e.cpus > 0 and e.host_bytes > 0 for e in scenario.profiles if e.cell.plan != "")
    known = {(e.workload, e.cell.plan, e.cell.gpus) for e in scenario.profiles}
    asked = {
        (a.spec.workload, a.spec.submitted_plan, a.spec.requested_gpus) for a in scenario.arrivals
    }
    assert asked <= known


def test_an_unknown_workload_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=", ".join(NAMES)):
        load_published("lab", tmp_path)


@pytest.fixture(scope="module")
def every_profile() -> list[EstimateRecord]:
    return sample_profiles()


@pytest.fixture(scope="module")
def jobs(every_profile: list[EstimateRecord]) -> list[Arrival]:
    return philly_like(3000, seed=7, profiles=every_profile)


def test_the_same_seed_gives_the_same_jobs(
    every_profile: list[EstimateRecord], jobs: list[Arrival]
) -> None:
    assert philly_like(3000, seed=7, profiles=every_profile) == jobs
    assert philly_like(3000, seed=8, profiles=every_profile) != jobs


def test_every_job_requests_a_feasible_cell(
    every_profile: list[EstimateRecord], jobs: list[Arrival]
) -> None:
    runs = {
        (e.workload, e.cell.gpu_type, e.cell.gpus)
        for e in every_profile
        if math.isfinite(e.iter_time_s)
    }
    assert all((s.workload, s.requested_gpu_type, s.requested_gpus) in runs for _, s in jobs)
    assert len({s.name for _, s in jobs}) == len(jobs)


def test_arrivals_have_the_requested_mean_and_come_in_bursts(jobs: list[Arrival]) -> None:
    times = np.array([a.arrival_s for a in jobs])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(20.0, rel=0.15)
    assert np.std(gaps) > 1.5 * np.mean(gaps)  # the ratio of an exponential distribution is 1


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


def nodes_and_gpus(name: str, share: float = 1.0) -> dict[str, tuple[int, int]]:
    """Return the numbers of nodes and GPUs of each type."""
    _, nodes = preset_cluster(name, share)
    count = Counter(n.gpu_type for n in nodes)
    return {t: (n, sum(x.gpus for x in nodes if x.gpu_type == t)) for t, n in count.items()}


def test_the_presets_have_the_papers_nodes_and_gpus() -> None:
    assert {name: nodes_and_gpus(name) for name in PRESETS} == {
        "arena-1280": {"a100": (80, 320), "v100": (20, 320), "a40": (160, 320), "a10": (160, 320)},
        "testbed-a": {"a40": (16, 32), "a10": (16, 32)},
        "testbed-b": {"h100": (16, 128), "l20": (16, 256)},
        "h100-128": {"h100": (16, 128)},
        "a800-64": {"a800": (8, 64)},
        "tiny": {"a100": (4, 16), "v100": (1, 16), "a40": (8, 16), "a10": (8, 16)},
    }


def test_a_share_keeps_that_part_of_each_type_but_at_least_one_node() -> None:
    assert nodes_and_gpus("testbed-b", 0.25) == {"h100": (4, 32), "l20": (4, 64)}
    assert nodes_and_gpus("arena-1280", 0.01) == {
        "a100": (1, 4),
        "v100": (1, 16),
        "a40": (2, 4),
        "a10": (2, 4),
    }


@pytest.mark.parametrize(("name", "share"), [("lab", 1.0), ("testbed-a", 0.0), ("testbed-a", -1.0)])
def test_an_unknown_cluster_is_refused(name: str, share: float) -> None:
    with pytest.raises(InvalidInput):
        preset_cluster(name, share)


def test_every_gpu_type_has_a_unique_name_and_presets_use_known_types() -> None:
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)
    assert set(CATALOGUE[: len(ALL)]) == set(ALL)
    assert {kind for name in PRESETS for kind in hardware_of(name)} <= set(CATALOGUE)
