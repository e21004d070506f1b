"""A cluster whose agents really run programs, and helpers for what the programs leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.db.schema import embedded
from tessera.db.schema.engine import connect_database
from tessera.formulation.base.values import Cell, EstimateSource
from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtimes import COMMAND
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.records.jobs import JobSpec
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.service.server.convert import estimate_to_proto, job_spec_to_proto
from tessera.v1 import clusters_pb2, estimates_pb2, jobs_pb2
from tests.support.invariants import find_broken_rules
from tests.support.programs import own_user
from tests.support.system import Agent, Lab, User, kill_postgres, until, workload

HOUR_S = 3600.0

TRAINING_SETTINGS = {
    "TESSERA_LEASE_S": "30",
    "TESSERA_MARGIN_S": "5",
    "TESSERA_HEARTBEAT_S": "0.5",
    "TESSERA_INSPECT_S": "0.3",
    "TESSERA_HEALTH_PERIOD_S": "0.5",
    "TESSERA_ROUND_SPACING_S": "0.1",
    "TESSERA_ROUND_THREADS": "1",
}
"""Settings of servers whose rounds follow events at once. No lease ends on a busy machine."""


class TrainingLab(Lab):
    """A test's own cluster, whose agents run programs. Jobs on 2 GPUs may be on two nodes."""

    def __init__(self, stack: Stack, user: User, cluster: str) -> None:
        super().__init__(stack, user, cluster)
        wide = EstimateRecord(
            workload=workload(2),
            cell=Cell(gpu_type="a40", gpus=2, pipeline_degree=1, nodes=2),
            iter_time_s=1.0,
            source=EstimateSource.MEASURED,
        )
        cells = estimates_pb2.UpsertCellsRequest(
            parent=self.parent, cells=[estimate_to_proto(wide)]
        )
        user.insist(lambda r: r.estimates.UpsertCells(cells))

    def program_agent(
        self,
        node: str,
        gpus: int,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        **settings: float,
    ) -> Agent:
        """Start an agent that runs programs as the present user."""
        own = ("--clock-factor=1", f"--run-as={own_user()}", f"--python={sys.executable}")
        return self.agent((node, gpus), flags=(*own, *flags), environment=environment, **settings)

    def train(
        self,
        name: str,
        command: Sequence[str],
        *,
        gpus: int = 1,
        iterations: int = 10,
        launch: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Submit a job that runs ``command`` on each of its nodes."""
        values: dict[str, Any] = {"runtime": COMMAND, "stop_grace_s": HOUR_S, **(launch or {})}
        spec = JobSpec(
            name="",
            workload=workload(gpus),
            iterations=iterations,
            requested_gpus=gpus,
            restart_s=0.0,
            command=tuple(command),
            launch=LaunchSpec(**values),
            **fields,
        )
        request = jobs_pb2.SubmitJobRequest(
            parent=self.parent, job_id=name, job=job_spec_to_proto("", spec)
        )
        self.user.insist(lambda r: r.jobs.SubmitJob(request))

    def hold(self, name: str) -> None:
        """Take a job's GPUs away, and wait until no process of it is left."""
        request = jobs_pb2.HoldJobRequest(name=f"{self.parent}/jobs/{name}")
        self.user.insist(lambda r: r.jobs.HoldJob(request))
        self.wait_for_state(name, jobs_pb2.HELD)

    def release(self, name: str) -> None:
        """Let a held job run. This also ends the wait after a failure."""
        request = jobs_pb2.ReleaseJobRequest(name=f"{self.parent}/jobs/{name}")
        self.user.insist(lambda r: r.jobs.ReleaseJob(request))

    def cancel(self, job: str) -> None:
        """Cancel a job, given by its full name."""
        request = jobs_pb2.CancelJobRequest(name=job)
        self.user.insist(lambda r: r.jobs.CancelJob(request))

    def wait_for_failure(self, name: str, failures: int = 1) -> jobs_pb2.Job:
        """Wait until a job that has failed this often waits for its next attempt."""

        def failed() -> jobs_pb2.Job | None:
            job = self.job(name)
            waits = job.state == jobs_pb2.QUEUED and job.HasField("retry_time")
            return job if waits and job.retries >= failures else None

        return until(failed, f"{name} has failed {failures} times")

    def try_again(self, name: str) -> None:
        """Let a job that has failed run at once."""
        self.hold(name)
        self.release(name)

    def drain(self, node: str) -> None:
        names = [f"{self.parent}/nodes/{node}"]
        request = clusters_pb2.DrainNodesRequest(parent=self.parent, names=names)
        self.user.insist(lambda r: r.clusters.DrainNodes(request))

    def undrain(self, node: str) -> None:
        names = [f"{self.parent}/nodes/{node}"]
        request = clusters_pb2.UndrainNodesRequest(parent=self.parent, names=names)
        self.user.insist(lambda r: r.clusters.UndrainNodes(request))

    def store(self, name: str) -> Path:
        """Return the directory of a job's checkpoints."""
        return self.checkpoints / self.cluster / f"job-{name}"

    def files(self, name: str) -> Path:
        """Return the directory that all generations of a job share."""
        return self.store(name) / "files"

    def listed(self, name: str) -> list[int]:
        """Return the iterations of a job's listed checkpoints, the newest first."""
        path = self.store(name) / "checkpoints.json"
        rows = json.loads(path.read_text())["checkpoints"] if path.exists() else []
        return [row["iterations"] for row in rows]

    def kill_database(self) -> None:
        """Kill PostgreSQL, and start it again."""
        folder = self.stack.folder / "pg"
        kill_postgres(folder)
        embedded.start_server(folder)

    def broken_rules(self) -> list[str]:
        """Return the rules about stored data that are broken now."""
        database = connect_database(self.stack.database_url)
        try:
            return find_broken_rules(database)
        finally:
            database.engine.dispose()

    def wait_until_free(self) -> None:
        """Wait until all GPUs of ready nodes are free, and no agent has a gang."""

        def is_free() -> bool:
            return not any(node.jobs for node in self.nodes().values())

        until(is_free, "all GPUs are free")
        for agent in self.agents:
            agent.wait_for_gangs([])


@contextmanager
def run_training_lab(cluster: str, **settings: str) -> Iterator[TrainingLab]:
    """Run a server, and yield a cluster on it. ``settings`` are variables of the server."""
    with (
        run_stack(settings=TRAINING_SETTINGS | settings, period_s=HOUR_S) as stack,
        User(stack) as user,
        TrainingLab(stack, user, cluster) as lab,
    ):
        yield lab


def keeper_of(agent: Agent, name: str, generation: int, *, leads: bool) -> int:
    """Return the id of a keeper, or 0 if this agent has none in that role."""
    gang = agent.folder / "gangs" / f"{name}@{generation}"
    paths = [gang / "process.json"] if leads else list(gang.glob("member-*/process.json"))
    for path in paths:
        try:
            return int(json.loads(path.read_text())["pid"])
        except FileNotFoundError:  # it is just being removed, or not there yet
            continue
    return 0


def processes_of(name: str, mark: str) -> list[int]:
    """Return the living keepers of a job, and programs with ``mark`` in their environment."""
    return sorted({*_keepers(name), *_programs(mark)})


def _keepers(name: str) -> Iterator[int]:
    for pid in _pids():
        try:
            errors = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:  # it has ended, or belongs to another user
            continue
        if f"/gangs/{name}@" in errors:
            yield pid


def _programs(mark: str) -> Iterator[int]:
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0"):
            yield pid


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
