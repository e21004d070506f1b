"""Real agents on a running stack, a persistent user, and helpers for waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import NAMESPACE_URL, uuid5

import grpc
import psutil
from grpc_health.v1 import health_pb2_grpc

from tessera.client import open_channel
from tessera.formulation.base.values import Cell, EstimateSource, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.agent.process import Process
from tessera.service.agent.warden import WARDEN_FILE
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS, Stack
from tessera.service.server.convert import estimate_to_proto, job_spec_to_proto
from tessera.v1 import (
    clusters_pb2,
    clusters_pb2_grpc,
    estimates_pb2,
    estimates_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.support.agents import is_running, process_of
from tests.support.patience import PATIENCE_S
from tests.support.waiting import until as until

T = TypeVar("T")

CLOCK_FACTOR = 100.0
"""The simulated seconds in a real second, and so the iterations of a job per real second."""

UNSETTLED = (
    jobs_pb2.STARTING,
    jobs_pb2.STOPPING,
    jobs_pb2.HOLDING,
    jobs_pb2.CANCELLING,
    jobs_pb2.FAILING,
)

TRY_AGAIN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED}
)

QUICK = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]


class Replica:
    """The stubs of one replica."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.jobs = jobs_pb2_grpc.JobsStub(channel)
        self.clusters = clusters_pb2_grpc.ClustersStub(channel)
        self.estimates = estimates_pb2_grpc.EstimatesStub(channel)
        self.scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class User:
    """A user that calls replicas until one answers. ``failures`` has the codes of failed calls."""

    def __init__(self, stack: Stack) -> None:
        self._channels = ExitStack()
        self.replicas = [
            Replica(
                self._channels.enter_context(
                    open_channel(address, stack.channel, [*CHANNEL_OPTIONS, *QUICK])
                )
            )
            for address in stack.addresses
        ]
        self.failures: list[grpc.StatusCode] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channels.close()

    def insist(self, call: Callable[[Replica], T], first: int = 0) -> T:
        """Return the answer to ``call`` of the first replica that answers, from ``first`` on."""
        turn = first

        def attempt() -> list[T]:
            nonlocal turn
            replica = self.replicas[turn % len(self.replicas)]
            turn += 1
            try:
                return [call(replica)]
            except grpc.RpcError as error:
                if error.code() not in TRY_AGAIN:
                    raise
                self.failures.append(error.code())
                return []

        return until(attempt, "an answer from any replica")[0]


