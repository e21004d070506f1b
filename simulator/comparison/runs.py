"""Simulated runs of a policy on a workload, as tasks of a sweep and as read back from results."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np

from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Floats
from tessera.simulator.bounds import throughput_bound
from tessera.simulator.comparison.policies import information_of, options_of, plugin_files
from tessera.simulator.comparison.workload import (
    ROUND_S,
    PreparedScenario,
    WorkloadSpec,
    check_seeds,
    check_trace,
    make_scenario,
)
from tessera.simulator.completion_bound import CompletionBound, completion_bound
from tessera.simulator.guarantees import find_broken_guarantees
from tessera.simulator.log import Segment
from tessera.simulator.metrics import Reference, alone_seconds, reference_of, run_figures, series_of
from tessera.simulator.overheads import preset_overheads as overheads_of
from tessera.simulator.run import Conditions, Decider, Result, simulate
from tessera.simulator.sweeps.runner import Sweep
from tessera.simulator.sweeps.tasks import Task

COURSE_POINTS: Final = 400
"""The number of points of a series over time."""
TASK: Final = "tessera.simulator.comparison.runs:simulate_request"
BOUND_TASK: Final = "tessera.simulator.comparison.runs:bound_workload"

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request for a run of a policy on a workload, with the information that the policy sees.

    Rounds take place when something has happened, at most one in each ``round_s``. Without
    ``search``, CP-SAT does not look for promises beyond those that first fits find.
    """

    work: WorkloadSpec
    policy: str
    information: str = "estimates"
    overheads: str = "default"
    round_s: float = ROUND_S
    search: bool = True

    def task(self, name: str) -> Task:
        """Return the run as a task of a sweep."""
        return Task(
            name=name,
            function=TASK,
            options=asdict(self),
            files=(*self.work.files, *plugin_files(self.policy)),
        )


