"""Replays of the testbed's campaigns by the simulator, with their errors against the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from tessera.benchmarks.papers.testbed.records import ROUND_S, RecordedJob, RunSegment
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.formulation.tables import Floats
from tessera.formulation.values import BEST_FOUND, Cell, EstimateSource, Workload
from tessera.simulator.clusters import preset_cluster
from tessera.simulator.log import Segment
from tessera.simulator.overheads import Overheads
from tessera.simulator.recordings import Hold, ReplayResult, nodes_for_holds, replay_holds
from tessera.simulator.scenario import Scenario
from tessera.simulator.traces.trace import Arrival
from tessera.simulator.world import World

CLUSTER: Final = "testbed-a"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Campaign:
    """Jobs that ran under one policy, in order of arrival, with the scenario and holds of a replay."""

    jobs: tuple[RecordedJob, ...]
    scenario: Scenario
    holds: tuple[Hold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayErrors:
    """A replay compared with the record. Errors are relative, and signed unless stated otherwise.

    JCT is of the jobs that were done in the record. Throughput is the sum of batch / iteration time
    over jobs that hold GPUs, as counted by Arena's artifact, averaged over time until the record's
    end. ``round_error`` is the mean absolute difference of the samples trained in each round, over
    the mean. ``speed_error`` is the mean absolute error of a run's iteration time and
    ``speed_bias`` the signed one. Both are weighted by recorded training time. ``active_error`` is
    like ``jct_error`` for the time after the first start, without the queue before it.
    ``start_*_s`` is the mean time for which GPUs are held before training, over runs that trained.
    """

    jobs: int
    done: int  # of these jobs, those done in the replay by the record's end
    runs: int
    jct_recorded_s: float
    jct_replayed_s: float
    jct_job_error: float
    active_error: float
    throughput_recorded: float
    throughput_replayed: float
    round_error: float
    speed_bias: float
    speed_error: float
    start_recorded_s: float
    start_charged_s: float

    @property
    def jct_error(self) -> float:
        """Return the error of mean JCT."""
        return self.jct_replayed_s / self.jct_recorded_s - 1.0

    @property
    def throughput_error(self) -> float:
        """Return the error of mean throughput."""
        return self.throughput_replayed / self.throughput_recorded - 1.0


def campaign_of(
    jobs: Sequence[RecordedJob],
    arrivals: Mapping[str, tuple[float, JobSpec]],
    profiles: Sequence[EstimateRecord],
) -> Campaign:
    """Return the jobs of one campaign and policy, for a replay at the speeds of ``profiles``.

    ``arrivals`` has each job's arrival time on the record's clock, and its request, by name.

    Raises:
        InvalidInput: a job is not the one of that name in the trace.
    """
    for job in jobs:
        if arrivals[job.name][1].workload != job.workload:
            raise InvalidInput("trace", f"has a different {job.name} than in the testbed")
    jobs = sorted(jobs, key=lambda job: (arrivals[job.name][0], job.name))
    came = [
        Arrival(
            arrivals[job.name][0] - job.origin_s,
            replace(
                arrivals[job.name][1], name=job.name, iterations=job.iterations, deadline_s=math.inf
            ),
        )
        for job in jobs
    ]
    holds = tuple(
        Hold(
            job=index,
            start_s=run.start_s,
            end_s=math.inf if run.last else run.end_s,
            cell=_cell(run),
        )
        for index, job in enumerate(jobs)
        for run in job.runs
    )
    gpu_types, nodes = preset_cluster(CLUSTER)
    room = nodes_for_holds(holds, {node.gpu_type: node.gpus for node in nodes})
    scenario = Scenario(gpu_types=gpu_types, nodes=room, profiles=profiles, arrivals=came)
    return Campaign(jobs=tuple(jobs), scenario=scenario, holds=holds)


def simulator_speeds(campaign: Campaign) -> list[list[float]]:
    """Return the simulator's iterations/s of each run of each job, or 0 without a profile."""
    world = World(campaign.scenario, overheads=Overheads())
    of_run: list[list[float]] = [[] for _ in campaign.jobs]
    for hold in campaign.holds:
        speed = world.truth.iterations_per_s(int(world.store.jobs.workload[hold.job]), hold.cell)
        of_run[hold.job].append(speed)
    return of_run


