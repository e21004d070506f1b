"""Output of jobs, read through a replica that does not hold the stream of the node's agent."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc import StatusCode

from tessera.client import PLAIN_TEXT, open_async_channel
from tessera.db.agents.agents import load_desired_gangs
from tessera.db.agents.observe import record_observation
from tessera.db.schema.engine import Database
from tessera.db.store.store import Store
from tessera.formulation.answer.decisions import DecisionKind
from tessera.formulation.job.lifecycle import JobEvent
from tessera.formulation.records.agents import ObservedGang
from tessera.service.agent.logreads import answer_read
from tessera.service.server.rpc.serving.servicers import LOG_STREAMS_PER_CLIENT
from tessera.service.server.wiring import run_server
from tessera.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import until
from tests.support.output_files import RankFiles, rotated_output
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details
from tests.support.running_server import channel_to, settings
from tests.support.stored_cluster import (
    C,
    a_cluster,
    a_spec,
    agents_report,
    apply_event,
    commit,
    execute,
    job,
    run,
    start,
    submit,
)


class LogAgent:
    """The stream of an agent of one node of the stored cluster.

    While it is ``mute``, it answers no requests.
    """

    def __init__(self, call: Any, node: str, logs: Path) -> None:
        self._call, self.node, self.logs = call, node, logs
        self.mute = False
        self.messages = 0  # desired states
        self.asked = Counter[str]()  # how often each request was sent
        self.reads: list[pb.LogRead] = []  # each once
        self._read_ids = set[str]()
        self._writing = asyncio.Lock()  # gRPC takes one message at a time

    async def run(self) -> None:
        """Answer requests until the stream ends."""
        await self.send(pb.AgentMessage(heartbeat=pb.Heartbeat()))
        while isinstance(message := await self._call.read(), pb.ServerMessage):
            if not message.HasField("desired"):
                continue
            self.messages += 1
            for request in message.desired.log_reads:
                self.asked[request.read_id] += 1
                if request.read_id in self._read_ids:
                    continue
                self._read_ids.add(request.read_id)
                self.reads.append(request)
                if not self.mute:
                    await self.answer(request)
            await self.send(pb.AgentMessage(heartbeat=pb.Heartbeat()))

    async def answer(self, request: pb.LogRead) -> None:
        """Answer a request from the files."""
        answer = await asyncio.to_thread(answer_read, self.logs, request)
        await self.send(pb.AgentMessage(log_answer=answer))

    async def send(self, message: pb.AgentMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def is_asked(self, times: int = 1) -> pb.LogRead:
        """Wait until the agent got ``times`` requests, and return the last one."""
        await until(lambda: len(self.reads) >= times)
        return self.reads[times - 1]


@asynccontextmanager
async def log_agent(
    channel: grpc.aio.Channel, node: str, logs: Path, cluster: str = C
) -> AsyncIterator[LogAgent]:
    """Connect the agent of a node of ``tests.support.stored_cluster`` inside the block."""
    call: Any = agents_pb2_grpc.AgentsStub(channel).Sync()
    hello = pb.Hello(
        parent=f"clusters/{cluster}",
        agent_id=f"agent-{node}",
        incarnation="first",
        nodes=[pb.AgentNode(node=node, gpu_type=node.partition("-")[0], gpus=4)],
    )
    await call.write(pb.AgentMessage(hello=hello))
    assert (await call.read()).HasField("welcome")
    agent = LogAgent(call, node, logs)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        call.cancel()
        ends = (asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
        with contextlib.suppress(*ends):  # the last is for a message after the end of the stream
            await task


class OutputStream:
    """A stream of the output of a job of the stored cluster."""

    def __init__(self, channel: grpc.aio.Channel, job: str = "j", **request: Any) -> None:
        name = f"clusters/{C}/jobs/{job}"
        stub = jobs_pb2_grpc.JobsStub(channel)
        self._call: Any = stub.ReadLogs(jobs_pb2.ReadLogsRequest(name=name, **request))
        self.parts: list[jobs_pb2.ReadLogsResponse] = []

    @property
    def data(self) -> bytes:
        """Return what was read so far."""
        return b"".join(part.data for part in self.parts)

    async def next(self) -> jobs_pb2.ReadLogsResponse | None:
        """Return the next part, or None at the end. Raises AioRpcError."""
        async with asyncio.timeout(PATIENCE_S):
            part = await self._call.read()
        if not isinstance(part, jobs_pb2.ReadLogsResponse):
            return None
        self.parts.append(part)
        return part

    async def reads(self, data: bytes) -> None:
        """Read until the output is ``data``."""
        while self.data != data:
            assert data.startswith(self.data)
            assert await self.next() is not None

    async def all(self) -> bytes:
        """Read to the end, and return everything. Raises AioRpcError."""
        while await self.next() is not None:
            continue
        return self.data

    def cancel(self) -> None:
        self._call.cancel()


class Lab:
    """Two replicas on one database. Agents connect to the second, and readers to the first."""

    def __init__(
        self, store: Store, database: Database, stack: AsyncExitStack, folder: Path
    ) -> None:
        self.store, self.database, self._stack, self._folder = store, database, stack, folder
        self.near: grpc.aio.Channel
        self.far: grpc.aio.Channel

    def logs(self, node: str) -> Path:
        return self._folder / node

    async def agent(self, node: str = "a100-0") -> LogAgent:
        """Connect the agent of a node."""
        return await self._stack.enter_async_context(log_agent(self.far, node, self.logs(node)))

    def files(self, node: str = "a100-0", name: str = "j", **where: Any) -> RankFiles:
        """Return files of a job's output, with the job's number."""
        with self.database.read() as connection:
            number = connection.exec_driver_sql(
                "SELECT id FROM jobs WHERE name = %s", (name,)
            ).scalar_one()
        return RankFiles(self.logs(node), name, number=number, **where)

    def stream(self, **request: Any) -> OutputStream:
        return OutputStream(self.near, **request)

    async def refusal(self, **request: Any) -> tuple[StatusCode, str, str]:
        """Read, and return the code, the reason and the message of the error."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.stream(**request).all()
        info, _ = error_details(refused.value)
        return refused.value.code(), info.reason, refused.value.details() or ""

    def rows(self) -> int:
        """Return the number of requests in the database."""
        with self.database.read() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM log_reads").scalar_one())

    def succeed(self, name: str, node: str) -> None:
        """Let the leader report success, and the agents that the GPUs are free."""
        record = job(self.store, name)
        gang = ObservedGang(
            job=name,
            generation=record.generation,
            node=node,
            phase="succeeded",
            iterations_done=float(record.spec.iterations),
        )
        agent = f"agent-{node}"
        revision = self.store.read(load_desired_gangs, C, agent).revision
        self.store.update(record_observation, C, agent, "first", [gang], revision)
        agents_report(self.store)

    def move(self, name: str, node: str) -> None:
        """Move a job to GPU 0 of a node, with its new GPUs held."""
        snapshot = self.store.snapshot(C)
        commit(self.store, snapshot, start(snapshot, name, [(node, [0])], DecisionKind.MOVE))
        agents_report(self.store)


