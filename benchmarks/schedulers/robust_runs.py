"""Runs of policies on workloads of many kinds, and how far each is behind the best scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tessera.benchmarks.schedulers.robust_workloads import make_workload
from tessera.benchmarks.schedulers.streams import PERIOD_S
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.lifecycle import JobState
from tessera.simulator.comparison.policies import is_ours, options_of
from tessera.simulator.run import Decider, Result, simulate
from tessera.simulator.sweeps.tasks import Task

TASK: Final = "tessera.benchmarks.schedulers.robust_runs:run_workload"
WAIT_PERCENTILE: Final = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """A request for the run of a policy on a workload."""

    workload: str
    seed: int
    jobs: int
    policy: str

    def task(self) -> Task:
        """Return the run as a task of a sweep."""
        name = f"{self.policy} on {self.workload}, seed {self.seed}"
        return Task(name=name, function=TASK, options=asdict(self))


def run_workload(**request: Any) -> dict[str, Any]:
    """Run a workload under a policy, and return the data that ``WorkloadRun`` has."""
    run = WorkloadRequest(**request)
    stream = make_workload(run.workload, run.seed, run.jobs)
    decide = Decider(options_of(run.policy, run.seed))
    return asdict(
        describe_workload_run(simulate(stream.scenario, decide, stream.conditions, SystemClock()))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRun:
    """A run as a sweep keeps it. Lists are by job in order of arrival.

    ``wait_s`` is the time that a job was there without GPUs, before its first start and after stops.
    """

    jct_s: list[float]  # inf if the job has not ended
    wait_s: list[float]
    state: list[str]
    refused_rounds: int
    restarts: int
    utilisation: float
    decide_s: float
    longest_round_s: float

    @property
    def has_ended(self) -> Bools:
        """Return which jobs have trained to their end, bool[jobs]."""
        has_ended: Bools = np.array(self.state) == JobState.SUCCEEDED.value
        return has_ended

    @property
    def is_fair(self) -> bool:
        """Return whether the run broke no rule and finished every job."""
        return not self.refused_rounds and bool(self.has_ended.all())


def describe_workload_run(result: Result) -> WorkloadRun:
    """Return what a sweep keeps of a run."""
    segments, jobs = result.segments, len(result.arrival_s)
    job = np.array([segment.job for segment in segments], dtype=np.int64)
    held_s = np.array([segment.end_s - segment.start_s for segment in segments])
    holding_s = np.bincount(job, weights=held_s, minlength=jobs)
    there_s = np.minimum(result.end_s, result.ended_s) - result.arrival_s
    span_s = max(float(result.arrival_s.max()), PERIOD_S)
    busy_gpu_s = sum(s.cell.gpus * max(0.0, min(s.end_s, span_s) - s.start_s) for s in segments)
    decide_s = [row.decide_s for row in result.rounds]
    return WorkloadRun(
        jct_s=(result.end_s - result.arrival_s).tolist(),
        wait_s=np.maximum(there_s - holding_s, 0.0).tolist(),
        state=list(result.state),
        refused_rounds=result.refused,
        restarts=int(result.restarts.sum()),
        utilisation=busy_gpu_s / (span_s * result.scenario.gpus),
        decide_s=sum(decide_s),
        longest_round_s=max(decide_s, default=0.0),
    )


SeedRuns = Sequence[WorkloadRun]
"""The runs of a policy on a workload, one for each seed in the same order for all policies."""


class RatioToBest(NamedTuple):
    """A policy's figure over the best rival's, and that rival. They are NaN and "" without one."""

    ratio: float = np.nan
    rival: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A policy on a workload: its mean JCT and its waits over the best rivals'.

    ``leader_waits`` is the ratio of waits to the rival with the lowest mean JCT.
    """

    jct: RatioToBest
    waits: RatioToBest
    leader_waits: float


def jct_over(runs: SeedRuns, rivals: SeedRuns) -> float:
    """Return the mean JCT over the rival's, as a geometric mean over seeds.

    It is over the jobs that both finished, and NaN if a seed has no such job.
    """
    logs = []
    for run, rival in zip(runs, rivals, strict=True):
        common = run.has_ended & rival.has_ended
        if not common.any():
            return np.nan
        own_s, rival_s = np.array(run.jct_s)[common], np.array(rival.jct_s)[common]
        logs.append(np.log(own_s.mean() / rival_s.mean()))
    return float(np.exp(np.mean(logs)))


def wait_percentile_s(runs: SeedRuns) -> float:
    """Return the 95th percentile of the waits of all seeds."""
    return float(np.percentile(np.concatenate([_waits_s(run) for run in runs]), WAIT_PERCENTILE))


def _waits_s(run: WorkloadRun) -> Floats:
    return np.array(run.wait_s, dtype=np.float64)


def wait_over(runs: SeedRuns, rivals: SeedRuns) -> float:
    """Return the 95th percentile of waits over the rival's, both with a period of rounds added.

    Differences that are much less than the period have no meaning.
    """
    return (wait_percentile_s(runs) + PERIOD_S) / (wait_percentile_s(rivals) + PERIOD_S)


def find_standing(
    runs: Mapping[str, SeedRuns], policy: str, rivals: Sequence[str] | None = None
) -> Standing:
    """Return the standing of a policy among ``rivals``, by default all published schedulers.

    Schedulers that broke a rule, or did not finish every job, are no rivals.
    """
    names = [name for name in runs if not is_ours(name)] if rivals is None else rivals
    fair = [name for name in names if name in runs and all(run.is_fair for run in runs[name])]
    waits = {name: wait_over(runs[policy], runs[name]) for name in fair}
    leader = max(
        (RatioToBest(jct_over(runs[policy], runs[name]), name) for name in fair),
        default=RatioToBest(),
    )
    patient = max(
        (RatioToBest(ratio, name) for name, ratio in waits.items()), default=RatioToBest()
    )
    return Standing(jct=leader, waits=patient, leader_waits=waits.get(leader.rival, np.nan))
