"""Clients that do not read answers: watches, agents' streams, lists and stalled connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask

from tessera.benchmarks.service.hostile.caller import AttackOrders, Caller
from tessera.benchmarks.service.hostile.requests import (
    CROWDED_CLUSTER,
    FLOODED_CLUSTER,
    GPU_TYPE,
    cluster_name,
)
from tessera.benchmarks.service.hostile.tally import CallTally, merge_tallies
from tessera.benchmarks.service.hostile.wire import (
    HEADERS,
    PREFACE,
    UnreadConnection,
    pack_frame,
    pack_settings,
)
from tessera.v1 import agents_pb2, jobs_pb2

STREAM_COUNT: Final = 100
"""The number of streams on one connection."""

HEARTBEAT_S: Final = 1.0

WATCHED_JOBS: Final = 20
"""The number of jobs that all watches share. The jobs are changed repeatedly."""

WATCH: Final = "/tessera.v1.Jobs/WatchJob"
SYNC: Final = "/tessera.v1.Agents/Sync"
LIST_JOBS: Final = "/tessera.v1.Jobs/ListJobs"
UPDATE_JOB: Final = "/tessera.v1.Jobs/UpdateJob"


def leave_unread(attack: AttackOrders) -> CallTally:
    """Open watches, agents' streams, lists and connections without reading from them."""
    caller, tally = Caller(attack, 0), CallTally()
    jobs = _first_jobs(caller)
    updates = threading.Thread(target=_keep_changing, args=(caller, jobs))
    updates.start()
    with contextlib.ExitStack() as left:
        connections = [*_open_watches(attack, jobs), *_open_lists(attack)]
        agents = list(_open_agents(attack))
        for connection in (*connections, *(connection for connection, _ in agents)):
            left.callback(connection.close)
        for half_open in _open_halves(attack):
            left.callback(half_open.close)
        _pump(attack, connections, agents)
    updates.join()
    caller.close()
    for connection in (*connections, *(connection for connection, _ in agents)):
        for _ in connection.open_streams:
            tally.record("stream", "OPEN", 0.0)
        if connection.closed:
            tally.record("connection", "ENDED_BY_SERVER", 0.0)
    return merge_tallies([caller.tally, tally])


def _first_jobs(caller: Caller) -> list[str]:
    request = jobs_pb2.ListJobsRequest(parent=cluster_name(CROWDED_CLUSTER), page_size=WATCHED_JOBS)
    answer = caller.call(LIST_JOBS, request.SerializeToString(), timeout_s=30.0)
    return [job.name for job in jobs_pb2.ListJobsResponse.FromString(answer or b"").jobs]


def _keep_changing(caller: Caller, jobs: list[str]) -> None:
    """Change the watched jobs until the attack is over, with labels that make answers long."""
    turn = 0
    while jobs and not caller.attack.is_over:
        labels = {f"label-{k}": f"{turn} ".ljust(200, "x") for k in range(60)}
        job = jobs_pb2.Job(name=jobs[turn % len(jobs)], labels=labels)
        request = jobs_pb2.UpdateJobRequest(job=job, update_mask=FieldMask(paths=["labels"]))
        caller.call(UPDATE_JOB, request.SerializeToString(), timeout_s=30.0)
        turn += 1
        time.sleep(0.05)


def _open_watches(attack: AttackOrders, jobs: list[str]) -> list[UnreadConnection]:
    connections: list[UnreadConnection] = []
    for k in range(attack.scaled(2_000, 40) if jobs else 0):
        if k % STREAM_COUNT == 0:
            connections.append(UnreadConnection(attack.address))
        request = jobs_pb2.WatchJobRequest(name=jobs[k % len(jobs)])
        connections[-1].call(WATCH, request.SerializeToString())
    return connections


def _open_lists(attack: AttackOrders) -> list[UnreadConnection]:
    """Request large pages over separate connections without reading any of them."""
    request = jobs_pb2.ListJobsRequest(parent=cluster_name(FLOODED_CLUSTER), page_size=10_000)
    connections = []
    for _ in range(attack.scaled(200, 4)):
        connection = UnreadConnection(attack.address)
        connection.call(LIST_JOBS, request.SerializeToString())
        connections.append(connection)
    return connections


def _open_agents(attack: AttackOrders) -> list[tuple[UnreadConnection, list[int]]]:
    """Pose as agents that send heartbeats but read nothing."""
    agents: list[tuple[UnreadConnection, list[int]]] = []
    for k in range(attack.scaled(500, 10)):
        if k % STREAM_COUNT == 0:
            agents.append((UnreadConnection(attack.address), []))
        name = f"forged-{attack.seed}-{k}"
        node = agents_pb2.AgentNode(node=name, gpu_type=GPU_TYPE, gpus=1)
        hello = agents_pb2.Hello(
            parent=cluster_name(FLOODED_CLUSTER), agent_id=name, incarnation="1", nodes=[node]
        )
        connection, streams = agents[-1]
        message = agents_pb2.AgentMessage(hello=hello).SerializeToString()
        streams.append(connection.call(SYNC, message, end=False))
    return agents


def _open_halves(attack: AttackOrders) -> list[socket.socket]:
    """Open connections that stop in the middle of their handshake."""
    starts = (
        b"",
        PREFACE[:10],
        PREFACE,
        PREFACE + pack_settings(0)[:5],
        PREFACE + pack_settings(65_535) + pack_frame(HEADERS, 0, 1, b"\x00"),
    )
    host, _, port = attack.address.rpartition(":")
    opened = []
    for k in range(attack.scaled(1_000, 20)):
        opened.append(socket.create_connection((host, int(port)), timeout=10))
        opened[-1].sendall(starts[k % len(starts)])
    return opened


def _pump(
    attack: AttackOrders,
    connections: list[UnreadConnection],
    agents: list[tuple[UnreadConnection, list[int]]],
) -> None:
    """Keep the connections alive until the attack is over."""
    with selectors.DefaultSelector() as ready:
        for connection in (*connections, *(connection for connection, _ in agents)):
            ready.register(connection, selectors.EVENT_READ, connection)
        next_s = time.monotonic() + HEARTBEAT_S
        while not attack.is_over:
            for key, _ in ready.select(min(0.2, max(0.0, next_s - time.monotonic()))):
                key.data.pump()
                if key.data.closed:
                    ready.unregister(key.fileobj)
            if time.monotonic() >= next_s:
                next_s += HEARTBEAT_S
                _beat(agents)


def _beat(agents: list[tuple[UnreadConnection, list[int]]]) -> None:
    message = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()).SerializeToString()
    for connection, streams in agents:
        for stream in streams:
            if stream in connection.open_streams and not connection.closed:
                connection.say(stream, message)
