"""A running server with the clusters, agents and jobs of the benchmark."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tessera.benchmarks.service.agents import AgentProcess
from tessera.benchmarks.service.fleet import Fleet
from tessera.benchmarks.service.hostile.requests import (
    ATTACKED_CLUSTER,
    CROWDED_CLUSTER,
    FLOODED_CLUSTER,
    GPU_TYPE,
    NEIGHBOUR_CLUSTER,
    cell_of,
    cluster_name,
    small_job,
    submit_request,
)
from tessera.db.engine import Database, connect_database
from tessera.db.invariants import count_lost_jobs
from tessera.estimator.samples import sample_profiles
from tessera.service.cli.demo.drive import add_estimates, make_cluster, schedule_round, submit_jobs
from tessera.service.cli.demo.stack import ServerProcess, Stack, free_port, run_stack
from tessera.simulator.clusters import tiny_cluster
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2, scheduler_pb2

LEASE_S: Final = 10.0
HEARTBEAT_S: Final = 1.0
GRACE_S: Final = 10.0
"""The longest grace of the server. In runs with short phases it is shorter."""

SETTINGS: Final = {
    "TESSERA_LEASE_S": str(LEASE_S),
    "TESSERA_MARGIN_S": "5",
    "TESSERA_INSPECT_S": "2",
    "TESSERA_HEARTBEAT_S": str(HEARTBEAT_S),
    "TESSERA_HEALTH_PERIOD_S": "1",
}
"""The server's settings. Leases are short, so that missed renewals become visible."""

NODES: Final = 4
STEADY_JOBS: Final = 4
"""Jobs of each real cluster that run throughout. With two GPUs each, they fill the nodes."""

BATCH: Final = 5_000
"""The number of jobs in one call while the lab is filled."""

FLEET: Final = "fleet"
SETTLE_WITHIN_S: Final = 60.0


