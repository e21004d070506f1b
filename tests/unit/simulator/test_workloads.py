"""Workloads of simulations: synthetic ones of a stated load, and published traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.estimator.samples import sample_profiles
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.clusters import hardware_of, preset_cluster
from tessera.simulator.data import data_dir
from tessera.simulator.traces.screening import screen_jobs
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.philly_like import DAY_S
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


def test_static_traces_arrive_at_once(profiles: list[EstimateRecord]) -> None:
    assert {a.arrival_s for a in draw_jobs(profiles, arrivals="at-once")} == {0.0}


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


def test_unmeasured_jobs_can_be_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be run as they are"):
        load_published_trace("arena-philly", on_bad="refuse")


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