@pytest.fixture
async def lab(store: Store, database: Database, tmp_path: Path) -> AsyncIterator[Lab]:
    a_cluster(store)
    submit(store, a_spec("j"))
    async with AsyncExitStack() as stack:
        found = Lab(store, database, stack, tmp_path)
        config = settings(database, poll_s=0.2, heartbeat_s=0.5, estimate_cells=False)
        found.near = await stack.enter_async_context(channel_to(config))
        found.far = await stack.enter_async_context(channel_to(config))
        yield found


async def test_a_mebibyte_of_rotated_output_is_read_in_order_through_the_other_replica(
    lab: Lab,
) -> None:
    run(lab.store, j=[("a100-0", [0])])
    data = np.random.default_rng(0).bytes(2**20)
    files = lab.files()
    rotated_output(files, data, 200_000)
    files.end()
    agent = await lab.agent()
    stream = lab.stream()
    assert await stream.all() == data
    offsets = [part.offset for part in stream.parts]
    ends = [part.offset + len(part.data) for part in stream.parts]
    assert offsets == [0, *ends[:-1]]
    assert {(part.generation, part.node) for part in stream.parts} == {
        (1, f"clusters/{C}/nodes/a100-0")
    }
    assert set(agent.asked.values()) == {1}
    assert lab.rows() == 0


async def test_output_of_a_job_that_has_ended_is_read_from_any_offset_until_it_is_deleted(
    lab: Lab,
) -> None:
    run(lab.store, j=[("a100-0", [0])])
    await lab.agent()
    assert await lab.stream().all() == b""  # silence of a running rank
    files = lab.files()
    files.write(b"0123456789")
    lab.succeed("j", "a100-0")
    assert await lab.stream(follow=True).all() == b"0123456789"  # its end was never noted
    files.end()
    assert await lab.stream(offset=4).all() == b"456789"
    stream = lab.stream(offset=-3)
    assert await stream.all() == b"789"
    assert stream.parts[0].offset == 7
    shutil.rmtree(files.folder)
    code, _, details = await lab.refusal()
    assert code is StatusCode.FAILED_PRECONDITION
    assert "it wrote nothing, or its output was deleted" in details