class Lab:
    """A test's own cluster on the stack, with one GPU type and jobs that run on exactly N GPUs."""

    def __init__(self, stack: Stack, user: User, cluster: str) -> None:
        self.stack, self.user = stack, user
        self.cluster, self.parent = cluster, f"clusters/{cluster}"
        self.checkpoints = stack.folder / "checkpoints"
        self.agents: list[Agent] = []
        gpu_type = clusters_pb2.GpuType(name="a40", memory_bytes=48 << 30)
        made = clusters_pb2.Cluster(name=self.parent, gpu_types=[gpu_type])
        user.insist(
            lambda r: r.clusters.UpsertCluster(clusters_pb2.UpsertClusterRequest(cluster=made))
        )
        cells = [
            estimate_to_proto(
                EstimateRecord(
                    workload=workload(gpus),
                    cell=Cell(gpu_type="a40", gpus=gpus, pipeline_degree=1, nodes=-(-gpus // 2)),
                    iter_time_s=1.0,
                    source=EstimateSource.MEASURED,
                )
            )
            for gpus in (1, 2, 4)
        ]
        request = estimates_pb2.UpsertCellsRequest(parent=self.parent, cells=cells)
        user.insist(lambda r: r.estimates.UpsertCells(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()

    def agent(
        self,
        *nodes: tuple[str, int],
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: float,
    ) -> Agent:
        """Start an agent for nodes of (name, GPUs), which is ended with the lab."""
        agent = Agent(self, nodes, flags=flags, environment=environment or {}, **settings)
        self.agents.append(agent)
        return agent.start()

    def submit(
        self, name: str, gpus: int, weight: float = 1.0, *, preemptible: bool = False
    ) -> None:
        request = jobs_pb2.SubmitJobRequest(
            parent=self.parent,
            job_id=name,
            job=a_job_message(gpus, weight, {"load": name}, preemptible=preemptible),
            request_id=uuid(f"{self.parent}/{name}"),
        )
        self.user.insist(lambda r: r.jobs.SubmitJob(request))

    def job(self, name: str) -> jobs_pb2.Job:
        request = jobs_pb2.GetJobRequest(name=f"{self.parent}/jobs/{name}")
        return self.user.insist(lambda r: r.jobs.GetJob(request))

    def jobs(self, *states: jobs_pb2.JobState.ValueType) -> list[jobs_pb2.Job]:
        request = jobs_pb2.ListJobsRequest(parent=self.parent, page_size=10_000, states=states)
        return list(self.user.insist(lambda r: r.jobs.ListJobs(request)).jobs)

    def schedule(self) -> scheduler_pb2.Round:
        request = scheduler_pb2.ScheduleRequest(parent=self.parent)
        return self.user.insist(lambda r: r.scheduler.Schedule(request, timeout=PATIENCE_S))

    def rounds(self) -> list[scheduler_pb2.Round]:
        """Return all rounds with their decisions, oldest first."""
        request = scheduler_pb2.ListRoundsRequest(parent=self.parent, page_size=1000)
        listed = self.user.insist(lambda r: r.scheduler.ListRounds(request))
        assert not listed.next_page_token
        return [self.round(r.name) for r in reversed(listed.rounds)]

    def round(self, name: str) -> scheduler_pb2.Round:
        request = scheduler_pb2.GetRoundRequest(name=name)
        return self.user.insist(lambda r: r.scheduler.GetRound(request))

    def nodes(self) -> dict[str, clusters_pb2.Node]:
        request = clusters_pb2.ListNodesRequest(parent=self.parent, page_size=1000)
        nodes = self.user.insist(lambda r: r.clusters.ListNodes(request)).nodes
        return {node.name.rpartition("/")[2]: node for node in nodes}

    def wait_for_state(self, name: str, state: jobs_pb2.JobState.ValueType) -> jobs_pb2.Job:
        def reached() -> jobs_pb2.Job | None:
            job = self.job(name)
            return job if job.state == state else None

        def described() -> str:
            logs = "\n".join(f"{a.name}: {a.log.read_text()[-2000:]}" for a in self.agents)
            wanted = jobs_pb2.JobState.Name(state)
            return f"{name} becomes {wanted}, but it is\n{self.job(name)}\nthe agents log:\n{logs}"

        return until(reached, described)

    def checkpoint(self, name: str) -> dict[str, int]:
        """Return the checkpoint's generation and iterations, or {} if the job has no checkpoint."""
        path = self.checkpoints / self.cluster / f"job-{name}" / "checkpoint.json"
        found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def settle(self) -> None:
        """Wait until every gang has started or ended."""
        until(lambda: not self.jobs(*UNSETTLED), "every gang has started or ended")


class Agent:
    """A real agent process, which is ended with all its processes at the end of the test."""

    def __init__(
        self,
        lab: Lab,
        nodes: Sequence[tuple[str, int]],
        *,
        checkpoint_s: float = 100.0,
        grace_s: float = 10.0,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare an agent. ``environment`` adds to that of this process."""
        self.name = nodes[0][0]
        self.folder = lab.stack.folder / "agents" / lab.cluster / self.name
        self.folder.mkdir(parents=True)
        self.log = self.folder / "agent.log"
        self.nodes = dict(nodes)
        self._lab = lab
        self._environment = {**os.environ, **(environment or {})}
        settings = {
            "agent-id": self.name,
            "cluster": lab.cluster,
            "data-dir": self.folder,
            "checkpoint-dir": lab.checkpoints,
            "clock-factor": CLOCK_FACTOR,
            "checkpoint-s": checkpoint_s,
            "grace-s": grace_s,
        }
        self._argv = [sys.executable, "-m", "tessera.service.agent.main", "--stop-on-exit"]
        self._argv += [f"--{name}={value}" for name, value in settings.items()]
        self._argv += flags
        self._argv += [f"--server={address}" for address in lab.stack.addresses]
        self._argv += [f"--node={name}:a40:{gpus}" for name, gpus in nodes]

    def start(self) -> Self:
        """Start the agent, and wait until its nodes are ready."""
        self.launch()
        try:
            until(self._ready, f"agent {self.name} is ready")
        except AssertionError as error:
            error.add_note(self.log.read_text()[-500:])
            raise
        return self

    def launch(self) -> None:
        """Start the agent without waiting, e.g. because its nodes are drained."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._argv, stdout=out, stderr=out, env=self._environment
            )

    def _ready(self) -> bool:
        assert self.process.poll() is None, f"agent {self.name} has ended"
        nodes = self._lab.nodes()
        return all(
            name in nodes and nodes[name].state == clusters_pb2.Node.READY for name in self.nodes
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def gangs(self) -> set[tuple[str, int]]:
        """Return (job, generation) of the gangs that the agent has on record."""
        keys = set()
        for folder in (self.folder / "gangs").glob("*/gang.json"):
            job, _, generation = folder.parent.name.rpartition("@")
            keys.add((job, int(generation)))
        return keys

    def wait_for_gangs(self, keys: Collection[tuple[str, int]]) -> None:
        until(lambda: self.gangs() == set(keys), f"{self.name} has exactly the gangs {keys}")

    def pid_of(self, job: str, generation: int = 1) -> int:
        return process_of(self.folder, job, generation)

    def children(self) -> set[int]:
        """Return the process ids of live jobs that this agent process itself started."""
        processes = psutil.Process(self.process.pid).children()
        warden = json.loads((self.folder / WARDEN_FILE).read_text())["pid"]
        return {child.pid for child in processes if is_running(child.pid)} - {warden}

    def file_of(self, job: str, generation: int, name: str) -> dict[str, Any]:
        path = self.folder / "gangs" / f"{job}@{generation}" / name
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        """End the agent and every process that it left."""
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for job, generation in self.gangs():
            left = Process.adopt(self.folder / "gangs" / f"{job}@{generation}" / "process.json")
            if left is not None:
                left.signal(signal.SIGKILL)


def workload(gpus: int) -> Workload:
    """Return a workload that runs on exactly this number of GPUs."""
    return Workload(model="m", params=f"{gpus}B", global_batch=64)


def nodes_of(job: jobs_pb2.Job) -> set[str]:
    """Return the names of the nodes on which a job has GPUs."""
    return {share.node.rpartition("/")[2] for share in job.allocation.shares}


def uuid(seed: str) -> str:
    """Return a request id that depends only on ``seed``."""
    return str(uuid5(NAMESPACE_URL, seed))


def a_job_message(
    gpus: int,
    weight: float = 1.0,
    labels: dict[str, str] | None = None,
    *,
    preemptible: bool = False,
) -> jobs_pb2.Job:
    """Return a long job that runs on exactly this number of GPUs."""
    return job_spec_to_proto(
        "",
        JobSpec(
            name="",
            workload=workload(gpus),
            iterations=10**9,
            requested_gpus=gpus,
            weight=weight,
            restart_s=0.0,
            labels=labels or {},
            preemptible=preemptible,
        ),
    )


def kill_postgres(folder: Path) -> None:
    """Kill every process of the PostgreSQL server on ``folder`` at any point of its work."""
    postmaster = psutil.Process(int((folder / "postmaster.pid").read_text().split()[0]))
    processes = [postmaster, *postmaster.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # they end automatically with the first
            process.kill()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not left