class Lab:
    """A server process with its clusters and agents. ``load`` scales the numbers of their jobs."""

    def __init__(self, stack: Stack, load: float, seed: int, grace_s: float) -> None:
        self._load, self._seed, self.grace_s = load, seed, grace_s
        self.stack = stack
        self.database: Database = connect_database(
            stack.database_url, pool_size=3, statement_timeout_s=20.0
        )
        self._left = ExitStack()
        self._left.callback(self.database.engine.dispose)
        self.agents: list[AgentProcess] = []
        self._fleet: Fleet | None = None
        self._lapses = self._lost = self._errors = 0
        self.control_address = f"127.0.0.1:{free_port()}"
        argv = [
            sys.executable,
            "-m",
            "tessera.benchmarks.service.hostile.bare",
            self.control_address,
        ]
        control = subprocess.Popen(argv)
        self._left.callback(control.wait)
        self._left.callback(control.kill)

    @property
    def server(self) -> ServerProcess:
        """Return the server under attack."""
        return self.stack.servers[0]

    @property
    def address(self) -> str:
        """Return the address at which the server listens."""
        return self.server.address

    def close(self) -> None:
        """End the agents and connections."""
        self.dismiss_fleet()
        for agent in self.agents:
            agent.close()
        self._left.close()

    def fill(self) -> None:
        """Create the clusters, start their agents, and start their jobs."""
        for cluster in (ATTACKED_CLUSTER, NEIGHBOUR_CLUSTER, FLOODED_CLUSTER):
            make_small_cluster(self.stack, cluster)
        for cluster in (ATTACKED_CLUSTER, NEIGHBOUR_CLUSTER):
            nodes = [(f"n{k}", GPU_TYPE, 2) for k in range(NODES)]
            folder = self.stack.folder / "agents" / cluster
            self.agents.append(
                AgentProcess(address=self.address, cluster=cluster, nodes=nodes, folder=folder)
            )
        self._make_crowd()
        for cluster in (ATTACKED_CLUSTER, NEIGHBOUR_CLUSTER):
            self._start_jobs(cluster)
        jobs = max(100, round(100_000 * self._load))
        for start in range(0, jobs, BATCH):
            request = submit_request(FLOODED_CLUSTER, min(BATCH, jobs - start))
            self.stack.jobs.SubmitJobs(request)

    def _make_crowd(self) -> None:
        """Fill a cluster of 64 GPUs with more jobs than it can run, and run its first round."""
        types, self._nodes = tiny_cluster()
        make_cluster(self.stack, types, self._nodes)
        profiles = sample_profiles()
        add_estimates(self.stack, profiles)
        self._join_fleet()
        arrivals = philly_like(max(50, round(2_000 * self._load)), self._seed, profiles=profiles)
        submit_jobs(self.stack, [arrival.spec for arrival in arrivals])
        schedule_round(self.stack, 60.0, solver="greedy")

    def _join_fleet(self) -> None:
        self._fleet = Fleet(self.address, CROWDED_CLUSTER, self._nodes, FLEET)
        self._fleet.__enter__()

    def dismiss_fleet(self) -> None:
        """End the stream of the crowded cluster's agents, since they do not reconnect."""
        if self._fleet is not None:
            self._fleet.__exit__()
        self._fleet = None

    def _start_jobs(self, cluster: str) -> None:
        """Start jobs that hold all GPUs of the cluster throughout."""
        self._wait_for_nodes(cluster)
        for k in range(STEADY_JOBS):
            job = small_job(gpus=2, weight=1000.0, iterations=10**12)
            job.guaranteed = True
            request = jobs_pb2.SubmitJobRequest(
                parent=cluster_name(cluster), job_id=f"steady-{k}", job=job
            )
            self.stack.jobs.SubmitJob(request)
        round_request = scheduler_pb2.ScheduleRequest(
            parent=cluster_name(cluster), summary_only=True
        )
        self.stack.scheduler.Schedule(round_request, timeout=60)
        running_jobs = jobs_pb2.ListJobsRequest(
            parent=cluster_name(cluster), states=[jobs_pb2.RUNNING]
        )
        self._wait(
            lambda: len(self.stack.jobs.ListJobs(running_jobs).jobs) == STEADY_JOBS,
            f"the jobs of {cluster} run",
        )

    def _wait_for_nodes(self, cluster: str) -> None:
        request = clusters_pb2.ListNodesRequest(parent=cluster_name(cluster), page_size=1000)
        self._wait(
            lambda: (
                sum(
                    node.state == clusters_pb2.Node.READY
                    for node in self.stack.clusters.ListNodes(request).nodes
                )
                >= NODES
            ),
            f"the agent of {cluster} has reported",
        )

    @staticmethod
    def _wait(condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + SETTLE_WITHIN_S
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within the time limit: {what}")
            time.sleep(0.05)

    def restart_server(self) -> None:
        """Restart the server, whether or not it still runs."""
        self.dismiss_fleet()
        self.server.kill()
        self.server.start()
        self.server.wait()
        self._join_fleet()
        for cluster in (ATTACKED_CLUSTER, NEIGHBOUR_CLUSTER):
            self._wait_for_nodes(cluster)

    def watched_agents(self) -> list[tuple[str, str]]:
        """Return the clusters and names of the agents that must keep their leases."""
        return [(ATTACKED_CLUSTER, "n0"), (NEIGHBOUR_CLUSTER, "n0"), (CROWDED_CLUSTER, FLEET)]

    def count_new_losses(self) -> int:
        """Return the number of lapsed leases and of jobs that lost GPUs since the last call."""
        lapses = sum(agent.count_lapses() for agent in self.agents)
        lost = sum(
            count_lost_jobs(self.database, c)
            for c in (ATTACKED_CLUSTER, NEIGHBOUR_CLUSTER, CROWDED_CLUSTER)
        )
        result = lapses - self._lapses + lost - self._lost
        self._lapses, self._lost = lapses, lost
        return result

    def take_new_errors(self) -> list[str]:
        """Return the unexpected errors that the server has logged since the last call."""
        with self.server.log.open(encoding="utf-8", errors="replace") as log:
            raised = find_raised(log)
        result, self._errors = raised[self._errors :], len(raised)
        return result


def make_small_cluster(stack: Stack, cluster: str) -> None:
    """Create a cluster without nodes, with Cells for the jobs of the benchmark."""
    kind = clusters_pb2.GpuType(name=GPU_TYPE, memory_bytes=48 << 30)
    made = clusters_pb2.Cluster(name=cluster_name(cluster), gpu_types=[kind])
    stack.clusters.UpsertCluster(clusters_pb2.UpsertClusterRequest(cluster=made))
    request = estimates_pb2.UpsertCellsRequest(
        parent=cluster_name(cluster), cells=[cell_of(gpus) for gpus in (1, 2, 4)]
    )
    stack.estimates.UpsertCells(request)


def find_raised(log: Iterable[str]) -> list[str]:
    """Return the last line of each traceback in a log, which names the exception.

    Log records indent theirs. Processes that die print theirs without an indent.
    """
    result, inside, indent = [], False, ""
    for line in log:
        if line.lstrip().startswith("Traceback (most recent call last)"):
            inside, indent = True, line[: len(line) - len(line.lstrip())]
        elif inside and not line.removeprefix(indent).startswith((" ", "\n")):
            result.append(line.strip())
            inside = False
    return result


@contextmanager
def filled_lab(load: float, seed: int, grace_s: float) -> Iterator[Lab]:
    """Start and fill a lab whose server has this grace, and end it at the end of the block."""
    with run_stack(settings={**SETTINGS, "TESSERA_GRACE_S": str(grace_s)}) as stack:
        lab = Lab(stack, load, seed, grace_s)
        try:
            lab.fill()
            yield lab
        finally:
            lab.close()