def jobs_with_speeds(campaign: Campaign) -> list[RecordedJob]:
    """Return the jobs whose runs all have a speed."""
    return [j for j, s in zip(campaign.jobs, simulator_speeds(campaign), strict=True) if min(s) > 0]


CellKey = tuple[Workload, Cell]


def _cell(run: RunSegment) -> Cell:
    return Cell(gpu_type=run.gpu_type, gpus=run.gpus, pipeline_degree=BEST_FOUND, nodes=run.nodes)


def _whatever_plan(cell: Cell) -> Cell:
    return replace(cell, pipeline_degree=BEST_FOUND, plan="")


def _key(job: RecordedJob, run: RunSegment) -> CellKey:
    return job.workload, _cell(run)


def refine_profiles(
    profiles: Sequence[EstimateRecord], seen: Sequence[RecordedJob]
) -> list[EstimateRecord]:
    """Return the profiles, with times replaced by the medians measured by ``seen``, if any."""
    times_s: dict[CellKey, list[float]] = {}
    for job in seen:
        for run in job.runs:
            if run.iterations:
                times_s.setdefault(_key(job, run), []).append(run.iter_time_s)
    kept = [e for e in profiles if (e.workload, _whatever_plan(e.cell)) not in times_s]
    return kept + [_measured(key, median(result), "") for key, result in times_s.items()]


def as_recorded(campaign: Campaign, *, searched: bool = False) -> Campaign:
    """Return the campaign at each job's own recorded speeds: the mean over its runs on a Cell and shape.

    A run that trained nothing has no speed. It takes that of the job's other runs there, or else of
    the profiles. With ``searched``, each run has its own speed and pays for a plan search, even if
    the job was on the Cell before.
    """
    spent: dict[tuple[str, CellKey], tuple[float, int]] = {}
    for job in campaign.jobs:
        for index, run in enumerate(job.runs):
            if run.iterations:
                at = (_plan(job, index, searched), _key(job, run))
                time_s, iterations = spent.get(at, (0.0, 0))
                spent[at] = (time_s + run.iterations * run.iter_time_s, iterations + run.iterations)
    return _at(campaign, {at: t / n for at, (t, n) in spent.items()}, searched)


def each_searched(campaign: Campaign) -> Campaign:
    """Return the campaign with a plan search in every run, even on Cells that a job had before."""
    known = {
        (_plan(job, index, True), _key(job, run)): 1.0 / speed
        for job, of_run in zip(campaign.jobs, simulator_speeds(campaign), strict=True)
        for index, (run, speed) in enumerate(zip(job.runs, of_run, strict=True))
    }
    return _at(campaign, known, True)


def _plan(job: RecordedJob, run: int, of_run: bool) -> str:
    return f"{job.name}.{run}" if of_run else job.name


def _at(campaign: Campaign, times_s: Mapping[tuple[str, CellKey], float], of_run: bool) -> Campaign:
    """Return the campaign with plans of these iteration times.

    Holds without such a plan keep that of the profiles.
    """
    holds, runs = iter(campaign.holds), []
    for job in campaign.jobs:
        for index, run in enumerate(job.runs):
            name = _plan(job, index, of_run)
            plan = name if (name, _key(job, run)) in times_s else ""
            runs.append(replace(next(holds), cell=replace(_cell(run), plan=plan)))
    own = [_measured(key, time_s, plan) for (plan, key), time_s in times_s.items()]
    profiles = [*campaign.scenario.profiles, *own]
    return replace(
        campaign, scenario=replace(campaign.scenario, profiles=profiles), holds=tuple(runs)
    )


def _measured(key: CellKey, iter_time_s: float, plan: str) -> EstimateRecord:
    workload, cell = key
    return EstimateRecord(
        workload=workload,
        cell=replace(cell, plan=plan),
        iter_time_s=iter_time_s,
        source=EstimateSource.MEASURED,
    )


