"""Streams of jobs on a running server, whose agents replay jobs on a faster clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

from tessera.benchmarks.schedulers.server_records import describe_server_run
from tessera.benchmarks.schedulers.stream_runs import StreamRun
from tessera.benchmarks.schedulers.streams import PERIOD_S, SPACING_S, JobStream
from tessera.benchmarks.service.agents import AgentProcess
from tessera.db.schema.engine import connect_database
from tessera.db.store.reads import list_jobs
from tessera.db.store.store import Store
from tessera.formulation.job.lifecycle import TERMINAL
from tessera.service.cli.demo.drive import add_estimates, make_cluster, submit_jobs
from tessera.service.cli.demo.stack import Stack, run_stack
from tessera.service.server.convert.rounds import of_options
from tessera.solvers.rounds.options import RoundOptions
from tessera.v1 import clusters_pb2, scheduler_pb2

CLOCK_FACTOR: Final = 30.0
"""Seconds of training in a second. The server's rounds are as much closer together."""
SERVER_SETTINGS: Final[Mapping[str, str]] = {
    "TESSERA_CLOCK_FACTOR": f"{CLOCK_FACTOR:g}",
    "TESSERA_ROUND_SPACING_S": f"{SPACING_S / CLOCK_FACTOR:g}",
    "TESSERA_FORECAST_PERIOD_S": "0",
    "TESSERA_ESTIMATE_CELLS": "false",
}
SERVER_STREAMS: Final = (
    "one-gang",
    "several-gangs",
    "every-size",
    "pinned-types",
    "any-type",
    "node-selectors",
    "fragments",
    "elastic",
    "overload",
)
"""The kinds that a server runs: jobs, nodes and exact estimates, and at most six hours."""
READY_S: Final = 120.0
"""The longest time in seconds until the agents of all clusters are ready."""
LOOK_INTERVAL_S: Final = 2.0
"""Seconds between two looks at whether a cluster's jobs have ended."""
MAX_JOBS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamServer:
    """A running server and its store. Each stream has a cluster of its own."""

    stack: Stack
    store: Store
    options: RoundOptions

    @contextmanager
    def open_cluster(self, cluster: str, stream: JobStream) -> Iterator[None]:
        """Make the cluster of a stream, and run an agent for its nodes, which are ready."""
        scenario = stream.scenario
        make_cluster(self.stack, scenario.gpu_types, scenario.nodes, cluster)
        add_estimates(self.stack, scenario.profiles, cluster)
        self._set_policy(cluster)
        agent = AgentProcess(
            address=self.stack.addresses[0],
            cluster=cluster,
            nodes=[(node.name, node.gpu_type, node.gpus) for node in scenario.nodes],
            folder=self.stack.folder / cluster,
            options=[f"--clock-factor={CLOCK_FACTOR:g}"],
        )
        try:
            self._wait_for_nodes(cluster, len(scenario.nodes))
            yield
        finally:
            agent.close()

    def play(self, cluster: str, stream: JobStream) -> None:
        """Submit each job when it arrives, and wait until all have ended or the horizon is over."""
        begin_s = time.monotonic()
        for arrival in stream.scenario.arrivals:
            due_s = begin_s + arrival.arrival_s / CLOCK_FACTOR
            time.sleep(max(0.0, due_s - time.monotonic()))
            submit_jobs(self.stack, [arrival.spec], cluster=cluster)
        end_s = begin_s + stream.conditions.horizon_s / CLOCK_FACTOR
        while time.monotonic() < end_s and not self._is_over(cluster):
            time.sleep(LOOK_INTERVAL_S)

    def _is_over(self, cluster: str) -> bool:
        records, _ = self.store.read(list_jobs, cluster, [], 0, MAX_JOBS)
        return all(record.state in TERMINAL for record in records)

    def _set_policy(self, cluster: str) -> None:
        options = replace(
            self.options,
            round_s=PERIOD_S / CLOCK_FACTOR,
            restart_horizon_s=self.options.restart_horizon_s / CLOCK_FACTOR,
            default_run_s=self.options.default_run_s / CLOCK_FACTOR,
        )
        values = {k: v for k, v in asdict(options).items() if k not in ("work", "recorded")}
        request = scheduler_pb2.SetPolicyRequest(
            parent=f"clusters/{cluster}", options=of_options(values)
        )
        self.stack.scheduler.SetPolicy(request)

    def _wait_for_nodes(self, cluster: str, count: int) -> None:
        request = clusters_pb2.ListNodesRequest(parent=f"clusters/{cluster}", page_size=1000)
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            nodes = self.stack.clusters.ListNodes(request).nodes
            if sum(node.state == clusters_pb2.Node.READY for node in nodes) == count:
                return
            time.sleep(LOOK_INTERVAL_S)
        raise TimeoutError(f"the nodes of {cluster} are not ready after {READY_S:g} s")


def run_on_server(
    streams: Mapping[str, JobStream], options: RoundOptions, database_url: str = ""
) -> dict[str, StreamRun]:
    """Run streams next to each other on one server, each on a cluster that has its name.

    Return what the store says of each. They begin once all agents are ready. Rounds are as in the
    simulator, at the faster clock. ``database_url`` is as in ``run_stack``.
    """
    ready = threading.Barrier(len(streams))
    with run_stack(
        settings=SERVER_SETTINGS, database_url=database_url, period_s=PERIOD_S / CLOCK_FACTOR
    ) as stack:
        database = connect_database(stack.database_url)
        server = StreamServer(stack=stack, store=Store(database), options=options)

        def run_one(cluster: str) -> StreamRun:
            try:
                with server.open_cluster(cluster, streams[cluster]):
                    ready.wait()
                    server.play(cluster, streams[cluster])
            except BaseException:
                ready.abort()
                raise
            return describe_server_run(
                server.store, cluster, streams[cluster], options, CLOCK_FACTOR
            )

        try:
            with ThreadPoolExecutor(len(streams)) as threads:
                return dict(zip(streams, threads.map(run_one, streams), strict=True))
        finally:
            database.engine.dispose()
