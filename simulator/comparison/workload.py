"""Specifications of workloads and clusters for tasks of a sweep, and the scenarios made from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

from tessera.estimator.samples import sample_profiles
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import NodeSpec
from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.clusters import hardware_of, preset_cluster
from tessera.simulator.data import MissingData, data_dir, data_file
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.files import profiles_of, trace_of
from tessera.simulator.traces.screening import screen_jobs
from tessera.simulator.traces.shaping import (
    first_hours,
    looser_deadlines,
    sample_jobs,
    with_deadlines,
    without_deadlines,
)
from tessera.simulator.traces.speeds import ClusterRoom, Speeds, requested_load
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.workloads.published import NAMES, PublishedScenario, load_published
from tessera.simulator.workloads.synthetic import ArrivalProcess, SyntheticTrace

ROUND_S: Final = 300.0
PHILLY: Final = "arena-philly"
SYNTHETIC: Final = "synthetic"
CLUSTER: Final = "arena-1280"
OnBad = Literal["drop", "refuse", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload and its cluster as text and numbers, so that they can be options of a task.

    ``gpus_share`` is the share of the nodes of each GPU type that is used. ``jobs``, ``load`` and
    ``arrivals_as`` apply to synthetic jobs (``SyntheticTrace``). The ``seed`` draws those jobs, or
    ``jobs_share`` of a trace's jobs. If ``tightness`` is above 0, each deadline is that multiple of
    the job's duration as requested. Otherwise, with ``deadlines``, the
    deadlines of the trace apply, at ``deadline_factor`` times their distance from arrival.
    """

    trace: str = PHILLY
    profiles: str = ""
    cluster: str = ""
    gpus_share: float = 1.0
    jobs_share: float = 1.0
    rounds: int = 2000
    jobs: int = 400
    load: float = 1.0
    arrivals_as: ArrivalProcess = "poisson"
    deadlines: bool = False
    deadline_factor: float = 1.0
    tightness: float = 0.0
    on_bad: OnBad = "drop"
    seed: int = 0

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the named files from which the workload is read.

        Files of the data folder do not change and are left out.
        """
        named = (self.trace if self.trace not in (*NAMES, SYNTHETIC) else "", self.profiles)
        return tuple(Path(name) for name in named if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScenario:
    """A scenario with its load and the number of jobs that were dropped."""

    scenario: Scenario
    dropped: int
    load: float
    """GPU-hours requested by jobs of known length, divided by those that the cluster has until the
    last arrival."""
    horizon_s: float
    """The end of the rounds, or of the arrivals if that is earlier."""


def default_trace(trace: str | None) -> str:
    """Return the given trace, or else Philly if the data sets exist, or else the synthetic one."""
    return trace or (PHILLY if data_file(None, "arena", "trace_philly.csv") else SYNTHETIC)


def resize_workload(
    work: WorkloadSpec, gpus_share: float, jobs_share: float, jobs: int
) -> WorkloadSpec:
    """Return the workload with ``jobs`` synthetic jobs, or with ``jobs_share`` of a trace's jobs."""
    share = 1.0 if work.trace == SYNTHETIC else jobs_share
    return replace(work, gpus_share=gpus_share, jobs_share=share, jobs=jobs)


def check_trace(trace: str) -> None:
    """Check that a trace can be read, before anything runs.

    Raises:
        MissingData: the trace does not exist.
        InvalidInput: the trace cannot be read, or has no models.
    """
    if trace in NAMES:
        _read_published(WorkloadSpec(trace=trace))
    elif trace != SYNTHETIC:
        jobs_of(Path(trace))


def jobs_of(trace: Path) -> list[Arrival]:
    """Return the jobs of a file. The errors are those of ``check_trace``."""
    if not trace.is_file():
        raise MissingData(f"{trace} does not exist; pass another file or set TESSERA_DATA")
    jobs = trace_of(trace)
    arrivals = [one for one in jobs if isinstance(one, Arrival)]
    if len(arrivals) < len(jobs):
        raise InvalidInput(
            "trace",
            f"{trace.name} has durations and no models; draw models with `tessera import trace"
            f" {trace} --redraw --profiles FILE.csv --nodes TYPE=NODESxGPUS --to OUT.csv`",
        )
    return arrivals


def check_seeds(seeds: int, work: WorkloadSpec) -> None:
    """Refuse several seeds if all would draw the same jobs.

    Raises:
        InvalidInput: the seeds would draw the same jobs.
    """
    if seeds > 1 and work.jobs_share >= 1 and work.trace != SYNTHETIC:
        raise InvalidInput(
            "seeds",
            f"all seeds would draw the same jobs of {work.trace}; give --jobs-share below 1, or use"
            " one seed",
        )


