"""Callers that ask for too much do not keep others from being served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.benchmarks.service.fleet import Fleet
from tessera.estimator.samples import sample_profiles
from tessera.service.cli.demo.drive import CLUSTER, PARENT, add_estimates, make_cluster, submit_jobs
from tessera.service.cli.demo.stack import CHANNEL_OPTIONS, Stack, run_stack
from tessera.simulator.clusters import tiny_cluster
from tessera.simulator.workloads.philly_like import philly_like
from tessera.v1 import (
    clusters_pb2,
    estimates_pb2,
    jobs_pb2,
    jobs_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.support.database import a_database
from tests.support.forwarding import forward_from
from tests.support.patience import PATIENCE_S
from tests.support.sample_requests import GPU_TYPE, cell_of, cluster_name, small_job
from tests.support.system import until
from tests.support.unread_connections import UnreadConnection

JOBS = 800
"""Jobs of the crowded cluster. CP-SAT proves no answer of its rounds within minutes."""

HOSTILE_CALLS = 8
"""Concurrent dry runs, which are more than the threads for rounds."""

AN_HOUR_S = 3600.0

FAIR_OBJECTIVE = (
    "max-min within 5% then finish-time-fairness within 1% then makespan then throughput"
)


ENDLESS = (
    scheduler_pb2.RoundOptions(
        objective=FAIR_OBJECTIVE, fairness_levels=64, solver="cp-sat", gap=1e-12
    ),
    scheduler_pb2.RoundOptions(solver="cp-sat", gap=1e-12),
)
"""Options of rounds that use all the time that they have."""

OTHER = "other"

UNREAD_WATCHES = 200

STREAM_COUNT = 100
"""The number of streams on one connection."""

WATCH = "/tessera.v1.Jobs/WatchJob"


@pytest.fixture(scope="module")
def stack(server_url: str) -> Iterator[Stack]:
    """Yield a server with a crowded cluster, and with one whose client has another address."""
    types, nodes = tiny_cluster()
    profiles = sample_profiles()
    arrivals = philly_like(JOBS, seed=1, profiles=profiles)
    with (
        a_database(server_url) as database,
        run_stack(database_url=database.url) as started,
    ):
        make_cluster(started, types, nodes)
        add_estimates(started, profiles)
        make_other_cluster(started)
        with Fleet(started.addresses[0], CLUSTER, nodes, "fleet"):
            submit_jobs(started, [arrival.spec for arrival in arrivals])
            yield started


def make_other_cluster(stack: Stack) -> None:
    place = cluster_name(OTHER)
    kind = clusters_pb2.GpuType(name=GPU_TYPE, memory_bytes=48 << 30)
    cluster = clusters_pb2.Cluster(name=place, gpu_types=[kind])
    stack.clusters.UpsertCluster(clusters_pb2.UpsertClusterRequest(cluster=cluster))
    cells = estimates_pb2.UpsertCellsRequest(parent=place, cells=[cell_of(1)])
    stack.estimates.UpsertCells(cells)
    stack.jobs.SubmitJob(jobs_pb2.SubmitJobRequest(parent=place, job_id="watched", job=small_job()))


@contextmanager
def another_client(stack: Stack) -> Iterator[grpc.Channel]:
    """Yield a channel that reaches the server from another address."""
    with (
        forward_from("127.0.0.2", stack.addresses[0]) as address,
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        yield channel


class EndlessDryRuns:
    """Dry runs that take very long. An answered one is requested again until all are cancelled."""

    def __init__(self, stack: Stack) -> None:
        self._channels = [
            grpc.insecure_channel(
                stack.addresses[0],
                options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)],
            )
            for _ in range(HOSTILE_CALLS)
        ]
        self._pid = stack.servers[0].process.pid
        self._over = False
        self._before_s = self._used_s()
        self._calls = [self._ask(k) for k in range(HOSTILE_CALLS)]

    def __enter__(self) -> EndlessDryRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for call in self._calls:
            call.cancel()
        for channel in self._channels:
            channel.close()

    def wait_until_they_compute(self) -> None:
        """Wait until the server has worked on the dry runs for a second."""
        until(lambda: self._used_s() > self._before_s + 1.0, "the server decides rounds")

    def outstanding(self) -> int:
        """Return the number of calls that wait for their answer."""
        return sum(not call.done() for call in self._calls)

    def _used_s(self) -> float:
        server = psutil.Process(self._pid)
        processes = (server, *server.children(recursive=True))
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def _ask(self, k: int) -> Any:
        request = scheduler_pb2.ScheduleRequest(
            parent=PARENT,
            options=ENDLESS[k % len(ENDLESS)],
            dry_run=True,
            summary_only=True,
        )
        stub = scheduler_pb2_grpc.SchedulerStub(self._channels[k])
        call = stub.Schedule.future(request, timeout=AN_HOUR_S)
        call.add_done_callback(lambda _: self._ask_again(k))
        return call

    def _ask_again(self, k: int) -> None:
        if not self._over:
            self._calls[k] = self._ask(k)


def test_other_clusters_get_rounds_and_health_checks_while_dry_runs_hold_the_threads(
    stack: Stack,
) -> None:
    request = scheduler_pb2.ScheduleRequest(parent=cluster_name(OTHER))
    with another_client(stack) as channel, EndlessDryRuns(stack) as hostile:
        scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        hostile.wait_until_they_compute()
        for _ in range(3):
            assert scheduler.Schedule(request, timeout=PATIENCE_S).outcome == "committed"
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert hostile.outstanding() >= HOSTILE_CALLS // 2
    quick = scheduler_pb2.RoundOptions(solver="greedy")
    after = scheduler_pb2.ScheduleRequest(parent=PARENT, dry_run=True, options=quick)
    answer = stack.scheduler.Schedule(after, timeout=PATIENCE_S)
    assert answer.outcome == "dry_run"  # callers that have left hold no thread


def test_unread_watches_do_not_delay_changes_for_another_watcher(stack: Stack) -> None:
    name = f"{cluster_name(OTHER)}/jobs/watched"
    watch = jobs_pb2.WatchJobRequest(name=name)
    connections = [
        UnreadConnection(stack.addresses[0], source="127.0.0.3")
        for _ in range(UNREAD_WATCHES // STREAM_COUNT)
    ]
    for connection in connections:
        for _ in range(STREAM_COUNT):
            connection.call(WATCH, watch.SerializeToString())

    def begun() -> int:
        for connection in connections:
            connection.pump()
        return sum(len(connection.begun_streams) for connection in connections)

    until(lambda: begun() == UNREAD_WATCHES, "all watches have begun")
    with another_client(stack) as channel, ThreadPoolExecutor(1) as reader:
        stub = jobs_pb2_grpc.JobsStub(channel)
        answers = stub.WatchJob(watch, timeout=PATIENCE_S)
        next(answers)
        for turn in ("one", "two", "three"):
            job = jobs_pb2.Job(name=name, labels={"turn": turn})
            update = jobs_pb2.UpdateJobRequest(job=job, update_mask=FieldMask(paths=["labels"]))
            stack.jobs.UpdateJob(update, timeout=PATIENCE_S)
            answer = reader.submit(read_until, answers, turn)
            assert answer.result(PATIENCE_S).labels == {"turn": turn}
        answers.cancel()
    assert begun() == UNREAD_WATCHES
    assert all(len(connection.open_streams) == STREAM_COUNT for connection in connections)
    for connection in connections:
        connection.close()


def read_until(answers: Iterator[jobs_pb2.Job], turn: str) -> jobs_pb2.Job:
    """Read a watch until the job has this label."""
    return next(job for job in answers if job.labels["turn"] == turn)
