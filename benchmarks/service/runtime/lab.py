"""A server with PostgreSQL and agents whose jobs really run, for benchmarks of what that costs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import psutil
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.benchmarks.service.runtime.programs import Program
from tessera.formulation.clock import SystemClock
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.formulation.launch import LaunchSpec
from tessera.formulation.records.jobs import JobSpec
from tessera.service.agent.logs import folder_of
from tessera.service.agent.runtimes.programs import LOGS
from tessera.service.cli.demo.drive import CLUSTER, PARENT, submit_jobs
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.v1 import clusters_pb2, jobs_pb2

T = TypeVar("T")

PERIOD_S: Final = 3600.0
"""Seconds between periodic rounds. None falls into the measurement, so events cause every round."""

PATIENCE_S: Final = 300.0
"""Longest time in seconds for a job's next step."""

LOOK_S: Final = 0.02
"""Seconds between two looks at a job's output. A time may be measured longer by this."""

CALL_GAP_S: Final = 0.2
"""Seconds between two calls that ask for a job's state, so that asking costs little."""

GPU_TYPE: Final = "core"
GIB: Final = 2**30
ENDLESS: Final = 1_000_000_000

HARDWARE: Final = f"""
hardware:
  - name: {GPU_TYPE}
    memory_gib: 4
    flops: {{f32: 1e11, f16: 1e11}}
    memory_bytes_per_s: 1e10
    gpus_per_node: 2
    link: pcie
    link_bytes_per_s: 1e10
    network_bytes_per_s: 1e10
"""
"""A processor core as a GPU type, with round numbers as of a data sheet. Nothing here was measured."""


