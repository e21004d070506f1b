"""The trace and the cluster of a simulation, as named on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from tessera.estimator.hardware import CATALOGUE
from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import GpuType
from tessera.formulation.records.clusters import NodeSpec, TenantSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.service.cli.simulation import traces
from tessera.service.cli.simulation.importing import read_rows
from tessera.simulator.clusters import TypesAndNodes, preset_cluster
from tessera.simulator.comparison.workload import PreparedScenario
from tessera.simulator.data import data_dir
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.files import profiles_of, trace_of
from tessera.simulator.traces.screening import DroppedJob, bad_lines, order_lines
from tessera.simulator.traces.speeds import gpu_seconds, requested_load
from tessera.simulator.traces.trace import Arrival, DurationJob, TraceOptions
from tessera.simulator.workloads.published import NAMES, load_published
from tessera.simulator.workloads.synthetic import SyntheticTrace

SYNTHETIC_CLUSTER: Final = "tiny"
"""The cluster of synthetic jobs if no cluster is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationInput:
    """The source of the jobs and the cluster. ``jobs`` is the number drawn without a ``trace``."""

    trace: str | None
    cluster: str | None
    jobs: int
    wanted: traces.ShapingSettings
    reading: TraceOptions
    prices: Mapping[str, float] = field(default_factory=dict)
    """Maps GPU types to dollars per GPU and hour."""
    complete: bool = False
    """Whether the named profiles have all shapes on which their workloads run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenScenario:
    """A scenario, the jobs that were dropped from it, and notes on it."""

    scenario: Scenario
    dropped: tuple[DroppedJob, ...]
    notes: tuple[str, ...]
    load: float
    """The requested GPU-hours, relative to those of the cluster until the last arrival.

    It is inf if all jobs arrive at the same time.
    """
    ample_s: float
    """A time by which all work is done, unless GPUs stay idle most of the time."""

    @property
    def last_s(self) -> float:
        """Return the time at which the last job arrives."""
        return self.scenario.arrivals[-1].arrival_s

    def over(self, window_s: float) -> PreparedScenario:
        """Return the scenario as a benchmark's workload, measured over the first ``window_s``."""
        return PreparedScenario(
            scenario=self.scenario,
            dropped=len(self.dropped),
            load=self.load,
            horizon_s=window_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceInput:
    jobs: Sequence[Arrival] | Sequence[DurationJob]
    profiles: Sequence[EstimateRecord]
    cluster: TypesAndNodes
    tenants: Sequence[TenantSpec] = ()
    dropped: Sequence[DroppedJob] = ()


def choose_scenario(source: SimulationInput) -> ChosenScenario:
    """Return the scenario to simulate.

    Raises:
        InvalidInput: a file is wrong or missing, the cluster is unknown, or jobs are bad and must
            not be dropped.
    """
    given = _read_input(source)
    gpu_types, nodes = _priced(given.cluster[0], source.prices), given.cluster[1]
    target = traces.ShapingTarget(profiles=given.profiles, gpu_types=gpu_types, nodes=nodes)
    shaped = traces.shape_trace(source.wanted, given.jobs, target)
    if shaped.speeds is None:
        raise AssertionError("the target is known")
    scenario = Scenario(
        gpu_types=gpu_types,
        nodes=nodes,
        profiles=given.profiles,
        arrivals=shaped.arrivals,
        tenants=shaped.tenants or given.tenants,
    )
    dropped = (*given.dropped, *shaped.dropped)
    work_s = float(gpu_seconds(shaped.arrivals, shaped.speeds).sum()) / scenario.gpus
    longest_s = float(shaped.speeds.requested_s(shaped.arrivals).max())
    return ChosenScenario(
        scenario=scenario,
        dropped=dropped,
        notes=tuple(_notes(scenario, dropped, shaped)),
        load=requested_load(shaped.arrivals, shaped.speeds, scenario.gpus),
        ample_s=shaped.arrivals[-1].arrival_s + 4 * (work_s + longest_s),
    )


def window_s(last_s: float, round_s: float, ends_s: Sequence[float], horizon_s: float) -> float:
    """Return the window of throughput and utilisation, the same for all policies.

    If there is a horizon, the window ends there. Otherwise it ends when jobs have ceased to arrive,
    in whole rounds. If all jobs arrive within one round, it ends when the first policy is done.
    """
    if math.isfinite(horizon_s):
        return horizon_s
    if last_s > round_s:
        return round_s * math.ceil(last_s / round_s)
    return max(min(ends_s), round_s)


def _read_input(source: SimulationInput) -> _TraceInput:
    named, cluster = source.wanted.profiles, _cluster(source)
    if source.complete and named is None:
        raise InvalidInput("--complete", "is about a file of profiles; name it with --profiles")
    read_profiles = partial(profiles_of, complete=source.complete)
    profiles = [] if named is None else read_rows(read_profiles, named)
    if source.trace is None:
        cluster = cluster or preset_cluster(SYNTHETIC_CLUSTER)
        profiles = profiles or _samples(cluster)
        jobs = SyntheticTrace(jobs=source.jobs).draw(
            profiles, cluster[1], source.wanted.recipe.seed
        )
        return _TraceInput(jobs=jobs, profiles=profiles, cluster=cluster)
    if source.trace in NAMES:
        return _published(source, profiles, cluster)
    jobs_in_file = read_rows(lambda path: trace_of(path, source.reading), Path(source.trace))
    if not profiles:
        raise InvalidInput(
            "--profiles", "is required: a CSV of the iteration times of the trace's models"
        )
    if cluster is None:
        raise InvalidInput(
            "--cluster, --nodes", "one is required, to say on which GPUs the jobs run"
        )
    return _TraceInput(jobs=jobs_in_file, profiles=profiles, cluster=cluster)


def _published(
    source: SimulationInput, profiles: Sequence[EstimateRecord], cluster: TypesAndNodes | None
) -> _TraceInput:
    """Return a published trace, with its own profiles and cluster unless others are named."""
    folder = data_dir()
    if folder is None:
        raise InvalidInput(
            "TRACE", f"{source.trace} needs the data sets; set TESSERA_DATA to their folder"
        )
    wanted = source.wanted
    on_bad: traces.BadJobTreatment = wanted.on_bad or traces.BadJobTreatment.REFUSE
    try:
        published = load_published(source.trace or "", folder, on_bad.value, wanted.recipe.seed)
    except FileNotFoundError as error:
        raise InvalidInput(
            "TRACE",
            f"{error.filename} does not exist; set TESSERA_DATA to the folder of the data sets",
        ) from error
    scenario = published.scenario
    return _TraceInput(
        jobs=scenario.arrivals[: source.reading.limit],
        profiles=profiles or scenario.profiles,
        cluster=cluster or (list(scenario.gpu_types), list(scenario.nodes)),
        tenants=scenario.tenants,
        dropped=published.screened.dropped,
    )


def _cluster(source: SimulationInput) -> TypesAndNodes | None:
    """Return the cluster that either option names, or None."""
    nodes = list(source.wanted.nodes)
    if source.cluster is None:
        return (_types(nodes), nodes) if nodes else None
    if nodes:
        raise InvalidInput("--cluster", "cannot be combined with --nodes")
    return preset_cluster(source.cluster)


def _types(nodes: Sequence[NodeSpec]) -> list[GpuType]:
    """Return the nodes' GPU types. A type without a data sheet here has unknown memory."""
    sheets = {kind.name: kind.gpu_type for kind in CATALOGUE}
    names = dict.fromkeys(node.gpu_type for node in nodes)
    return [sheets.get(name, GpuType(name=name, memory_bytes=0)) for name in names]


def _priced(gpu_types: Sequence[GpuType], prices: Mapping[str, float]) -> list[GpuType]:
    """Return the types with their prices. Raises InvalidInput: the cluster lacks a named type."""
    if strange := sorted(set(prices) - {kind.name for kind in gpu_types}):
        raise InvalidInput("--price", f"names {', '.join(strange)}, which the cluster lacks")
    return [replace(kind, dollars_per_hour=prices.get(kind.name, 0.0)) for kind in gpu_types]


def _samples(cluster: TypesAndNodes) -> list[EstimateRecord]:
    """Return sample profiles of the cluster's types."""
    names = {kind.name for kind in cluster[0]}
    profiles = sample_profiles(kind for kind in CATALOGUE if kind.name in names)
    if not profiles:
        have = ", ".join(sorted(kind.name for kind in CATALOGUE))
        raise InvalidInput(
            "--profiles",
            f"is required, because samples exist only for {have}, not for {', '.join(sorted(names))}",
        )
    return profiles


def _notes(
    scenario: Scenario, dropped: Sequence[DroppedJob], shaped: traces.ShapedTrace
) -> list[str]:
    notes = [f"dropped {line}" for line in bad_lines(dropped)]
    notes += [f"{line}; put in order" for line in order_lines(shaped.reordered)]
    notes += traces.resized_lines(shaped.resized)
    profiled = {
        profile.cell.gpu_type for profile in scenario.profiles if math.isfinite(profile.iter_time_s)
    }
    if idle := sorted({node.gpu_type for node in scenario.nodes} - profiled):
        notes.append(f"no profile is for {', '.join(idle)}, so these GPUs stay idle")
    return notes
