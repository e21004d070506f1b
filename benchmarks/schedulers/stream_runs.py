"""Runs of policies on adversarial streams, and the figures of promised starts and of restarts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np

from tessera.benchmarks.schedulers.stream_kinds import draw_stream
from tessera.benchmarks.schedulers.streams import SPACING_S, JobStream
from tessera.formulation.answer.decisions import CHANGES_GPUS, DecisionKind
from tessera.formulation.base.clock import SystemClock
from tessera.formulation.base.tables import Bools, Floats
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.policies import is_ours, options_of
from tessera.simulator.log import Segment
from tessera.simulator.run import Decider, Result, simulate
from tessera.simulator.scenario import EPOCH_S
from tessera.simulator.sweeps.tasks import Task
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.rounds.plan import RoundOutcome
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.conservative import planned_starts

TASK: Final = "tessera.benchmarks.schedulers.stream_runs:run_stream"
OPTIMIZED_ENDS: Final = frozenset(
    kind.value for kind in (*CHANGES_GPUS - {DecisionKind.START}, DecisionKind.SUSPEND)
)
"""The ends of segments that a round chose."""
SPEED_CHANGE: Final = "speed"
"""The end of a segment after which the job continues on the same GPUs."""
ROUNDING_S: Final = 1e-3
"""Times of snapshots are rounded, since they are seconds since 1970."""
MAX_WRONG_RATIO: Final = 3.0
"""The largest wait over the promised one where estimates are wrong or nodes fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for the run of a policy on a stream."""

    stream: str
    seed: int
    jobs: int
    policy: str

    def task(self) -> Task:
        """Return the run as a task of a sweep."""
        name = f"{self.policy} on {self.stream}, seed {self.seed}"
        return Task(name=name, function=TASK, options=asdict(self))


def run_stream(**request: Any) -> dict[str, Any]:
    """Run a stream under a policy, and return the data that ``StreamRun.read`` reads."""
    run = StreamRequest(**request)
    stream = draw_stream(run.stream, run.seed, run.jobs)
    settings = stream.settings if is_ours(run.policy) else ()
    decide = PlanningDecider(options_of("@".join((run.policy, *settings)), run.seed))
    result = simulate(stream.scenario, decide, stream.conditions, SystemClock())
    return asdict(describe_run(stream, result, decide))


class PlanningDecider(Decider):
    """A decision maker that also notes when conservative backfilling would start each new job."""

    def __init__(self, options: RoundOptions) -> None:
        """Decide rounds with ``options``."""
        super().__init__(options)
        self.planned_s: dict[str, float] = {}
        """The start that it would plan in the first round that sees a job, in the world's seconds."""
        self.first_round_s: dict[str, float] = {}
        """The time of that round."""

    def __call__(self, snapshot: Snapshot) -> RoundOutcome:
        """Decide a round."""
        names = snapshot.jobs.name
        if any(name not in self.planned_s for name in names):
            starts_s = planned_starts(make_view(snapshot, self.options)) - EPOCH_S
            now_s = snapshot.now_s - EPOCH_S
            for name, start_s in zip(names, starts_s.tolist(), strict=True):
                self.planned_s.setdefault(name, start_s)
                self.first_round_s.setdefault(name, now_s)
        return super().__call__(snapshot)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """A run as a sweep keeps it. Lists are by job in order of arrival, in the world's seconds.

    ``planned_s`` are the starts that conservative backfilling would have planned in the first round
    that saw a job, with the jobs that ran then. It is inf where it would have planned none, and in a
    stream with node selectors, which it ignores.
    ``spacing`` is the number of start costs that a job runs before an optimization may stop it.
    ``has_deadline`` are the jobs with a promised deadline.
    ``short_starts`` counts the segments that ended sooner. ``restart_share`` is the largest share of
    a job's held time that went to starts which an optimization caused.
    """

    names: list[str]
    arrival_s: list[float]
    first_round_s: list[float]
    start_s: list[float]
    promise_s: list[float]
    planned_s: list[float]
    end_s: list[float]
    state: list[str]
    exact: bool
    forces: bool
    refused_rounds: int
    is_stuck: bool
    ended_s: float
    spacing: float
    short_starts: int
    restarts: int
    restart_share: float
    utilisation: float
    promises_broken: int
    has_deadline: list[bool]
    decide_s: float
    late_s: float = SPACING_S
    """The time by which a start may be later than promised."""

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> StreamRun:
        """Return the run from the JSON form of a task's result."""
        return cls(**data)

    @property
    def has_ended(self) -> Bools:
        """Return which jobs have trained to their end, bool[jobs]."""
        return self._is_in_state(JobState.SUCCEEDED, JobState.CANCELLED)

    @property
    def is_rejected(self) -> Bools:
        """Return which jobs were refused, bool[jobs]."""
        return self._is_in_state(JobState.REJECTED)

    def _is_in_state(self, *states: JobState) -> Bools:
        is_in: Bools = np.isin(np.array(self.state), [state.value for state in states])
        return is_in

    @property
    def jct_s(self) -> Floats:
        """Return each job's time from arrival to end, float64[jobs]."""
        jct_s: Floats = np.array(self.end_s) - np.array(self.arrival_s)
        return jct_s

    @property
    def wait_s(self) -> Floats:
        """Return each job's time from arrival to its first start, or to the end of the run."""
        started_s = np.minimum(np.array(self.start_s), self.ended_s)
        wait_s: Floats = np.where(self.is_rejected, 0.0, started_s - np.array(self.arrival_s))
        return wait_s

    @property
    def promised_wait_s(self) -> Floats:
        """Return each job's promised wait. It is inf without a promise.

        A job that starts in the first round that sees it needs no promise.
        """
        start_s, arrival_s = np.array(self.start_s), np.array(self.arrival_s)
        at_once = start_s <= np.array(self.first_round_s) + ROUNDING_S
        by_s = np.where(at_once, start_s, np.array(self.promise_s))
        wait_s: Floats = np.where(self.is_rejected, 0.0, by_s - arrival_s)
        return wait_s

    @property
    def planned_wait_s(self) -> Floats:
        """Return the waits that conservative backfilling would have planned, float64[jobs]."""
        planned_s = np.maximum(np.array(self.planned_s), np.array(self.first_round_s))
        wait_s: Floats = planned_s - np.array(self.arrival_s)
        return wait_s

    def wait_ratios(self) -> Floats:
        """Return each job's wait over its promised wait and ``late_s``.

        It is at most 1 if the job started at most so late, and NaN without a promise.
        """
        return self._divide_waits(self.promised_wait_s)

    def plan_ratios(self) -> Floats:
        """Return each job's wait over its planned wait and ``late_s``.

        It is NaN for a job that conservative backfilling would not have planned.
        """
        return self._divide_waits(self.planned_wait_s)

    def _divide_waits(self, expected_s: Floats) -> Floats:
        ratio = self.wait_s / (expected_s + self.late_s)
        ratios: Floats = np.where(np.isfinite(expected_s), ratio, np.nan)
        return ratios

    @property
    def unpromised_jobs(self) -> int:
        """Return how many jobs had to wait and got no promise, of a start or of a deadline."""
        return int((np.isinf(self.promised_wait_s) & ~np.array(self.has_deadline)).sum())

    @property
    def unfinished_jobs(self) -> int:
        """Return how many jobs have neither ended nor been refused."""
        return int((~self.has_ended & ~self.is_rejected).sum())

    def starved_jobs(self) -> list[str]:
        """Return the jobs that never started, or started too late for their promise."""
        limit = 1.0 if self.exact else MAX_WRONG_RATIO
        has_no_start = np.isinf(np.array(self.start_s)) & ~self.is_rejected
        is_late = np.nan_to_num(self.wait_ratios(), nan=0.0) > limit
        return [self.names[job] for job in np.flatnonzero(has_no_start | is_late).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHold:
    """A time for which a job held the same GPUs. ``ended_by`` is as in segments."""

    start_s: float
    ready_s: float
    end_s: float
    ended_by: str

    @property
    def start_cost_s(self) -> float:
        """Return the seconds of a whole start, even if it was cut short."""
        return self.ready_s - self.start_s

    @property
    def is_stopped(self) -> bool:
        """Return whether an optimization ended it."""
        return self.ended_by in OPTIMIZED_ENDS

    def is_short(self, spacing: float) -> bool:
        """Return whether an optimization ended it before ``spacing`` start costs of training."""
        trained_s = self.end_s - self.ready_s
        return self.is_stopped and trained_s < spacing * self.start_cost_s - ROUNDING_S


def merge_segments(segments: Sequence[Segment]) -> Iterator[tuple[int, list[GpuHold]]]:
    """Yield each job with its holds in order of time, in which changes of speed do not count."""
    by_job = sorted(segments, key=lambda s: (s.job, s.start_s, s.end_s))
    for job, job_segments in groupby(by_job, key=lambda s: s.job):
        holds: list[GpuHold] = []
        continues = False
        for segment in job_segments:
            if continues:
                holds[-1] = replace(holds[-1], end_s=segment.end_s, ended_by=segment.ended_by)
            else:
                holds.append(
                    GpuHold(
                        start_s=segment.start_s,
                        ready_s=segment.ready_s,
                        end_s=segment.end_s,
                        ended_by=segment.ended_by,
                    )
                )
            continues = segment.ended_by == SPEED_CHANGE
        yield job, holds


def restart_share(holds: Sequence[GpuHold]) -> float:
    """Return the share of a job's held time that went to starts which an optimization caused."""
    held_s = sum(hold.end_s - hold.start_s for hold in holds)
    caused_s = sum(
        min(hold.start_cost_s, hold.end_s - hold.start_s)
        for earlier, hold in pairwise(holds)
        if earlier.is_stopped
    )
    return caused_s / held_s if held_s > 0 else 0.0


def describe_run(stream: JobStream, result: Result, decide: PlanningDecider) -> StreamRun:
    """Return what a sweep keeps of a run."""
    names = [arrival.spec.name for arrival in stream.scenario.arrivals]
    spacing = decide.options.change_spacing
    holds = dict(merge_segments(result.segments))
    due_s = result.arrival_s + [arrival.spec.deadline_s for arrival in stream.scenario.arrivals]
    selects = any(arrival.spec.node_selector for arrival in stream.scenario.arrivals)
    planned_s = {} if selects else decide.planned_s
    has_promise = result.admitted & np.isfinite(due_s)
    span_s = max(float(result.arrival_s.max()), 1.0)
    busy_gpu_s = sum(
        s.cell.gpus * max(0.0, min(s.end_s, span_s) - s.start_s) for s in result.segments
    )
    return StreamRun(
        names=names,
        arrival_s=result.arrival_s.tolist(),
        first_round_s=[decide.first_round_s.get(name, math.inf) for name in names],
        start_s=result.first_start_s.tolist(),
        promise_s=result.start_by_s.tolist(),
        planned_s=[planned_s.get(name, math.inf) for name in names],
        end_s=result.end_s.tolist(),
        state=list(result.state),
        exact=stream.exact,
        forces=stream.forces,
        refused_rounds=result.refused,
        is_stuck=result.stuck,
        ended_s=result.ended_s,
        spacing=spacing,
        short_starts=sum(hold.is_short(spacing) for row in holds.values() for hold in row),
        restarts=int(result.restarts.sum()),
        restart_share=max(map(restart_share, holds.values()), default=0.0),
        utilisation=busy_gpu_s / (span_s * stream.scenario.gpus),
        promises_broken=int((has_promise & (result.end_s > due_s + 1.0)).sum()),
        has_deadline=has_promise.tolist(),
        decide_s=sum(row.decide_s for row in result.rounds),
    )
