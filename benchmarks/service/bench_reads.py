"""The reads by which users ask why and when, at many jobs, while rounds go on."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import numpy as np
import typer

from tessera.benchmarks.harness.progress import track_steps
from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.fleet import Fleet
from tessera.client import Client
from tessera.client.requests import ENDED
from tessera.estimator.samples import sample_profiles
from tessera.service.cli.demo.drive import (
    CLUSTER,
    PARENT,
    add_estimates,
    make_cluster,
    schedule_round,
    submit_jobs,
    wait_until_settled,
)
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.simulator.clusters import arena_table1
from tessera.simulator.figures import Report
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import jobs_pb2

PAGE_JOBS: Final = 100
"""Number of jobs in a page of a list: the default of the API."""

READ_PAGES: Final = 20
"""Number of pages of a list, from its first one on, among which one is read."""


def cpu_ms(pid: int) -> float:
    """Return the CPU time that a process has used so far, of all its threads, in milliseconds.

    Linux counts it in nanoseconds for each thread. Threads that have ended are missing, so the
    process must not end any while it is measured; a server keeps its threads.
    """
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


@dataclass(slots=True, kw_only=True)
class ReadTimes:
    """The measurements of one kind of read."""

    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of the table."""
        return {
            "read": name,
            "reads": len(self.cpu_ms),
            "cpu_ms_p50": statistics.median(self.cpu_ms),
            "cpu_ms_p99": percentile_99(self.cpu_ms),
            "cpu_ms_max": max(self.cpu_ms),
            "wall_ms_p50": statistics.median(self.wall_ms),
            "wall_ms_p99": percentile_99(self.wall_ms),
        }


def percentile_99(values: Sequence[float]) -> float:
    """Return the 99th percentile, which is one of the values."""
    return float(np.percentile(values, 99, method="higher"))


@contextmanager
def rounds_in_background(stack: Stack, deadline_s: float, seed: int) -> Iterator[list[Any]]:
    """Decide rounds one after another, in another thread, until the block ends.

    Yields the list of the rounds so far, and raises the error of a round that failed.
    """
    ended, decided, failures = threading.Event(), list[Any](), list[Exception]()

    def decide() -> None:
        while not ended.is_set():
            try:
                decided.append(schedule_round(stack, deadline_s, seed=seed))
            except grpc.RpcError as error:
                failures.append(error)
                return

    thread = threading.Thread(target=decide)
    thread.start()
    try:
        yield decided
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


LIVE: Final = [state for state in jobs_pb2.JobState.values() if state and state not in ENDED]
"""The states of jobs that have not ended."""


def reads_of(client: Client) -> Mapping[str, Callable[[str, int], bool]]:
    """Return the reads, by name. Each takes the name of a job and any number, for the page.

    It returns whether the answer is about the job, or has jobs in the states that were asked for.
    Perhaps no job is queued.
    """

    def list_pages(
        states: Sequence[jobs_pb2.JobState.ValueType],
    ) -> Callable[[str, int], bool]:
        tokens = page_tokens(client, states)

        def read(job: str, number: int) -> bool:
            request = jobs_pb2.ListJobsRequest(
                parent=PARENT,
                states=states,
                page_size=PAGE_JOBS,
                page_token=tokens[number % len(tokens)],
            )
            found = client.call(client.stubs.jobs.ListJobs, request).jobs
            return all(one.state in states for one in found) and bool(found or states != LIVE)

        return read

    return {
        "explain": lambda job, number: bool(client.explain(job, recorded=True).kind),
        "position": lambda job, number: client.get_job(job).forecast.position >= 0,
        "eta": lambda job, number: client.get_job(job).name.endswith(f"/{job}"),
        "queue": list_pages([jobs_pb2.QUEUED]),
        "list": list_pages(LIVE),
    }


def page_tokens(client: Client, states: Sequence[jobs_pb2.JobState.ValueType]) -> list[str]:
    """Return the tokens of the first pages of jobs in ``states``."""
    tokens = [""]
    request = jobs_pb2.ListJobsRequest(parent=PARENT, states=states, page_size=PAGE_JOBS)
    while len(tokens) < READ_PAGES:
        page = client.call(client.stubs.jobs.ListJobs, request)
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
        tokens.append(page.next_page_token)
    return tokens


@register_case(
    "reads",
    smoke={"jobs": 40, "reads": 5},
    read_cpu_ms=("<=", 30.0),
    answered=("==", True),
)
def time_reads(
    jobs: Annotated[int, typer.Option(help="Number of jobs that have not ended.")] = 50_000,
    reads: Annotated[int, typer.Option(help="Number of reads of each kind.")] = 300,
    deadline_s: Annotated[float, typer.Option(help="Deadline of each round in seconds.")] = 120.0,
    seed: int = 0,
) -> Report:
    """Time the reads of users at many jobs while rounds go on, with PostgreSQL and two servers.

    Both servers have one database. One decides rounds without a pause, and the other answers the
    reads, one after another. So all CPU time of the second process belongs to reads, with its own
    heartbeats and health checks. ``read_cpu_ms`` is the largest 99th percentile of any kind of
    read; its bound of 30 ms lets a slow core answer 33 users a second. PostgreSQL's CPU time is not in
    it; ``wall_ms`` is, as the caller waits for both.

    ``explain`` is the answer from records (``recorded_only``), ``position`` and ``eta`` read a job
    with its forecast, and ``queue`` and ``list`` a page of 100 jobs. ``answered`` says whether every
    answer was about the job, or had jobs as they were asked for. Explanations whose steps are tried
    decide rounds of all jobs, so they are no reads; `bench explain` measures them.
    """
    types, nodes = arena_table1()
    random = np.random.default_rng(seed)
    workload = [spec for _, spec in philly_like(jobs, seed)]
    settings = {"TESSERA_FORECAST_PERIOD_S": "0"}  # rounds alone keep the first server busy
    with run_stack(replicas=2, settings=settings) as stack:
        make_cluster(stack, types, nodes)
        add_estimates(stack, sample_profiles())
        submit_jobs(stack, workload)
        pid = stack.servers[1].process.pid
        with (
            Fleet(stack.addresses[0], CLUSTER, nodes, "fleet") as fleet,
            Client(stack.addresses[1], CLUSTER, settings=stack.channel) as client,
        ):
            schedule_round(stack, deadline_s, seed=seed)
            wait_until_settled(stack)
            fleet.advance(60.0)
            calls = reads_of(client)
            for call, _ in itertools.product(calls.values(), range(3)):  # connections, caches
                call(workload[0].name, 0)
            times, answered = {name: ReadTimes() for name in calls}, True
            with rounds_in_background(stack, deadline_s, seed) as decided:
                for _ in track_steps(reads, "reads"):
                    name = workload[int(random.integers(len(workload)))].name
                    number = int(random.integers(READ_PAGES))
                    for kind, call in calls.items():
                        started_s, before = time.perf_counter(), cpu_ms(pid)
                        answered &= call(name, number)
                        times[kind].cpu_ms.append(cpu_ms(pid) - before)
                        times[kind].wall_ms.append((time.perf_counter() - started_s) * 1e3)
    table = [measured.row(kind) for kind, measured in times.items()]
    return Report(
        seed=seed,
        figures={
            "read_cpu_ms": max(row["cpu_ms_p99"] for row in table),
            **{f"{row['read']}_cpu_ms": row["cpu_ms_p99"] for row in table},
            "read_wall_ms": max(row["wall_ms_p99"] for row in table),
            "rounds_meanwhile": len(decided),
            "waiting": decided[-1].waiting if decided else 0,
            "answered": answered,
        },
        table=table,
    )