@dataclass(slots=True, kw_only=True)
class ProgramAgent:
    """An agent process whose jobs really run. Closing it also ends its jobs."""

    address: str
    nodes: Sequence[tuple[str, int]]
    """The name and the number of GPUs of each node."""
    folder: Path
    python: str = sys.executable
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Start the process."""
        self.folder.mkdir(parents=True, mode=0o700)
        argv = [sys.executable, "-m", "tessera.service.agent.main", f"--server={self.address}"]
        argv += [f"--cluster={CLUSTER}", f"--data-dir={self.folder}", "--stop-on-exit"]
        argv += [f"--node={name}:{GPU_TYPE}:{gpus}" for name, gpus in self.nodes]
        argv += [f"--run-as={pwd.getpwuid(os.geteuid()).pw_name}", f"--python={self.python}"]
        with self.folder.with_suffix(".log").open("ab") as out:
            self.process = subprocess.Popen([*argv, *self.options], stdout=out, stderr=out)

    def first_iteration_s(self, job: str, generation: int) -> float:
        """Return when the first line of an iteration was in the output of a start, or 0.

        Seconds are those since 1970, by the time at which the output is seen.
        """
        folder = folder_of(self.folder / LOGS, job, generation)
        for path in folder.glob("rank-0.*.log"):
            if b"iteration " in path.read_bytes():
                return SystemClock().wall_s()
        return 0.0

    def close(self) -> None:
        """End the agent, which ends all processes that it started."""
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(children, timeout=5)
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLab:
    """A running server, and calls that the parts of the benchmark share."""

    stack: Stack
    folder: Path

    @contextmanager
    def run_agent(
        self, name: str, nodes: Sequence[tuple[str, int]], **settings: object
    ) -> Iterator[ProgramAgent]:
        """Run an agent until all of its jobs are cancelled. Its nodes are deleted at the end."""
        agent = ProgramAgent(
            address=self.stack.addresses[0],
            nodes=nodes,
            folder=self.folder / name,
            **settings,  # type: ignore[arg-type]
        )
        try:
            wanted = {f"{PARENT}/nodes/{node}" for node, _ in nodes}
            wait_for(lambda: wanted <= self._reachable(), f"the nodes of agent {name}")
            yield agent
            self._cancel_all()
        finally:
            agent.close()
        names = sorted(wanted)
        self.stack.clusters.DeleteNodes(clusters_pb2.DeleteNodesRequest(parent=PARENT, names=names))

    def _reachable(self) -> set[str]:
        request = clusters_pb2.ListNodesRequest(parent=PARENT, page_size=1000)
        nodes = self.stack.clusters.ListNodes(request).nodes
        return {n.name for n in nodes if n.state != clusters_pb2.Node.UNREACHABLE}

    def _cancel_all(self) -> None:
        live = [job.name for job in self.jobs() if not job.HasField("end_time")]
        for name in live:
            self.stack.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=name))
        wait_for(lambda: all(job.HasField("end_time") for job in self.jobs()), "jobs to end")

    def add_nodes(self, nodes: Sequence[tuple[str, int]]) -> None:
        """Create nodes, which no job can use before they have an agent."""
        rows = [
            clusters_pb2.Node(name=f"{PARENT}/nodes/{name}", gpu_type=GPU_TYPE, gpus=gpus)
            for name, gpus in nodes
        ]
        self.stack.clusters.UpsertNodes(clusters_pb2.UpsertNodesRequest(parent=PARENT, nodes=rows))

    @contextmanager
    def drained(self, node: str) -> Iterator[None]:
        """Drain a node, given by its full name, and undrain it at the end."""
        names = [node]
        self.stack.clusters.DrainNodes(
            clusters_pb2.DrainNodesRequest(parent=PARENT, names=names, reason="benchmark")
        )
        yield
        self.stack.clusters.UndrainNodes(
            clusters_pb2.UndrainNodesRequest(parent=PARENT, names=names)
        )

    def submit(self, specs: Sequence[JobSpec]) -> None:
        """Submit jobs, all in one call."""
        submit_jobs(self.stack, specs)

    def jobs(self) -> Sequence[jobs_pb2.Job]:
        """Return all jobs."""
        request = jobs_pb2.ListJobsRequest(parent=PARENT, page_size=1000)
        return self.stack.jobs.ListJobs(request).jobs

    def job(self, name: str) -> jobs_pb2.Job:
        """Return a job. Raises RuntimeError if it has failed or was rejected."""
        job = self.stack.jobs.GetJob(jobs_pb2.GetJobRequest(name=f"{PARENT}/jobs/{name}"))
        if job.state in (jobs_pb2.FAILED, jobs_pb2.REJECTED) or job.retries:
            raise RuntimeError(f"job {name} has failed: {job.last_error or job.reason.message}")
        return job

    def events(self, name: str) -> Sequence[jobs_pb2.JobEvent]:
        """Return the history of a job, oldest first."""
        request = jobs_pb2.ListJobEventsRequest(parent=f"{PARENT}/jobs/{name}")
        return self.stack.jobs.ListJobEvents(request).events

    def end(self, name: str) -> None:
        """Cancel a job, and wait until it is gone."""
        self.stack.jobs.CancelJob(jobs_pb2.CancelJobRequest(name=f"{PARENT}/jobs/{name}"))
        wait_for(lambda: self.job(name).HasField("end_time"), f"the end of {name}")


@contextmanager
def run_lab() -> Iterator[RuntimeLab]:
    """Run a server whose cluster has no nodes yet. Events cause its rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-bench-")))
        hardware = folder / "hardware.yaml"
        hardware.write_text(HARDWARE, encoding="utf-8")
        settings = {
            "TESSERA_ROUND_SPACING_S": "0.1",
            "TESSERA_ESTIMATE_PERIOD_S": "1",
            "TESSERA_HARDWARE": str(hardware),
        }
        running = stack.enter_context(run_stack(settings=settings, period_s=PERIOD_S))
        kind = clusters_pb2.GpuType(name=GPU_TYPE, memory_bytes=4 * GIB)
        cluster = clusters_pb2.Cluster(name=PARENT, gpu_types=[kind])
        running.clusters.UpsertCluster(clusters_pb2.UpsertClusterRequest(cluster=cluster))
        yield RuntimeLab(stack=running, folder=folder)


def job_spec(
    name: str,
    program: Program,
    gpus: int,
    plan: ExecutionPlan | None = None,
    arguments: Sequence[str] = (),
) -> JobSpec:
    """Return a job that runs a program on exactly ``gpus`` GPUs, until it is cancelled."""
    return JobSpec(
        name=name,
        workload=program.workload,
        iterations=ENDLESS,
        requested_gpus=gpus,
        requested_gpu_type=GPU_TYPE,
        pinned_gpu_type=True,
        min_gpus=gpus,
        max_gpus=gpus,
        command=(*program.command, *arguments),
        max_retries=0,
        plan=plan,
        launch=LaunchSpec(runtime=program.runtime),
    )


def wait_for(condition: Callable[[], T | None], what: str, every_s: float = CALL_GAP_S) -> T:
    """Wait for a condition, and return its first true value.

    Raises:
        TimeoutError: it did not come true in time.
    """
    end_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(every_s)
    return value


def seconds_of(at: Timestamp) -> float:
    """Return a time in seconds since 1970."""
    return at.ToNanoseconds() / 1e9
