"""Simulation benchmarks: a workload by name, a policy by name, and one run of both as a task of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import typer

from benchmarks.contestants import information_of, options_of
from benchmarks.data import data_dir
from benchmarks.judging import Judged, Watch
from benchmarks.registry import Skip
from benchmarks.sweeps.tasks import Task
from estimator.roofline import sample_profiles
from formulation.errors import InvalidInput
from formulation.resources import EstimateRecord, NodeSpec
from formulation.tables import Floats
from service.importing.files import profiles_of, trace_of
from service.importing.screening import screen
from service.importing.shaping import (
    first_hours,
    looser_deadlines,
    sampled,
    with_deadlines,
    without_deadlines,
)
from service.importing.speeds import Room, Speeds, load
from service.importing.trace import Arrival
from simulator.bounds import throughput_bound
from simulator.clusters import hardware_of, preset
from simulator.log import Segment
from simulator.metrics import Reference, alone_seconds, figures, reference_of, series_of
from simulator.overheads import overheads as overheads_of
from simulator.run import Conditions, Decider, Result, simulate
from simulator.scenario import Scenario
from simulator.truth import perturbed
from simulator.workloads.published import NAMES, published
from simulator.workloads.synthetic import Synthetic
from solvers.policies.base import Published

ROUND_S: Final = 300.0
PHILLY: Final = "arena-philly"
SYNTHETIC: Final = "synthetic"
CLUSTER: Final = "arena-1280"
BINS: Final = 400
"""Points of a course over time."""
TASK: Final = "benchmarks.simulating:simulated"
BOUND_TASK: Final = "benchmarks.simulating:bounded"

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", help=f"A CSV, or one of {', '.join((*NAMES, SYNTHETIC))}; else Philly."
    ),
]
ProfilesOption = Annotated[
    Path | None, typer.Option("--profiles", help="Profiles as CSV; else those of the trace.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="A cluster of the papers; else the trace's.")
]
JobsShareOption = Annotated[
    float, typer.Option("--jobs-share", help="Share of the trace's jobs, drawn by seed.")
]
RoundsOption = Annotated[
    int,
    typer.Option("--rounds", min=1, help="The horizon in rounds of 300 s; jobs arrive before it."),
]
OverheadsOption = Annotated[
    str, typer.Option("--overheads", help="What restarts cost; see simulator/overheads.py.")
]
DpMemoryOption = Annotated[
    Path | None,
    typer.Option("--dp-memory", help="Memory of data parallelism as CSV; else Arena's."),
]
OnBad = Literal["drop", "refuse", "keep"]
OnBadOption = Annotated[
    OnBad, typer.Option("--on-bad", help="Jobs that cannot run as they were requested.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A workload and its cluster, as text and numbers, so that a task can name it.

    ``gpus_share`` of the cluster's nodes of each type are there. ``jobs`` and ``load`` are of synthetic
    jobs; a ``seed`` draws those, or ``jobs_share`` of a trace's. ``tightness`` above 0 sets deadlines, at so
    many times each job's duration as requested; else those of the trace hold, if ``deadlines``,
    at ``deadline_factor`` times their distance from arrival.
    """

    trace: str = PHILLY
    profiles: str = ""
    cluster: str = ""
    gpus_share: float = 1.0
    jobs_share: float = 1.0
    rounds: int = 2000
    jobs: int = 400
    load: float = 1.0
    deadlines: bool = False
    deadline_factor: float = 1.0
    tightness: float = 0.0
    on_bad: OnBad = "drop"
    seed: int = 0

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that it is read from and that have names; the data folder's do not change."""
        named = (self.trace if self.trace not in (*NAMES, SYNTHETIC) else "", self.profiles)
        return tuple(Path(name) for name in named if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A scenario, what of the workload did not fit it, and how much work it is for the cluster."""

    scenario: Scenario
    dropped: int
    said: str
    load: float
    """GPU-hours requested over those of the cluster until the last arrival; of jobs with a known length."""
    horizon_s: float
    """The end of the rounds, or of arrivals where these end before."""


def default_trace(trace: str | None) -> str:
    """Return the trace: Philly where data sets are, else the synthetic one."""
    return trace or (PHILLY if data_dir() else SYNTHETIC)


def data_file(given: Path | None, *within: str) -> Path | None:
    """Return ``given``, or a file of the data folder; None where neither is."""
    folder = data_dir()
    found = given or (folder.joinpath(*within) if folder else None)
    return found if found is not None and found.is_file() else None


def made(work: Work) -> Made:
    """Return the scenario of a workload.

    Raises:
        Skip: a data set is absent.
        InvalidInput: the workload cannot be made; the message says what is wrong.
    """
    source = _source(work)
    whole, said, dropped = source.scenario, source.said, source.dropped
    kept = first_hours(whole.arrivals, work.rounds * ROUND_S / 3600)
    kept = looser_deadlines(kept, work.deadline_factor)
    if not work.deadlines:
        kept = without_deadlines(kept)
    if work.on_bad != "keep":
        found = screen(kept, whole.profiles, whole.gpu_types, whole.nodes, work.on_bad)
        said, dropped = f"{said}\n{found.message()}".strip(), dropped + len(found.dropped)
        kept = found.arrivals
    if work.jobs_share != 1:
        kept = sampled(kept, work.jobs_share, work.seed)
    if work.tightness:
        bounds = (work.tightness, work.tightness)
        kept = with_deadlines(kept, Speeds(whole.profiles, Room.of(whole.nodes)), bounds, work.seed)
    if not kept:
        raise InvalidInput("trace", "has no job that can run here; try more rounds or GPUs")
    last_s = ROUND_S * max(1, math.ceil(kept[-1].arrival_s / ROUND_S))
    return Made(
        scenario=replace(whole, arrivals=kept), dropped=dropped, said=said,
        load=load(kept, Speeds(whole.profiles), whole.gpus),
        horizon_s=min(work.rounds * ROUND_S, last_s),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """All that a trace has, on the cluster that there is."""

    scenario: Scenario
    dropped: int = 0
    said: str = ""


def _source(work: Work) -> _Source:
    if work.trace == SYNTHETIC:
        return _Source(scenario=_synthetic(work))
    if work.trace in NAMES:
        return _published(work)
    profiles = data_file(
        Path(work.profiles) if work.profiles else None, "arena", "alpa_optimal.csv"
    )
    if profiles is None or not Path(work.trace).is_file():
        missing = work.trace if profiles is not None else work.profiles or "alpa_optimal.csv"
        raise Skip(f"{missing} is absent: pass it, or set TESSERA_DATA")
    jobs = [one for one in trace_of(Path(work.trace)) if isinstance(one, Arrival)]
    gpu_types, nodes = preset(work.cluster or CLUSTER, work.gpus_share)
    return _Source(
        scenario=Scenario(
            gpu_types=gpu_types, nodes=nodes, profiles=profiles_of(profiles), arrivals=jobs
        )
    )


def _synthetic(work: Work) -> Scenario:
    cluster = work.cluster or CLUSTER
    gpu_types, nodes = preset(cluster, work.gpus_share)
    profiles = (
        profiles_of(Path(work.profiles)) if work.profiles else sample_profiles(hardware_of(cluster))
    )
    drawn = Synthetic(jobs=work.jobs, load=work.load).draw(profiles, nodes, work.seed)
    return Scenario(gpu_types=gpu_types, nodes=nodes, profiles=profiles, arrivals=drawn)


def _published(work: Work) -> _Source:
    folder = data_dir()
    if folder is None:
        raise Skip(f"the data sets are absent, and {work.trace} with them: set TESSERA_DATA")
    if work.profiles or work.on_bad == "keep":
        raise InvalidInput(
            "trace", f"{work.trace} has profiles of its own and is screened by them; name its file to have"
            " others, or to keep jobs that cannot run as requested",
        )  # fmt: skip
    found = published(work.trace, folder, work.on_bad, work.seed)
    scenario = found.scenario
    if work.cluster:
        gpu_types, nodes = preset(work.cluster, work.gpus_share)
        scenario = replace(scenario, gpu_types=gpu_types, nodes=nodes)
    elif work.gpus_share != 1:
        scenario = replace(scenario, nodes=shrunk(scenario.nodes, work.gpus_share))
    return _Source(
        scenario=scenario, dropped=len(found.screened.dropped), said=found.screened.message()
    )


def shrunk(nodes: Sequence[NodeSpec], share: float) -> list[NodeSpec]:
    """Return the first nodes of each type, a share of them and at least one.

    Raises:
        InvalidInput: the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InvalidInput("gpus_share", "must lie above 0 and be at most 1, or name a cluster")
    of_type: dict[str, list[NodeSpec]] = {}
    for node in nodes:
        of_type.setdefault(node.gpu_type, []).append(node)
    return [n for some in of_type.values() for n in some[: max(1, round(share * len(some)))]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run: a policy on a workload, what it sees, and what is written down of it.

    ``error`` is that of the estimates that rounds are told (``simulator.truth.perturbed``), drawn by
    ``error_seed``. Each ``judge_every``-th round is decided by the ILP, too; 0: none. With ``mapped`` it
    is written down who held which GPUs. Rounds come when something has happened, at most one each
    ``round_s``; with ``every_round`` each ``round_s``, which plans need that start jobs at moments of
    their own.
    """

    work: Work
    policy: str
    information: str = "estimates"
    overheads: str = "default"
    dp_memory: str = ""
    error: float = 0.0
    error_seed: int = 0
    judge_every: int = 0
    mapped: bool = False
    round_s: float = ROUND_S
    every_round: bool = False

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        named = (Path(self.dp_memory),) if self.dp_memory else ()
        return Task(
            name=name, function=TASK, options=asdict(self), files=(*self.work.files, *named)
        )


def simulated(work: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """Run what was asked, to the end of all jobs; the result is what ``Ran`` reads."""
    return run(Asked(work=Work(**work), **asked))


def bound_task(name: str, work: Work) -> Task:
    """Return the task of finding the throughput that no policy can beat on a workload."""
    return Task(name=name, function=BOUND_TASK, options={"work": asdict(work)}, files=work.files)


def bounded(work: dict[str, Any]) -> dict[str, Any]:
    """Return the normalised throughput over the horizon that no policy can beat."""
    world = made(Work(**work))
    return {"throughput": throughput_bound(world.scenario, world.horizon_s)}


def run(asked: Asked) -> dict[str, Any]:
    """Run what was asked, to the end of all jobs; the result is what ``Ran`` reads."""
    return run_in(made(asked.work), asked)


def run_in(
    world: Made, asked: Asked, told: Sequence[EstimateRecord] | None = None,
    policy: Published | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run what was asked in a world that was made before.

    ``told`` is what rounds are told of the workloads, before any error; None: the truth. ``policy`` decides
    in place of the one that is asked for.
    """
    scenario, costs = world.scenario, overheads_of(asked.overheads)
    watch = Watch()
    decide = Judged(
        Decider(
            options_of(asked.policy, asked.work.seed),
            information_of(asked.information, Path(asked.dp_memory) if asked.dp_memory else None),
            policy=policy,
        ),
        asked.judge_every, watch,
    )  # fmt: skip
    visible = told
    if asked.error:
        visible = perturbed(told or scenario.profiles, asked.error, asked.error_seed)
    conditions = Conditions(
        overheads=costs, visible=visible, round_s=asked.round_s, on_events=not asked.every_round
    )  # fmt: skip
    found = simulate(scenario, decide, conditions, watch)
    return told_of(found, world, decide.shares, asked.mapped)


def told_of(
    found: Result, world: Made, shares: Sequence[float] = (), mapped: bool = False
) -> dict[str, Any]:
    """Return what ``Ran`` reads of a run in ``world``; ``shares`` are those of ``Judged``, where it was."""
    scenario, reference = found.scenario, reference_of(found.scenario)
    return {
        "figures": {
            **figures(found, reference, world.horizon_s),
            "optimum_share": float(np.mean(shares)) if shares else math.nan,
            "optimum_worst_share": min(shares, default=math.nan),
            "load": world.load, "dropped": world.dropped, "stuck": found.stuck,
            "horizon_s": world.horizon_s,
        },
        "said": world.said, "arrival_s": found.arrival_s.tolist(), "end_s": _ended(found).tolist(),
        "alone_s": alone_seconds(scenario, found.conditions.overheads).tolist(),
        "course": _course(found, reference, world.horizon_s),
        "gaps": [[row.at_s, row.gap] for row in found.rounds],
        "node_gpus": [n.gpus for n in scenario.nodes],
        "node_types": [n.gpu_type for n in scenario.nodes],
        "segments": _held(found, world.horizon_s) if mapped else [],
    }  # fmt: skip


def _ended(result: Result) -> Floats:
    """Return when each job succeeded; inf: it did not."""
    succeeded = np.array([state == "succeeded" for state in result.state])
    return np.where(succeeded, result.end_s, np.inf)


def _course(result: Result, reference: Reference, until_s: float) -> dict[str, list[float]]:
    series = series_of(result, reference, until_s, max(ROUND_S, until_s / BINS))
    return {
        "at_s": series.at_s.tolist(), "normalised": series.normalised.tolist(),
        "samples_per_s": series.samples_per_s.tolist(), "gpus": series.gpus.tolist(),
        "waiting": series.waiting.tolist(),
    }  # fmt: skip


def _held(result: Result, until_s: float) -> list[list[Any]]:
    """Return (job, start, end, (node, GPUs) of each node) of what began before ``until_s``.

    Nodes are in the scenario's order, which keeps types together.
    """
    names = {node.name: i for i, node in enumerate(result.scenario.nodes)}
    where = [names[name] for name in result.nodes]

    def of(s: Segment) -> list[Any]:
        shares = [[where[node], len(gpus)] for node, gpus in s.members]
        return [str(s.job), s.start_s, s.end_s, shares]

    return [of(s) for s in result.segments if s.start_s < until_s and s.end_s > s.start_s]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """A run as it is read back. Arrays are float64[jobs], in order of arrival."""

    figures: dict[str, float]
    said: str  # of jobs that did not fit
    arrival_s: Floats
    end_s: Floats  # inf: it never succeeded
    alone_s: Floats  # the least that any schedule can give it
    course: dict[str, Floats]
    gaps: Floats  # [rounds, 2]: when, and the gap
    node_gpus: list[int]
    node_types: list[str]
    segments: list[tuple[str, float, float, list[tuple[int, int]]]]

    @classmethod
    def read(cls, result: dict[str, Any]) -> Ran:
        """Return what ``run`` returned, as JSON has it."""
        segments = [(j, a, b, [(n, g) for n, g in on]) for j, a, b, on in result["segments"]]
        return cls(
            figures={k: float(v) for k, v in result["figures"].items()}, said=result["said"],
            arrival_s=np.array(result["arrival_s"], float), end_s=np.array(result["end_s"], float),
            alone_s=np.array(result["alone_s"], float),
            course={k: np.array(v, float) for k, v in result["course"].items()},
            gaps=np.array(result["gaps"], float).reshape(-1, 2),
            node_gpus=result["node_gpus"], node_types=result["node_types"], segments=segments,
        )  # fmt: skip

    @property
    def jct_s(self) -> Floats:
        """Return each job's completion time; inf where it never succeeded."""
        return self.end_s - self.arrival_s