def simulate_request(work: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """Run the request to the end of all jobs, and return the result that ``FinishedRun`` reads."""
    return run_request(RunRequest(work=WorkloadSpec(**work), **asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadBounds:
    """The bounds on a workload that no policy can beat."""

    throughput: float  # normalised, over the horizon
    completion: CompletionBound

    @classmethod
    def read(cls, result: dict[str, Any]) -> WorkloadBounds:
        """Return the bounds from the JSON form of a task's result."""
        return cls(
            throughput=float(result["throughput"]),
            completion=CompletionBound.read(result["completion"]),
        )


def bound_task(name: str, work: WorkloadSpec, overheads: str) -> Task:
    """Return the task that finds the bounds on a workload, for ``WorkloadBounds.read``."""
    options = {"work": asdict(work), "overheads": overheads}
    return Task(name=name, function=BOUND_TASK, options=options, files=work.files)


def bound_workload(work: dict[str, Any], overheads: str) -> dict[str, Any]:
    """Return the bounds on throughput and on completion times under any policy."""
    world = make_scenario(WorkloadSpec(**work))
    return {
        "throughput": throughput_bound(world.scenario, world.horizon_s),
        "completion": completion_bound(world.scenario, overheads_of(overheads)).as_data(),
    }


def run_request(asked: RunRequest) -> dict[str, Any]:
    """Run the request to the end of all jobs, and return the result that ``FinishedRun`` reads."""
    return run_in_scenario(make_scenario(asked.work), asked)


def run_in_scenario(
    world: PreparedScenario,
    asked: RunRequest,
) -> dict[str, Any]:
    """Run the request in a given scenario."""
    scenario, costs = world.scenario, overheads_of(asked.overheads)
    decide = Decider(
        options_of(asked.policy, asked.work.seed),
        information_of(asked.information),
        search=asked.search,
    )
    conditions = Conditions(overheads=costs, round_s=asked.round_s, on_events=True)
    return run_data(simulate(scenario, decide, conditions, SystemClock()), world)


def run_data(result: Result, world: PreparedScenario, mapped: bool = False) -> dict[str, Any]:
    """Return the data that ``FinishedRun`` reads of a run in ``world``.

    With ``mapped``, they include the segments that a map of GPUs shows.
    """
    scenario, reference = result.scenario, reference_of(result.scenario)
    return {
        "figures": {
            **run_figures(result, reference, world.horizon_s),
            "load": world.load,
            "dropped": world.dropped,
            "stuck": result.stuck,
            "guaranteed": sum(one.spec.guaranteed for one in scenario.arrivals),
            "guarantees_broken": len(find_broken_guarantees(result)),
            "horizon_s": world.horizon_s,
        },
        "arrival_s": result.arrival_s.tolist(),
        "end_s": _ended(result).tolist(),
        "alone_s": alone_seconds(scenario, result.conditions.overheads).tolist(),
        "course": _course(result, reference, world.horizon_s),
        "gaps": [[row.at_s, row.gap] for row in result.rounds if not row.bound_is_trivial],
        "node_gpus": [n.gpus for n in scenario.nodes],
        "node_types": [n.gpu_type for n in scenario.nodes],
        "segments": _held(result, world.horizon_s) if mapped else [],
    }


def _ended(result: Result) -> Floats:
    """Return the time at which each job succeeded, or inf."""
    succeeded = np.array([state == "succeeded" for state in result.state])
    return np.where(succeeded, result.end_s, np.inf)


def _course(result: Result, reference: Reference, until_s: float) -> dict[str, list[float]]:
    series = series_of(result, reference, until_s, max(ROUND_S, until_s / COURSE_POINTS))
    return {
        "at_s": series.at_s.tolist(),
        "normalised": series.normalised.tolist(),
        "samples_per_s": series.samples_per_s.tolist(),
        "gpus": series.gpus.tolist(),
        "waiting": series.waiting.tolist(),
    }


def _held(result: Result, until_s: float) -> list[list[Any]]:
    """Return (job, start, end, GPUs of each node) of segments that began before ``until_s``.

    Nodes are in the scenario's order, which keeps GPU types together.
    """
    names = {node.name: i for i, node in enumerate(result.scenario.nodes)}
    where = [names[name] for name in result.nodes]

    def of(s: Segment) -> list[Any]:
        shares = [[where[node], len(gpus)] for node, gpus in s.members]
        return [str(s.job), s.start_s, s.end_s, shares]

    return [of(s) for s in result.segments if s.start_s < until_s and s.end_s > s.start_s]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun:
    """A run as it is read back. Arrays are float64[jobs], in order of arrival."""

    figures: dict[str, float]
    arrival_s: Floats
    end_s: Floats  # inf: the job never succeeded
    alone_s: Floats  # seconds of each job at once on its fastest Cell, as if it were alone
    course: dict[str, Floats]
    gaps: Floats  # [rounds, 2]: the time and the gap
    node_gpus: list[int]
    node_types: list[str]
    segments: list[tuple[str, float, float, list[tuple[int, int]]]]

    @classmethod
    def read(cls, result: dict[str, Any]) -> FinishedRun:
        """Return the run from the JSON form of a task's result."""
        segments = [(j, a, b, [(n, g) for n, g in on]) for j, a, b, on in result["segments"]]
        return cls(
            figures={k: float(v) for k, v in result["figures"].items()},
            arrival_s=np.array(result["arrival_s"], float),
            end_s=np.array(result["end_s"], float),
            alone_s=np.array(result["alone_s"], float),
            course={k: np.array(v, float) for k, v in result["course"].items()},
            gaps=np.array(result["gaps"], float).reshape(-1, 2),
            node_gpus=result["node_gpus"],
            node_types=result["node_types"],
            segments=segments,
        )

    @property
    def jct_s(self) -> Floats:
        """Return each job's completion time, or inf for a job that never succeeded."""
        return self.end_s - self.arrival_s


def check_requests(asked: Iterable[RunRequest], seeds: int) -> None:
    """Check requests before anything runs, and refuse those that would fail.

    Raises:
        MissingData: a trace, or a file that information needs, is absent.
        InvalidInput: a policy or information is unknown, a trace has no models, or all seeds draw
            the same jobs.
    """
    every = list(asked)
    for name in dict.fromkeys(one.policy for one in every):
        options_of(name)
    for information in dict.fromkeys(one.information for one in every):
        information_of(information)
    for work in dict.fromkeys(one.work for one in every):
        check_seeds(seeds, work)
    for trace in dict.fromkeys(one.work.trace for one in every):
        check_trace(trace)


def runs_of(tasks: Mapping[Key, Task], sweep: Sweep) -> dict[Key, FinishedRun]:
    """Run the tasks and return each run under the key of its task."""
    results = sweep.run(list(tasks.values()))
    return {key: FinishedRun.read(results[task.name]) for key, task in tasks.items()}
