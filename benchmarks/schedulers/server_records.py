"""Runs of streams on a server, as its store records them and the simulator describes its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from tessera.benchmarks.schedulers.stream_runs import GpuHold, StreamRun, restart_share
from tessera.benchmarks.schedulers.streams import SPACING_S, JobStream
from tessera.db.rounds.rounds import list_rounds
from tessera.db.store.reads import job_history, list_jobs
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.job.lifecycle import ACTIVE, WAITING, JobEvent
from tessera.formulation.records.jobs import JobEventRecord, JobRecord
from tessera.formulation.records.rounds import RoundSummary
from tessera.formulation.state.snapshot import STATES
from tessera.solvers.rounds.options import RoundOptions

LATENCY_S: Final = 1.0
"""The seconds in which a server decides and commits a round, agents start processes, and ends of jobs
are reported. A start may be as much later than in the simulator."""
MAX_ROWS: Final = 10**6
NEW_GPUS: Final = frozenset({JobEvent.START, JobEvent.MOVE})
"""The events with which a job gets GPUs."""
ENDINGS: Final = {
    JobEvent.MOVE: DecisionKind.MOVE.value,
    JobEvent.SUSPEND: DecisionKind.SUSPEND.value,
}
"""The events by which a round ends a hold. A history also calls a resize or replan a move."""


class RoundHistory:
    """The first round that saw each job, the first promise to it, and the rounds in which it waited."""

    def __init__(self, store: Store, rounds: Sequence[RoundSummary]) -> None:
        """Read the snapshots of a cluster's rounds, oldest first."""
        self.first_round_s: dict[str, float] = {}
        self.promise_s: dict[str, float] = {}
        self.waits: dict[str, int] = {}
        for summary in rounds:
            snapshot = store.round_snapshot(summary.cluster, summary.number)
            jobs = snapshot.jobs
            for job, name in enumerate(jobs.name):
                self.first_round_s.setdefault(name, snapshot.now_s)
                if math.isfinite(start_by_s := float(jobs.start_by_s[job])):
                    self.promise_s.setdefault(name, start_by_s)
                waits = STATES[int(jobs.state[job])] in WAITING
                self.waits[name] = self.waits.get(name, 0) + waits


def read_holds(events: Sequence[JobEventRecord], restart_s: float) -> Iterator[GpuHold]:
    """Yield the times for which a job had the same GPUs, from its events, oldest first.

    A start takes ``restart_s``. A hold that has not ended is left out.
    """
    since_s = math.nan
    for event in events:
        kind = JobEvent(event.event)
        ends = event.state not in ACTIVE or kind in NEW_GPUS
        if ends and not math.isnan(since_s):
            yield GpuHold(
                start_s=since_s,
                ready_s=since_s + restart_s,
                end_s=event.at_s,
                ended_by=ENDINGS.get(kind, kind.value),
            )
            since_s = math.nan
        if kind in NEW_GPUS:
            since_s = event.at_s


def first_start_s(events: Sequence[JobEventRecord]) -> float:
    """Return when a round first gave a job GPUs, or inf if none did."""
    return next((event.at_s for event in events if event.event == JobEvent.START), math.inf)


class ClusterRecords:
    """The records of a cluster's jobs and rounds in a store. Times are in seconds since 1970."""

    def __init__(self, store: Store, cluster: str) -> None:
        """Read the jobs, their histories, and the snapshots of rounds."""
        self.jobs: list[JobRecord] = store.read(list_jobs, cluster, [], 0, MAX_ROWS)[0]
        self.rounds = store.read(list_rounds, cluster, MAX_ROWS, MAX_ROWS)[::-1]
        self.history = RoundHistory(store, self.rounds)
        self.events = [store.read(job_history, cluster, record.spec.name) for record in self.jobs]
        self.starts_s = [first_start_s(events) for events in self.events]

    def first_rounds_s(self) -> list[float]:
        """Return when a round first saw each job. A job that it started at once started then."""
        return [
            start_s
            if self.history.waits.get(record.spec.name) == 1 and math.isfinite(start_s)
            else self.history.first_round_s.get(record.spec.name, math.inf)
            for record, start_s in zip(self.jobs, self.starts_s, strict=True)
        ]

    def promises_s(self) -> list[float]:
        """Return the first promise to each job, or inf without any."""
        promise_s = self.history.promise_s
        return [promise_s.get(record.spec.name, record.start_by_s) for record in self.jobs]

    def ends_s(self) -> list[float]:
        """Return when each job ended, or inf."""
        return [math.inf if record.ended_s is None else record.ended_s for record in self.jobs]

    def holds(self, clock_factor: float) -> list[list[GpuHold]]:
        """Return the holds of each job."""
        return [
            list(read_holds(events, record.spec.restart_s / clock_factor))
            for record, events in zip(self.jobs, self.events, strict=True)
        ]

    def count_restarts(self) -> int:
        """Return the number of starts and moves after the first start of each job."""
        starts = sum(event.event in NEW_GPUS for events in self.events for event in events)
        return starts - sum(math.isfinite(start_s) for start_s in self.starts_s)


def describe_server_run(
    store: Store,
    cluster: str,
    stream: JobStream,
    options: RoundOptions,
    clock_factor: float,
) -> StreamRun:
    """Return the run of a stream on a cluster, from its jobs, their histories and its rounds.

    Times are seconds of training since the first submission, of which ``clock_factor`` pass in a second
    of the server's clock. Nothing is known of other schedulers' plans or of the use of GPUs.
    """
    records = ClusterRecords(store, cluster)
    jobs, ends_s, holds = records.jobs, records.ends_s(), records.holds(clock_factor)
    seen_s = [summary.created_s for summary in records.rounds] + ends_s

    def scale(times_s: Sequence[float]) -> list[float]:
        return [(at_s - jobs[0].created_s) * clock_factor for at_s in times_s]

    spacing = options.change_spacing
    return StreamRun(
        names=[record.spec.name for record in jobs],
        arrival_s=scale([record.created_s for record in jobs]),
        first_round_s=scale(records.first_rounds_s()),
        start_s=scale(records.starts_s),
        promise_s=scale(records.promises_s()),
        planned_s=[math.inf] * len(jobs),
        end_s=scale(ends_s),
        state=[record.state.value for record in jobs],
        exact=stream.exact,
        forces=stream.forces,
        refused_rounds=sum(summary.outcome == "refused" for summary in records.rounds),
        is_stuck=False,
        ended_s=scale([max(at_s for at_s in seen_s if math.isfinite(at_s))])[0],
        spacing=spacing,
        short_starts=sum(hold.is_short(spacing) for row in holds for hold in row),
        restarts=records.count_restarts(),
        restart_share=max(map(restart_share, holds), default=0.0),
        utilisation=math.nan,
        promises_broken=0,
        has_deadline=[False] * len(jobs),
        decide_s=sum(sum(summary.seconds.values()) for summary in records.rounds),
        late_s=SPACING_S + LATENCY_S * clock_factor,
    )