def make_scenario(work: WorkloadSpec) -> PreparedScenario:
    """Return the scenario of a workload.

    Raises:
        MissingData: a data set does not exist.
        InvalidInput: the workload cannot be made; the message says what is wrong.
    """
    source = _source(work)
    whole, dropped = source.scenario, source.dropped
    kept = first_hours(whole.arrivals, work.rounds * ROUND_S / 3600)
    kept = looser_deadlines(kept, work.deadline_factor)
    if not work.deadlines:
        kept = without_deadlines(kept)
    if work.on_bad != "keep":
        screened = screen_jobs(kept, whole.profiles, whole.gpu_types, whole.nodes, work.on_bad)
        dropped += len(screened.dropped)
        kept = screened.arrivals
    if work.jobs_share != 1:
        kept = sample_jobs(kept, work.jobs_share, work.seed)
    if work.tightness:
        bounds = (work.tightness, work.tightness)
        kept = with_deadlines(
            kept, Speeds(whole.profiles, ClusterRoom.of(whole.nodes)), bounds, work.seed
        )
    if not kept:
        raise InvalidInput(
            "trace", "has no job that can run on this cluster; use more rounds or more GPUs"
        )
    last_s = ROUND_S * max(1, math.ceil(kept[-1].arrival_s / ROUND_S))
    return PreparedScenario(
        scenario=replace(whole, arrivals=kept),
        dropped=dropped,
        load=requested_load(kept, Speeds(whole.profiles), whole.gpus),
        horizon_s=min(work.rounds * ROUND_S, last_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TraceScenario:
    """All jobs of a trace, on its cluster."""

    scenario: Scenario
    dropped: int = 0


def _source(work: WorkloadSpec) -> _TraceScenario:
    if work.trace == SYNTHETIC:
        return _TraceScenario(scenario=_synthetic(work))
    if work.trace in NAMES:
        return _published(work)
    jobs = jobs_of(Path(work.trace))
    profiles = data_file(
        Path(work.profiles) if work.profiles else None, "arena", "alpa_optimal.csv"
    )
    if profiles is None:
        missing = work.profiles or "alpa_optimal.csv"
        raise MissingData(f"{missing} does not exist; pass --profiles or set TESSERA_DATA")
    gpu_types, nodes = preset_cluster(work.cluster or CLUSTER, work.gpus_share)
    return _TraceScenario(
        scenario=Scenario(
            gpu_types=gpu_types,
            nodes=nodes,
            profiles=profiles_of(profiles, complete=not work.profiles),  # Arena's are complete
            arrivals=jobs,
        )
    )


def _synthetic(work: WorkloadSpec) -> Scenario:
    cluster = work.cluster or CLUSTER
    gpu_types, nodes = preset_cluster(cluster, work.gpus_share)
    profiles = (
        profiles_of(Path(work.profiles)) if work.profiles else list(cached_sample_profiles(cluster))
    )
    recipe = SyntheticTrace(jobs=work.jobs, load=work.load, arrivals=work.arrivals_as)
    drawn = recipe.draw(profiles, nodes, work.seed)
    return Scenario(gpu_types=gpu_types, nodes=nodes, profiles=profiles, arrivals=drawn)


@cache
def cached_sample_profiles(cluster: str) -> tuple[EstimateRecord, ...]:
    """Return sample profiles of a cluster's GPU types.

    They are cached, because they take a second and every task needs them.
    """
    return tuple(sample_profiles(hardware_of(cluster)))


def _published(work: WorkloadSpec) -> _TraceScenario:
    if work.profiles or work.on_bad == "keep":
        raise InvalidInput(
            "trace",
            f"{work.trace} has its own profiles, by which its jobs are screened; pass the trace as a"
            " file to use other profiles, or to keep jobs that cannot run as requested",
        )
    published = _read_published(work)
    scenario, screened = published.scenario, published.screened
    if work.cluster:
        gpu_types, nodes = preset_cluster(work.cluster, work.gpus_share)
        scenario = replace(scenario, gpu_types=gpu_types, nodes=nodes)
    elif work.gpus_share != 1:
        scenario = replace(scenario, nodes=shrink_nodes(scenario.nodes, work.gpus_share))
    return _TraceScenario(scenario=scenario, dropped=len(screened.dropped))


def _read_published(work: WorkloadSpec) -> PublishedScenario:
    folder = data_dir()
    if folder is None:
        raise MissingData(
            f"{work.trace} needs the data sets, which are not on this machine; set TESSERA_DATA"
        )
    try:
        return load_published(
            work.trace, folder, "refuse" if work.on_bad == "refuse" else "drop", work.seed
        )
    except FileNotFoundError as error:
        raise MissingData(f"{error.filename} does not exist; set TESSERA_DATA") from error
    except InvalidInput as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise MissingData(f"{error.field} does not exist; set TESSERA_DATA") from error
        raise


def shrink_nodes(nodes: Sequence[NodeSpec], share: float) -> list[NodeSpec]:
    """Return the first nodes of each GPU type: a share of them, but at least one.

    Raises:
        InvalidInput: the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InvalidInput("gpus_share", "must be above 0 and at most 1 unless a cluster is named")
    of_type: dict[str, list[NodeSpec]] = {}
    for node in nodes:
        of_type.setdefault(node.gpu_type, []).append(node)
    return [n for some in of_type.values() for n in some[: max(1, round(share * len(some)))]]
