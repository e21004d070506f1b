"""The record of a demonstration: when each job held which GPUs, as the API shows it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from tessera.formulation.errors import Unavailable
from tessera.formulation.execution_plan import read_execution_plan
from tessera.service.cli.names import short_name
from tessera.v1 import jobs_pb2, jobs_pb2_grpc

POLL_S: Final = 0.2
"""Seconds between two readings of the jobs, much less than the time between two rounds."""

PATIENCE_S: Final = 900.0
"""The longest wait for a step of the demonstration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An act of the demonstration, at a time in seconds. ``node`` is "" if it is about no node."""

    time_s: float
    text: str
    node: str = ""


@dataclass(slots=True, kw_only=True)
class Start:
    """A start of a job: its GPUs as (node, index), and its times in seconds of the demonstration.

    ``running_s`` is inf until the job has reported that it runs, with ``resumed`` iterations done.
    ``plan`` has the stages of its execution plan in short, or "" if it has no recorded plan.
    """

    generation: int
    gpus: tuple[tuple[str, int], ...]
    begun_s: float
    running_s: float = math.inf
    resumed: float = 0.0
    ended_s: float = 0.0
    plan: str = ""


@dataclass(slots=True)
class Recorder:
    """The jobs of a demonstration, read again and again, with what they ran on.

    ``checks`` are called with each reading. They raise Unavailable if something has failed.
    """

    stub: jobs_pb2_grpc.JobsStub
    parent: str
    checks: Sequence[Callable[[], None]] = ()
    clock: Callable[[], float] = time.monotonic
    starts: dict[str, list[Start]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    _zero_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin to count the time."""
        self._zero_s = self.clock()

    def note(self, text: str, node: str = "") -> None:
        """Record an event."""
        self.events.append(Event(time_s=self.clock() - self._zero_s, text=text, node=node))

    def read(self) -> dict[str, jobs_pb2.Job]:
        """Return all jobs by their ids, and record what they run on."""
        request = jobs_pb2.ListJobsRequest(parent=self.parent, page_size=1000)
        jobs = {short_name(job.name): job for job in self.stub.ListJobs(request).jobs}
        self.record(jobs, self.clock() - self._zero_s)
        return jobs

    def record(self, jobs: Mapping[str, jobs_pb2.Job], now_s: float) -> None:
        """Record what the jobs run on at ``now_s``."""
        for name, job in jobs.items():
            gpus = gpus_of(job)
            if not gpus:
                continue
            starts = self.starts.setdefault(name, [])
            if not starts or starts[-1].generation != job.allocation.generation:
                new = Start(
                    generation=job.allocation.generation,
                    gpus=gpus,
                    begun_s=now_s,
                    plan=stages_of(job),
                )
                starts.append(new)
            starts[-1].ended_s = now_s
            if job.state == jobs_pb2.RUNNING and math.isinf(starts[-1].running_s):
                starts[-1].running_s, starts[-1].resumed = now_s, job.iterations_done

    def wait(self, condition: Callable[[dict[str, jobs_pb2.Job]], bool], what: str) -> None:
        """Wait until ``condition`` holds for the jobs.

        Raises:
            Unavailable: a process of the demonstration has failed, or it takes too long.
        """
        until_s = self.clock() + PATIENCE_S
        while not condition(jobs := self.read()):
            for check in self.checks:
                check()
            if self.clock() > until_s:
                states = ", ".join(f"{name}: {describe(job)}" for name, job in jobs.items())
                raise Unavailable(f"waited {PATIENCE_S:g} s in vain until {what} ({states})")
            time.sleep(POLL_S)


def gpus_of(job: jobs_pb2.Job) -> tuple[tuple[str, int], ...]:
    """Return the GPUs that a job holds, as (node, index)."""
    return tuple(
        (short_name(share.node), index)
        for share in job.allocation.shares
        for index in share.gpu_indices
    )


def stages_of(job: jobs_pb2.Job) -> str:
    """Return the stages of the plan that a job runs by, e.g. "2 x tp2", or "" without one."""
    text = job.allocation.execution_plan
    return str(read_execution_plan("execution_plan", text)).partition(",")[0] if text else ""


def has_ended(job: jobs_pb2.Job) -> bool:
    """Return whether a job has ended, in whatever way."""
    return job.HasField("end_time")


def describe(job: jobs_pb2.Job) -> str:
    """Return a job's state and progress, and its last error if there is one."""
    state = jobs_pb2.JobState.Name(job.state)
    error = f", {job.last_error}" if job.last_error else ""
    return f"{state} at iteration {job.iterations_done:.0f} of {job.iterations}{error}"


def describe_starts(starts: Sequence[Start]) -> str:
    """Return the plans of a job's starts, e.g. "dp4→2 x tp2→dp1", or else their GPU counts.

    Starts in a row that have the same plan are one, because a move alone changes no plan.
    """
    plans = [start.plan or str(len(start.gpus)) for start in starts]
    return "→".join(plan for plan, _ in groupby(plans)) or "-"
