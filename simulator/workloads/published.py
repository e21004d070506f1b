"""Published traces, each with the cluster and the profiles that it was made for.

The files are in the data folder (``arena/``, ``morphling/``), which is not part of the repository.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.clusters import hardware_of, preset_cluster
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.morphling import read_measured, read_resources, read_workload
from tessera.simulator.traces.profiles import read_profiles
from tessera.simulator.traces.screening import OnBad, ScreenedTrace, screen_jobs
from tessera.simulator.traces.shaping import first_hours, on_type, split_quotas, split_tenants
from tessera.simulator.traces.trace import Arrival, read_trace

WEEK_H: Final = 2000 * 300 / 3600
"""The hours of 2,000 rounds of 300 s, for which Arena's artifact simulates Philly."""
MT_GUARANTEED, MT_QUOTA_GPUS = 194, 64
"""Tenant A of Morphling's trace MT: its number of jobs in the artifact, and its quota (section 7.3)."""
QUOTA_TENANTS, QUOTA_BLOCK_GPUS = 4, 8
"""The number of tenants of morphling-quotas, and the GPUs of a block of their quotas, a node's."""


@dataclass(frozen=True, slots=True)
class PublishedScenario:
    """A scenario, and the outcome of screening the trace for it."""

    scenario: Scenario
    screened: ScreenedTrace[Arrival]


_Made = tuple[str, Sequence[EstimateRecord], Sequence[Arrival], Sequence[TenantSpec]]
"""Cluster, profiles, jobs, tenants."""


def load_published(
    name: str, folder: Path, on_bad: OnBad = "drop", seed: int = 0
) -> PublishedScenario:
    """Return one of ``NAMES``. Jobs whose speed the profiles do not state are dropped or refused.

    ``seed`` decides which jobs of morphling-mt are guaranteed, and the tenants and quotas of
    morphling-quotas. The other workloads draw nothing.

    Raises:
        InvalidInput: there is no such workload, or ``on_bad`` refuses jobs.
        OSError: a file does not exist.
    """
    if name not in _MAKERS:
        raise InvalidInput("workload", f"unknown {name!r}; use one of {', '.join(NAMES)}")
    cluster, profiles, arrivals, tenants = _MAKERS[name](folder, seed)
    gpu_types, nodes = preset_cluster(cluster)
    screened = screen_jobs(arrivals, profiles, gpu_types, nodes, on_bad)
    scenario = Scenario(
        gpu_types=gpu_types,
        nodes=nodes,
        profiles=profiles,
        arrivals=screened.arrivals,
        tenants=tenants,
    )
    return PublishedScenario(scenario, screened)


def _philly(folder: Path, _: int) -> _Made:
    arrivals = first_hours(read_trace(folder / "arena" / "trace_philly.csv"), WEEK_H)
    return "arena-1280", _arena_profiles(folder), arrivals, ()


def _arena_profiles(folder: Path) -> list[EstimateRecord]:
    """Return Arena's profiles. They are complete: its artifact runs nothing on other shapes."""
    return read_profiles(folder / "arena" / "alpa_optimal.csv", complete=True)


def _testbed_a(folder: Path, _: int) -> _Made:
    arrivals = read_trace(folder / "arena" / "trace_testbed_a_244.csv", iteration_divisor=1)
    return "testbed-a", _arena_profiles(folder), arrivals, ()


def _testbed_b(folder: Path, _: int) -> _Made:
    """Return testbed B. Its profiles are samples, because no measurements of it are available."""
    arrivals = read_trace(folder / "arena" / "trace_testbed_244.csv", iteration_divisor=1)
    return "testbed-b", sample_profiles(hardware_of("testbed-b")), arrivals, ()


def _h100(folder: Path, _: int) -> _Made:
    """Return the jobs of testbed B, all on its H100 (Arena, section 5.7).

    The profiles are samples.
    """
    arrivals = read_trace(folder / "arena" / "trace_testbed_244.csv", iteration_divisor=1)
    return "h100-128", sample_profiles(hardware_of("h100-128")), on_type(arrivals, "h100"), ()


def _morphling(file: str) -> Callable[[Path, int], _Made]:
    def make(folder: Path, _: int) -> _Made:
        resources = read_resources(folder / "morphling" / "plan_resources.csv")
        profiles = read_measured(folder / "morphling" / "measured.csv", resources)
        return "a800-64", profiles, read_workload(folder / "morphling" / file), ()

    return make


def _morphling_mt(folder: Path, seed: int) -> _Made:
    """Return the base trace with two tenants (section 7.3).

    The jobs that the artifact drew for each tenant are not published.
    """
    cluster, profiles, arrivals, _ = _morphling("workload_base.csv")(folder, seed)
    split, tenants = split_tenants(arrivals, MT_GUARANTEED, MT_QUOTA_GPUS, seed)
    return cluster, profiles, split, tenants


def _morphling_quotas(folder: Path, seed: int) -> _Made:
    """Return the base trace with four tenants, which share quotas of all 64 GPUs. Not published."""
    cluster, profiles, arrivals, _ = _morphling("workload_base.csv")(folder, seed)
    split, tenants = split_quotas(
        arrivals, MT_GUARANTEED, MT_QUOTA_GPUS, QUOTA_TENANTS, QUOTA_BLOCK_GPUS, seed
    )
    return cluster, profiles, split, tenants


_MAKERS: Final[Mapping[str, Callable[[Path, int], _Made]]] = {
    "arena-philly": _philly,
    "arena-testbed-a": _testbed_a,
    "arena-testbed-b": _testbed_b,
    "arena-h100": _h100,
    "morphling-base": _morphling("workload_base.csv"),
    "morphling-bp": _morphling("workload_bp.csv"),
    "morphling-mt": _morphling_mt,
    "morphling-quotas": _morphling_quotas,
}
NAMES: Final = tuple(_MAKERS)
