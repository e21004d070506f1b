"""Steady calls over TLS by clients with tokens, and a view of jobs that nothing may disturb."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from tessera.client import ChannelSettings, open_channel
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS
from tessera.v1 import access_pb2, access_pb2_grpc, jobs_pb2, scheduler_pb2
from tests.support.system import QUICK, Agent, Lab, Replica, a_job_message, until

TENANT = "vision"

CALL_S = 60.0
"""Deadline of a call. A busy machine may take long."""

PAUSE_S = 0.15
"""Pause between two calls of a client."""


@dataclass(frozen=True)
class JobRun:
    """The run of a job: its state, generation, GPUs and process."""

    state: jobs_pb2.JobState.ValueType
    generation: int
    gpus: tuple[tuple[str, tuple[int, ...]], ...]
    pid: int


def load_runs(lab: Lab, jobs: Sequence[str], agents: Sequence[Agent]) -> dict[str, JobRun]:
    """Return the run of each of these jobs, all as of one moment except for the processes."""
    gangs = {job: agent for agent in agents for job, _ in agent.gangs()}
    return {
        name: JobRun(
            state=job.state,
            generation=job.generation,
            gpus=tuple((s.node, tuple(s.gpu_indices)) for s in job.allocation.shares),
            pid=gangs[name].pid_of(name, job.generation),
        )
        for job in lab.jobs()
        if (name := job.name.rpartition("/")[2]) in jobs
    }


def create_token(lab: Lab, name: str, role: str, *tenants: str) -> str:
    """Return a new token, made by the stack's administrator."""
    token = access_pb2.Token(name=name, role=role, tenants=tenants)
    with open_channel(lab.stack.addresses[0], lab.stack.channel) as channel:
        stub = access_pb2_grpc.AccessStub(channel)
        return stub.CreateToken(access_pb2.CreateTokenRequest(token=token)).text


def write_join_token(lab: Lab, path: Path, *nodes: str, uses: int) -> Path:
    """Write a new join token to a file of its owner alone."""
    token = access_pb2.JoinToken(nodes=nodes, uses=uses)
    request = access_pb2.CreateJoinTokenRequest(parent=lab.parent, join_token=token)
    with open_channel(lab.stack.addresses[0], lab.stack.channel) as channel:
        path.touch(mode=0o600)
        path.write_text(access_pb2_grpc.AccessStub(channel).CreateJoinToken(request).text)
    return path


class SteadyCalls:
    """Clients that call both replicas throughout. Nothing is tried twice, so a failure is kept.

    Each kind of call has a client: those of ``get``, ``submit``, ``schedule`` and ``watch`` hold one
    connection to each replica, and ``connect`` opens a connection for each call.
    """

    def __init__(self, lab: Lab, watched: Sequence[str]) -> None:
        self._lab, self._watched = lab, [f"{lab.parent}/jobs/{name}" for name in watched]
        authorities = lab.stack.channel.authorities
        user = create_token(lab, "ada", "user", TENANT)
        operator = create_token(lab, "grace", "operator")
        self._user = ChannelSettings(authorities=authorities, token=user)
        self._operator = ChannelSettings(authorities=authorities, token=operator)
        self._channels = ExitStack()
        self._stop, self._streams = threading.Event(), list[Any]()
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._numbers = itertools.count()
        self._waiting: list[str] = []
        users, operators = self._connect(self._user), self._connect(self._operator)
        clients: list[tuple[str, list[Replica], Callable[[Replica | None], None]]] = [
            ("get", users, self._get),
            ("submit", self._connect(self._user), self._submit),
            ("schedule", operators, self._schedule),
            ("connect", [], self._call_once),
        ]
        self._threads = [threading.Thread(target=self._repeat, args=client) for client in clients]
        for number, replica in enumerate(self._connect(self._user)):
            for name in self._watched[number::2]:
                stream = replica.jobs.WatchJob(jobs_pb2.WatchJobRequest(name=name))
                self._streams.append(stream)
                self._threads.append(threading.Thread(target=self._watch, args=(stream,)))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for stream in self._streams:
            stream.cancel()
        for thread in self._threads:
            thread.join()
        self._channels.close()

    def wait_for_answers(self, number: int) -> None:
        """Wait until each client has got ``number`` more answers, and check that no call failed."""
        before = self.answers.copy()
        kinds = ("get", "submit", "schedule", "connect")
        until(
            lambda: self.failures or all(self.answers[k] >= before[k] + number for k in kinds),
            f"{number} more answers of each kind",
        )
        self.check()

    def check(self) -> None:
        """Check that no call failed and no stream ended."""
        assert not self.failures, self.failures
        assert all(stream.is_active() for stream in self._streams)

    def _connect(self, settings: ChannelSettings) -> list[Replica]:
        """Return a connection to each replica. Their authorities are read now, and not again."""
        return [
            self._channels.enter_context(open_replica(address, settings))
            for address in self._lab.stack.addresses
        ]

    def _repeat(
        self, kind: str, replicas: list[Replica], work: Callable[[Replica | None], None]
    ) -> None:
        turn = 0
        while not self._stop.wait(PAUSE_S):
            turn += 1
            try:
                work(replicas[turn % len(replicas)] if replicas else None)
            except (grpc.RpcError, ValueError, AssertionError) as error:
                self.failures.append(f"{kind}: {error}")
            else:
                self.answers[kind] += 1

    def _watch(self, stream: Any) -> None:
        try:
            for job in stream:
                assert job.state == jobs_pb2.RUNNING, job
                self.answers["watch"] += 1
        except (grpc.RpcError, AssertionError) as error:
            if not self._stop.is_set():
                self.failures.append(f"watch: {error}")
            return
        self.failures.append("watch: the stream ended")

    def _get(self, replica: Replica | None) -> None:
        assert replica is not None
        job = replica.jobs.GetJob(jobs_pb2.GetJobRequest(name=self._watched[0]), timeout=CALL_S)
        assert job.state == jobs_pb2.RUNNING, job

    def _submit(self, replica: Replica | None) -> None:
        """Submit a job that has to wait, and cancel the earlier one."""
        assert replica is not None
        request = jobs_pb2.SubmitJobRequest(
            parent=self._lab.parent,
            job_id=f"waiting-{next(self._numbers)}",
            job=a_job_message(1),
        )
        self._waiting.append(replica.jobs.SubmitJob(request, timeout=CALL_S).name)
        if len(self._waiting) > 1:
            cancelled = jobs_pb2.CancelJobRequest(name=self._waiting.pop(0))
            replica.jobs.CancelJob(cancelled, timeout=CALL_S)

    def _schedule(self, replica: Replica | None) -> None:
        assert replica is not None
        request = scheduler_pb2.ScheduleRequest(
            parent=self._lab.parent,
            summary_only=True,
            options=scheduler_pb2.RoundOptions(solver="greedy"),
        )
        replica.scheduler.Schedule(request, timeout=CALL_S)

    def _call_once(self, _: Replica | None) -> None:
        """Make a call like a command does: it reads the file of authorities, and connects."""
        addresses = self._lab.stack.addresses
        address = addresses[self.answers["connect"] % len(addresses)]
        with open_replica(address, self._user) as replica:
            self._get(replica)


@contextmanager
def open_replica(address: str, settings: ChannelSettings) -> Iterator[Replica]:
    """Open a connection of its own to a replica."""
    with open_channel(address, settings, [*CHANNEL_OPTIONS, *QUICK]) as channel:
        yield Replica(channel)