def compare_replay(campaign: Campaign, overheads: Overheads) -> tuple[ReplayErrors, ReplayResult]:
    """Replay a campaign and return its errors against the record."""
    result = replay_holds(campaign.scenario, campaign.holds, overheads)
    jobs = campaign.jobs
    arrival_s = np.array([one.arrival_s for one in campaign.scenario.arrivals])
    done = np.array([job.done for job in jobs])
    ended_s = np.array([job.runs[-1].end_s for job in jobs])
    jct_s, replayed_s = (ended_s - arrival_s)[done], (result.end_s - arrival_s)[done]
    first_s = np.array([job.runs[0].start_s for job in jobs])
    active = (result.end_s - first_s)[done].mean() / (ended_s - first_s)[done].mean() - 1.0
    until_s = float(ended_s.max())
    recorded, replayed = recorded_rates(jobs), replayed_rates(campaign, result)
    trained = [mean_by_round(t, until_s) for t in (recorded.trained, replayed.trained)]
    bias, error = _speed_errors(campaign)
    runs = [run for job in jobs for run in job.runs]
    return ReplayErrors(
        jobs=int(done.sum()),
        done=int((result.end_s[done] <= until_s).sum()),
        runs=len(runs),
        jct_recorded_s=float(jct_s.mean()),
        jct_replayed_s=float(replayed_s.mean()),
        jct_job_error=float(np.abs(replayed_s / jct_s - 1.0).mean()),
        active_error=float(active),
        throughput_recorded=float(mean_by_round(recorded.held, until_s).mean()),
        throughput_replayed=float(mean_by_round(replayed.held, until_s).mean()),
        round_error=float(np.abs(trained[1] - trained[0]).mean() / trained[0].mean()),
        speed_bias=bias,
        speed_error=error,
        start_recorded_s=float(np.mean([r.launch_s + r.search_s for r in runs if r.iterations])),
        start_charged_s=_charged(result),
    ), result


RateSteps = tuple[Floats, Floats, Floats]
"""Starts and ends in seconds, and samples/s between them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRates:
    """Samples/s of jobs while they hold GPUs on which they train, and while they train."""

    held: RateSteps
    trained: RateSteps


def recorded_rates(jobs: Sequence[RecordedJob]) -> JobRates:
    """Return the rates of the runs that trained, as recorded."""
    rows = [
        (
            r.start_s,
            r.end_s,
            r.end_s - r.iterations * r.iter_time_s,
            j.workload.global_batch / r.iter_time_s,
        )
        for j in jobs
        for r in j.runs
        if r.iterations
    ]
    start_s, end_s, ready_s, rate = np.array(rows).T
    return JobRates(held=(start_s, end_s, rate), trained=(ready_s, end_s, rate))


def replayed_rates(campaign: Campaign, found: ReplayResult) -> JobRates:
    """Return the rates of the segments that trained."""
    batch = [job.workload.global_batch for job in campaign.jobs]
    start_s, end_s, rate = held_steps(found.segments, batch)
    ready_s = np.array([s.ready_s for s in found.segments if s.iterations > 0])
    return JobRates(held=(start_s, end_s, rate), trained=(ready_s, end_s, rate))


def held_steps(segments: Sequence[Segment], batch: Sequence[int]) -> RateSteps:
    """Return the rates of trained segments while their GPUs were held. ``batch`` is by job."""
    rows = [
        (s.start_s, s.end_s, s.iterations * batch[s.job] / (s.end_s - s.ready_s))
        for s in segments
        if s.iterations > 0
    ]
    start_s, end_s, rate = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return start_s, end_s, rate


def mean_by_round(steps: RateSteps, until_s: float) -> Floats:
    """Return the mean of the sum of steps in each round until the end, float64[rounds]."""
    start_s, end_s, rate = steps
    edges = ROUND_S * np.arange(math.ceil(until_s / ROUND_S) + 1)
    inside = np.minimum(end_s[:, None], edges[None, 1:]) - np.maximum(
        start_s[:, None], edges[None, :-1]
    )
    total: Floats = (rate[:, None] * np.maximum(inside, 0.0)).sum(axis=0) / ROUND_S
    return total


def _speed_errors(campaign: Campaign) -> tuple[float, float]:
    ratio, weight = [], []
    for job, of_run in zip(campaign.jobs, simulator_speeds(campaign), strict=True):
        for run, speed in zip(job.runs, of_run, strict=True):
            if run.iterations:
                ratio.append(1.0 / (speed * run.iter_time_s))
                weight.append(run.iterations * run.iter_time_s)
    off = np.array(ratio) - 1.0
    return float(np.average(off, weights=weight)), float(np.average(np.abs(off), weights=weight))


def _charged(found: ReplayResult) -> float:
    """Return the mean seconds until training began, over the segments that trained."""
    charged = [s.ready_s - s.start_s for s in found.segments if s.iterations > 0]
    return float(np.mean(charged))
