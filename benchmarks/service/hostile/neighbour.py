"""The well-behaved callers: one works on the second cluster, and one checks the server's health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.benchmarks.service.hostile.requests import (
    NEIGHBOUR_CLUSTER,
    cluster_name,
    request_id,
    small_job,
)
from tessera.client import PLAIN_TEXT, open_channel
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS
from tessera.v1 import jobs_pb2, jobs_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

PATIENCE_S: Final = 20.0
"""The deadline of a well-behaved call."""

HEALTH_EVERY_S: Final = 0.1
PAUSE_S: Final = 0.1
"""The pause between turns of the well-behaved caller."""

WAITING_JOBS: Final = 10
"""The number of submitted jobs that the well-behaved caller leaves. It cancels older ones."""

_QUICK: Final = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSample:
    """One call of a well-behaved caller."""

    kind: str
    began_s: float
    seconds: float
    failure: str = ""
    """The code and message of the error, or empty if the call was answered."""


class CallSamples:
    """The calls of all well-behaved callers, in the order in which they ended."""

    def __init__(self) -> None:
        self._samples: list[CallSample] = []

    def time_call(self, kind: str, call: Callable[[], object]) -> None:
        """Make a call, and record its duration and failure."""
        began_s, failure = time.monotonic(), ""
        try:
            call()
        except grpc.RpcError as error:
            failure = f"{kind}: {error.code().name} {(error.details() or '')[:200]}"
        self._samples.append(
            CallSample(
                kind=kind, began_s=began_s, seconds=time.monotonic() - began_s, failure=failure
            )
        )

    def select(self, from_s: float, to_s: float) -> list[CallSample]:
        """Return the calls that began in the interval."""
        return [s for s in list(self._samples) if from_s <= s.began_s < to_s]


class RepeatingThread:
    """A thread that repeats its work and can be paused between two turns."""

    def __init__(self, work: Callable[[], None], every_s: float) -> None:
        self._work, self._every_s = work, every_s
        self._stopped, self._wanted, self._idle = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._wanted.set()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._wanted.set()
        self._thread.join(2 * PATIENCE_S)

    def pause(self, *, wait: bool = True) -> None:
        """Begin no further turns. If ``wait`` is set, wait until the current turn has ended."""
        self._wanted.clear()
        if wait:
            self._idle.wait(5 * PATIENCE_S)

    def resume(self) -> None:
        """Begin turns again."""
        self._idle.clear()
        self._wanted.set()

    def _repeat(self) -> None:
        while not self._stopped.is_set():
            if not self._wanted.is_set():
                self._idle.set()
                self._wanted.wait()
                continue
            self._work()
            self._stopped.wait(self._every_s)
        self._idle.set()


class HealthProbe:
    """A prober of a server's health, alternating between one lasting connection and new ones."""

    def __init__(
        self,
        address: str,
        samples: CallSamples,
        kind: str,
    ) -> None:
        self._address, self._samples, self._kind = address, samples, kind
        self._channel = open_channel(address, PLAIN_TEXT, _QUICK)
        self._turn = 0

    def ask(self) -> None:
        """Make one health check."""
        self._turn += 1
        if self._turn % 2:
            self._samples.time_call(self._kind, lambda: self._check(self._channel))
            return
        with open_channel(self._address, PLAIN_TEXT, _QUICK) as channel:
            self._samples.time_call(self._kind, lambda: self._check(channel))

    def _check(self, channel: grpc.Channel) -> object:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S, wait_for_ready=True)


class Neighbour:
    """A well-behaved caller that submits, lists, reads and schedules on its own cluster."""

    def __init__(self, address: str, samples: CallSamples) -> None:
        channel = open_channel(address, PLAIN_TEXT, _QUICK)
        self._samples = samples
        self._jobs = jobs_pb2_grpc.JobsStub(channel)
        self._scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self._parent = cluster_name(NEIGHBOUR_CLUSTER)
        self._waiting: list[str] = []
        self.acknowledged: list[str] = []
        """The names of all jobs whose submission was answered."""

    def work(self) -> None:
        """Make one turn of calls."""
        self._samples.time_call("submit", self._submit)
        self._samples.time_call("list", self._list)
        self._samples.time_call("round", self.schedule)
        if self.acknowledged:
            self._samples.time_call("get", self._get)
        if len(self._waiting) > WAITING_JOBS:
            self._samples.time_call("cancel", self._cancel)

    def schedule(self) -> scheduler_pb2.Round:
        """Decide a round and commit it."""
        request = scheduler_pb2.ScheduleRequest(
            parent=self._parent, summary_only=True, request_id=request_id()
        )
        return self._scheduler.Schedule(request, timeout=PATIENCE_S)

    def find_missing(self) -> Sequence[str]:
        """Return the acknowledged jobs that do not exist."""
        missing = []
        for name in self.acknowledged:
            try:
                self._jobs.GetJob(jobs_pb2.GetJobRequest(name=name), timeout=PATIENCE_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                missing.append(name)
        return missing

    def _submit(self) -> None:
        request = jobs_pb2.SubmitJobRequest(
            parent=self._parent, job=small_job(), request_id=request_id()
        )
        name = self._jobs.SubmitJob(request, timeout=PATIENCE_S).name
        self.acknowledged.append(name)
        self._waiting.append(name)

    def _list(self) -> None:
        request = jobs_pb2.ListJobsRequest(parent=self._parent, page_size=100)
        self._jobs.ListJobs(request, timeout=PATIENCE_S)

    def _get(self) -> None:
        request = jobs_pb2.GetJobRequest(name=self.acknowledged[-1])
        self._jobs.GetJob(request, timeout=PATIENCE_S)

    def _cancel(self) -> None:
        request = jobs_pb2.CancelJobRequest(name=self._waiting[0], request_id=request_id())
        self._jobs.CancelJob(request, timeout=PATIENCE_S)
        self._waiting.pop(0)