async def test_ranks_are_nodes_and_the_launcher_is_that_of_the_first(lab: Lab) -> None:
    submit(lab.store, a_spec("wide", requested_gpus=4))
    run(lab.store, wide=[("a100-0", [0, 1]), ("a100-1", [0, 1])])
    for node, ranks in (("a100-0", ("0", "launcher-0")), ("a100-1", ("1", "launcher-1"))):
        for rank in ranks:
            lab.files(node, "wide", rank=rank).write(rank.encode())
        await lab.agent(node)
    assert await lab.stream(job="wide").all() == b"0"
    assert await lab.stream(job="wide", rank=1).all() == b"1"
    assert await lab.stream(job="wide", rank=-1).all() == b"launcher-0"
    assert await lab.stream(job="wide", rank=-(2**31)).all() == b"launcher-0"
    code, _, details = await lab.refusal(job="wide", rank=2)
    assert code is StatusCode.INVALID_ARGUMENT
    assert details.startswith("rank: must be below 2")
    assert "one for each node" in details


async def test_output_is_followed_over_a_rotation_and_a_move(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    before = lab.files()
    before.write(b"one ")
    for node in ("a100-0", "a100-1"):
        await lab.agent(node)
    stream = lab.stream(follow=True)
    await stream.reads(b"one ")
    before.write(b"two ")
    before.rotate()
    before.write(b"three ")
    await stream.reads(b"one two three ")
    lab.move("j", "a100-1")
    after = lab.files("a100-1", generation=2)
    before.write(b"stopped ")
    before.end()
    after.write(b"four ")
    await stream.reads(b"one two three stopped four ")
    assert [(p.generation, p.offset) for p in stream.parts[-2:]] == [(1, 14), (2, 0)]
    assert stream.parts[-1].node == f"clusters/{C}/nodes/a100-1"
    after.write(b"five")
    after.end()
    lab.succeed("j", "a100-1")
    assert await stream.all() == b"one two three stopped four five"
    assert await lab.stream(generation=1).all() == b"one two three stopped "


async def test_a_job_that_waits_is_followed_from_its_start(lab: Lab) -> None:
    await lab.agent()
    stream = lab.stream(follow=True)
    first = await stream.next()
    assert first == jobs_pb2.ReadLogsResponse()
    run(lab.store, j=[("a100-0", [0])])
    part = await stream.next()
    assert part is not None
    assert (part.generation, part.data) == (1, b"")  # it has written nothing yet
    files = lab.files()
    files.write(b"hello")
    await stream.reads(b"hello")
    apply_event(lab.store, "j", JobEvent.CANCEL)
    agents_report(lab.store)
    assert await stream.all() == b"hello"


async def test_a_job_that_leaves_a_lost_node_is_followed_to_the_next(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    lab.files().write(b"lost ")
    await lab.agent("a100-1")
    async with log_agent(lab.far, "a100-0", lab.logs("a100-0")):
        stream = lab.stream(follow=True)
        await stream.reads(b"lost ")
    execute(
        lab.database, "UPDATE agents SET heard_at = now() - interval '1 h' WHERE name LIKE '%0'"
    )
    assert lab.store.expire(C) == ["j"]
    run(lab.store, j=[("a100-1", [0])])
    lab.files("a100-1", generation=2).write(b"found")
    await stream.reads(b"lost found")
    stream.cancel()


async def test_what_is_not_there_is_refused_with_its_reason(lab: Lab) -> None:
    code, reason, details = await lab.refusal()
    assert (code, reason) == (StatusCode.FAILED_PRECONDITION, "NOT_ALLOWED")
    assert "has not been started yet" in details
    run(lab.store, j=[("a100-0", [0])])
    wrong: list[tuple[dict[str, Any], StatusCode, str]] = [
        ({"job": "nothing"}, StatusCode.NOT_FOUND, f"clusters/{C}/jobs/nothing does not exist"),
        ({"generation": 7}, StatusCode.INVALID_ARGUMENT, "has no start 7"),
        ({"generation": -1}, StatusCode.INVALID_ARGUMENT, "generation"),
        ({"offset": -(2**63)}, StatusCode.INVALID_ARGUMENT, "offset"),
    ]
    for request, expected, text in wrong:
        code, _, details = await lab.refusal(**request)
        assert (code, text in details) == (expected, True), details
    execute(lab.database, "UPDATE agents SET heard_at = now() - interval '40 s'")
    code, reason, details = await lab.refusal()
    assert (code, reason) == (StatusCode.FAILED_PRECONDITION, "NODE_SILENT")
    assert details.startswith("node a100-0 was last heard 40 s ago; its output is on its disk")


async def test_an_error_of_a_file_is_passed_on(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    files = lab.files()
    files.current.unlink()
    files.current.symlink_to("/etc/passwd")
    await lab.agent()
    code, _, details = await lab.refusal()
    assert code is StatusCode.FAILED_PRECONDITION
    assert details.startswith("node a100-0 cannot read this output: ")
    assert "remove it" in details


async def test_a_request_is_repeated_until_it_is_answered_and_wakes_no_one_else(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    lab.files().write(b"late")
    agent, other = await lab.agent(), await lab.agent("a100-1")
    with lab.database.read() as connection:
        revision = connection.exec_driver_sql("SELECT revision FROM clusters").scalar_one()
    agent.mute = True
    stream = lab.stream()
    waiting = asyncio.create_task(stream.all())
    request = await agent.is_asked()
    await until(lambda: agent.asked[request.read_id] >= 3)
    await agent.answer(request)
    await agent.answer(request)  # an answer may be repeated
    agent.mute = False
    assert await waiting == b"late"
    asked = agent.asked[request.read_id]
    before = agent.messages
    await until(lambda: agent.messages > before + 1)
    assert agent.asked[request.read_id] == asked
    assert not other.reads
    with lab.database.read() as connection:
        query = "SELECT revision FROM clusters"
        assert connection.exec_driver_sql(query).scalar_one() == revision
    assert lab.rows() == 0


async def test_a_reader_that_leaves_withdraws_its_request(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    agent = await lab.agent()
    agent.mute = True
    stream = lab.stream()
    waiting = asyncio.create_task(stream.all())
    await agent.is_asked()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: lab.rows() == 0)


async def test_an_agent_cannot_answer_for_another(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    lab.files().write(b"true")
    agent, liar = await lab.agent(), await lab.agent("a100-1")
    agent.mute = True
    waiting = asyncio.create_task(lab.stream().all())
    request = await agent.is_asked()
    forged = agents_pb2.LogAnswer(read_id=request.read_id, data=b"false", ended=True)
    await liar.send(agents_pb2.AgentMessage(log_answer=forged))
    beats = liar.messages
    await until(lambda: liar.messages > beats + 1)  # its answer was received
    agent.mute = False
    await agent.answer(request)
    assert await waiting == b"true"


async def test_an_answer_that_makes_no_sense_is_an_error_and_not_the_end_of_the_stream(
    lab: Lab,
) -> None:
    run(lab.store, j=[("a100-0", [0])])
    agent = await lab.agent()
    agent.mute = True
    wrong: list[dict[str, Any]] = [
        {"data": bytes(2**18 + 1)},
        {"offset": -1},
        {"offset": 2**63 - 1},
    ]
    for number, fields in enumerate(wrong, 1):
        waiting = asyncio.create_task(lab.refusal())
        request = await agent.is_asked(number)
        answer = agents_pb2.LogAnswer(read_id=request.read_id, **fields)
        await agent.send(agents_pb2.AgentMessage(log_answer=answer))
        _, _, details = await waiting
        assert "upgrade the agent" in details
    agent.mute = False
    assert await lab.stream().all() == b""


async def test_a_client_with_too_many_streams_is_refused_with_the_reason(lab: Lab) -> None:
    streams = [lab.stream(follow=True) for _ in range(LOG_STREAMS_PER_CLIENT)]
    for stream in streams:
        await stream.next()
    code, _, details = await lab.refusal()
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert f"{LOG_STREAMS_PER_CLIENT} streams of output of this client are open" in details
    for stream in streams:
        stream.cancel()


async def test_another_job_of_the_same_name_is_not_followed(lab: Lab) -> None:
    run(lab.store, j=[("a100-0", [0])])
    lab.files().write(b"mine")
    await lab.agent()
    stream = lab.stream(follow=True)
    await stream.reads(b"mine")
    lab.succeed("j", "a100-0")
    execute(lab.database, "DELETE FROM jobs")
    submit(lab.store, a_spec("j"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.all()
    assert refused.value.code() is StatusCode.NOT_FOUND
    run(lab.store, j=[("a100-0", [0])])  # its agent has not begun to write yet
    assert await lab.stream().all() == b""


async def test_a_stream_ends_when_its_replica_stops(
    lab: Lab, database: Database, store: Store
) -> None:
    run(store, j=[("a100-0", [0])])
    lab.files().write(b"before")
    await lab.agent()
    async with AsyncExitStack() as stack:
        async with run_server(settings(database, grace_s=0.5)) as port:
            channel = open_async_channel(f"127.0.0.1:{port}", PLAIN_TEXT)
            stream = OutputStream(await stack.enter_async_context(channel), follow=True)
            await stream.reads(b"before")
            rest = asyncio.create_task(stream.all())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await rest
    assert ended.value.code() is StatusCode.UNAVAILABLE
