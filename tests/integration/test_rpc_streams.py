"""Streams and answers over real sockets: what clients get, how streams end, and what delays nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tessera.db.schema.engine import Database
from tessera.db.store.reads import get_node
from tessera.db.store.store import Store
from tessera.formulation.base.errors import NotAllowed, NotFound, NotMigrated, Unavailable
from tessera.formulation.base.values import Cell
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.records.access import Refusal
from tessera.formulation.records.agents import DesiredGang, DesiredState, Heartbeat, ObservedGang
from tessera.formulation.records.jobs import AllocationRecord, JobRecord, TrainingRecord
from tessera.formulation.records.logs import LogRead
from tessera.service.server.rpc.serving.answers import (
    AnswerRoom,
    BoundedAnswers,
    shorten_left_clients,
)
from tessera.service.server.rpc.serving.errors import code_of
from tessera.service.server.rpc.serving.interceptor import CallInterceptor
from tessera.service.server.security.admission import Admission
from tessera.service.server.security.auditing import RefusalRecorder
from tessera.service.server.security.authenticator import Authenticator
from tessera.service.server.security.gate import Gate
from tessera.service.server.security.sessions import Sessions
from tessera.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import until
from tests.support.job_records import a_desired_gang, a_job_record
from tests.support.logged import logged_lines
from tests.support.patience import PATIENCE_S
from tests.support.rpc import error_details, serving
from tests.support.store_double import StoreDouble
from tests.support.stored_cluster import C, a_cluster
from tests.support.unread_connections import UnreadConnection


async def _no_thread(work: Any, *args: Any) -> Any:
    return work(*args)


async def _no_jobs(cluster: str, names: Collection[str]) -> dict[str, str]:
    return {}


async def _forget(refusals: Sequence[Refusal]) -> None:
    return None


def an_open_gate() -> Gate:
    """Return a gate that asks nobody who they are."""
    return Gate(
        Authenticator(None, _no_thread, wall_s=lambda: 0.0),
        Admission(_no_jobs, calls_per_minute=0, job_bytes=2**20),
        Sessions(lambda: 0.0),
        RefusalRecorder(_forget),
        code_of,
    )


JOB = a_job_record()
GANG = a_desired_gang(
    generation=1,
    allocation=AllocationRecord(
        cell=Cell(gpu_type="a100", gpus=1, pipeline_degree=1),
        rate=8.0,
        generation=1,
        shares=(("n", (0,)),),
    ),
)
HELLO = pb.AgentMessage(
    hello=pb.Hello(
        parent="clusters/c",
        agent_id="a",
        incarnation="1",
        nodes=[pb.AgentNode(node="n", gpu_type="a100", gpus=1)],
    )
)
HEARTBEAT = pb.AgentMessage(heartbeat=pb.Heartbeat())


def an_observed_message(revision: int, *phases: pb.ObservedGang.Phase.ValueType) -> pb.AgentMessage:
    gangs = [
        pb.ObservedGang(job=f"j{i}", generation=1, node="n", phase=phase)
        for i, phase in enumerate(phases)
    ]
    return pb.AgentMessage(observed=pb.Observed(revision=revision, gangs=gangs))


class ScriptedStore(StoreDouble):
    """A store that answers as a test sets it, and records calls. It has only the methods used here."""

    def __init__(self) -> None:
        self.job = JOB
        self.gangs: tuple[DesiredGang, ...] = ()
        self.deleted: tuple[str, ...] = ()
        self.failure: Exception | None = None
        self.observations: list[tuple[int, list[str]]] = []
        self.beats = 0
        self.asked = 0  # reads of the job
        self.refusals = 0
        self.changes = False

    def ready(self) -> None:
        self._fail()

    def hello(self, *_: Any) -> None:
        self._fail()

    def record_heartbeats(self, beats: Sequence[Heartbeat]) -> set[int]:
        self._fail()
        self.beats += len(beats)
        return set(range(len(beats)))

    def record_observation(
        self, _c: str, _a: str, _i: str, gangs: tuple[ObservedGang, ...], revision: int
    ) -> bool:
        self._fail()
        self.observations.append((revision, [g.phase for g in gangs]))
        return self.changes

    def record_health(self, *_: Any) -> float:
        self._fail()
        return math.inf

    def load_desired_gangs(self, _cluster: str, _agent: str) -> DesiredState:
        self._fail()
        return DesiredState(revision=len(self.gangs), gangs=self.gangs, deleted_nodes=self.deleted)

    def find_pending(self, _cluster: str, _agent: str) -> list[LogRead]:
        return []

    def get_job(self, _cluster: str, _name: str) -> JobRecord:
        self._fail()
        self.asked += 1
        return self.job

    def _fail(self) -> None:
        if self.failure is not None:
            self.refusals += 1
            raise self.failure


@pytest.fixture
def scripted() -> ScriptedStore:
    return ScriptedStore()


def as_store(scripted: ScriptedStore) -> Store:
    return cast(Store, scripted)


class Agent:
    """An agent's end of a stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = agents_pb2_grpc.AgentsStub(channel).Sync()

    async def connect(self) -> pb.Desired:
        """Say hello, and return the first desired state."""
        await self.call.write(HELLO)
        assert (await self.read()).welcome.lease_s == 30.0
        return (await self.read()).desired

    async def read(self) -> pb.ServerMessage:
        async with asyncio.timeout(PATIENCE_S):
            message = await self.call.read()
        assert isinstance(message, pb.ServerMessage)
        return message

    async def end(self) -> grpc.aio.AioRpcError:
        """Read the rest of the stream, and return the error that ended it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream ended without an error")


def watch_job(channel: grpc.aio.Channel) -> Any:
    """Return the stream of a watcher of the job."""
    request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
    return jobs_pb2_grpc.JobsStub(channel).WatchJob(request)


async def drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_agent_is_welcomed_and_changes_are_pushed_to_agents_of_their_cluster_only(
    scripted: ScriptedStore,
) -> None:
    async with serving(as_store(scripted)) as (channel, server):
        agent = Agent(channel)
        assert not (await agent.connect()).gangs
        server.wakeups.changed("c")  # nothing has changed, so nothing is sent
        scripted.gangs = (GANG,)
        server.wakeups.changed("other")
        server.wakeups.changed("c")
        (gang,) = (await agent.read()).desired.gangs
        assert (gang.job, gang.leader, list(gang.shares[0].gpu_indices)) == ("j", "n", [0])
        scripted.deleted = ("n",)
        server.wakeups.changed("c")
        assert list((await agent.read()).desired.deleted_nodes) == ["n"]
        await agent.call.done_writing()
        assert await agent.call.read() is grpc.aio.EOF


async def test_changes_caused_by_an_observation_are_pushed_at_once(scripted: ScriptedStore) -> None:
    async with serving(as_store(scripted)) as (channel, _):
        agent = Agent(channel)
        await agent.connect()
        scripted.gangs, scripted.changes = (GANG,), True
        await agent.call.write(an_observed_message(1, pb.ObservedGang.RUNNING))
        assert (await agent.read()).desired.revision == 1
        assert scripted.observations == [(1, ["running"])]
        assert scripted.beats == 1


async def test_losing_the_store_keeps_the_stream_open_and_never_stops_the_agents_gangs(
    scripted: ScriptedStore,
) -> None:
    scripted.gangs = (GANG,)
    async with serving(as_store(scripted)) as (channel, server):
        agent = Agent(channel)
        await agent.connect()
        scripted.failure, scripted.changes = Unavailable("gone for a moment"), True
        await agent.call.write(an_observed_message(1, pb.ObservedGang.RUNNING))
        server.wakeups.changed("c")
        await until(lambda: scripted.refusals > 0)
        scripted.gangs, scripted.failure = (replace(GANG, generation=2),), None
        await agent.call.write(HEARTBEAT)
        assert (await agent.read()).desired.gangs[0].generation == 2
        assert scripted.observations == [(1, ["running"])]


async def test_agents_and_watchers_of_a_deleted_cluster_get_not_found(
    scripted: ScriptedStore,
) -> None:
    async with serving(as_store(scripted)) as (channel, server):
        agent = Agent(channel)
        await agent.connect()
        watch = watch_job(channel)
        first = await watch.read()
        assert isinstance(first, jobs_pb2.Job)
        scripted.failure = NotFound("clusters/c")
        server.wakeups.changed("c")
        error = await agent.end()
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error_details(error)[0].metadata["resource"] == "clusters/c"
        with pytest.raises(grpc.aio.AioRpcError) as watched:
            await watch.read()
        assert watched.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_agent_that_breaks_the_protocol_gets_an_explanation(
    scripted: ScriptedStore,
) -> None:
    no_incarnation = pb.AgentMessage(hello=pb.Hello(parent="clusters/c", agent_id="a"))
    unknown_phase = an_observed_message(1, pb.ObservedGang.PHASE_UNSPECIFIED)
    async with serving(as_store(scripted)) as (channel, _):
        for messages, field in (
            ([HEARTBEAT], "hello"),
            ([pb.AgentMessage(hello=pb.Hello(parent="c"))], "hello.parent"),
            ([no_incarnation], "hello.incarnation"),
            ([HELLO, HELLO], "hello"),
            ([HELLO, unknown_phase], "observed.gangs[0].phase"),
        ):
            agent = Agent(channel)
            for message in messages:
                await agent.call.write(message)
            error = await agent.end()
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_details(error)[1] == [field]


async def test_streams_end_as_unavailable_when_the_server_stops(scripted: ScriptedStore) -> None:
    async with serving(as_store(scripted)) as (channel, server):
        agent = Agent(channel)
        await agent.connect()
        watch = watch_job(channel)
        await watch.read()
        stopping = asyncio.create_task(server.stop())
        assert (await agent.end()).code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping


async def test_a_watcher_sees_progress_that_falls_and_new_facts_but_not_growing_gpu_service(
    scripted: ScriptedStore,
) -> None:
    async with serving(as_store(scripted)) as (channel, server):
        watch = watch_job(channel)
        runs = replace(JOB, state=JobState.RUNNING)
        seen: list[tuple[float, float]] = []
        for done, loss in ((45.0, None), (40.0, None), (40.0, 2.5)):
            training = None if loss is None else TrainingRecord(loss=loss)
            scripted.job = replace(runs, iterations_done=done, training=training)
            server.wakeups.changed("c")
            answer = cast(jobs_pb2.Job, await watch.read())
            if not seen and answer.state == jobs_pb2.QUEUED:  # as it was before
                answer = cast(jobs_pb2.Job, await watch.read())
            seen.append((answer.iterations_done, answer.training.loss))
        assert seen == [(45.0, 0.0), (40.0, 0.0), (40.0, 2.5)]
        before = scripted.asked
        scripted.job = replace(scripted.job, service_gpu_s=5.0)
        server.wakeups.changed("c")
        await until(lambda: scripted.asked > before)
        scripted.job = replace(scripted.job, service_gpu_s=9.0, state=JobState.SUCCEEDED)
        server.wakeups.changed("c")
        job = cast(jobs_pb2.Job, await watch.read())
        assert (job.state, job.service_gpu_seconds) == (jobs_pb2.SUCCEEDED, 9.0)


async def test_a_watcher_is_served_by_polling_if_no_notification_arrives(
    scripted: ScriptedStore,
) -> None:
    async with serving(as_store(scripted), poll_s=0.02) as (channel, _):
        watch = watch_job(channel)
        await watch.read()
        scripted.job = replace(JOB, state=JobState.CANCELLED)
        assert cast(jobs_pb2.Job, await watch.read()).state == jobs_pb2.CANCELLED


async def test_health_follows_the_state_of_the_store(scripted: ScriptedStore) -> None:
    scripted.failure = NotMigrated("run tessera migrate")
    async with serving(as_store(scripted), health_period_s=0.02) as (channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tessera.v1.Scheduler"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health.Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).GetJob(
                jobs_pb2.GetJobRequest(name="clusters/c/jobs/j")
            )
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_details(caught.value)[0].reason == "NOT_MIGRATED"
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        scripted.failure = None
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


class StuckStore(ScriptedStore):
    """A store in which every call but those of agents waits until the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.stuck = 0

    def list_jobs(self, *_: Any, **__: Any) -> tuple[list[JobRecord], int]:
        return self._wait(), 0

    def job_history(self, *_: Any) -> list[Any]:
        return self._wait()

    def _wait(self) -> list[Any]:
        self.stuck += 1
        assert self.go_on.wait(PATIENCE_S)
        return []


async def test_agents_are_served_while_other_calls_hold_every_thread() -> None:
    scripted = StuckStore()
    async with serving(as_store(scripted), store_threads=2) as (channel, _):
        jobs = jobs_pb2_grpc.JobsStub(channel)
        flood = [
            call
            for _ in range(20)
            for call in (
                jobs.ListJobEvents(jobs_pb2.ListJobEventsRequest(parent="clusters/c/jobs/j")),
                jobs.ListJobs(jobs_pb2.ListJobsRequest(parent="clusters/c", page_size=10_000)),
            )
        ]
        await until(lambda: scripted.stuck >= 2)  # one client's share of each kind
        call = agents_pb2_grpc.AgentsStub(channel).Sync()
        await call.write(HELLO)
        async with asyncio.timeout(PATIENCE_S):
            assert cast(pb.ServerMessage, await call.read()).HasField("welcome")
            await call.write(HEARTBEAT)
            await call.write(an_observed_message(1, pb.ObservedGang.RUNNING))
            await until(lambda: scripted.beats > 0 and len(scripted.observations) > 0)
        assert not any(waiting.done() for waiting in flood)
        scripted.go_on.set()
        await asyncio.gather(*flood, return_exceptions=True)
        await call.done_writing()


async def test_watches_beyond_the_limit_are_refused_until_others_end() -> None:
    scripted = ScriptedStore()
    async with serving(as_store(scripted), watches_per_client=2, poll_s=0.02) as (channel, _):
        jobs = jobs_pb2_grpc.JobsStub(channel)
        request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
        watches = [jobs.WatchJob(request) for _ in range(2)]
        for watch in watches:
            assert cast(jobs_pb2.Job, await watch.read()).state == jobs_pb2.QUEUED
        with pytest.raises(
            grpc.aio.AioRpcError, match="2 streams that watch jobs of this client"
        ) as e:
            await jobs.WatchJob(request).read()
        assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if await jobs.WatchJob(request).read():
                        break
        watches[1].cancel()


async def test_streams_of_agents_beyond_the_limit_are_refused() -> None:
    async with serving(as_store(ScriptedStore()), agent_streams=1) as (channel, _):
        stub = agents_pb2_grpc.AgentsStub(channel)
        first = stub.Sync()
        await first.write(HELLO)
        assert cast(pb.ServerMessage, await first.read()).HasField("welcome")
        # A greeting that meets the refusal would become an error of the client's own.
        second = stub.Sync()
        with pytest.raises(grpc.aio.AioRpcError, match="1 streams of agents in all are open"):
            await second.read()
        await first.done_writing()


async def test_a_stream_whose_client_does_not_read_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted = ScriptedStore()
    long = "x" * 100_000
    scripted.job = replace(JOB, last_error=long)
    settings = {"unread_s": 0.3, "poll_s": 0.01}
    async with serving(as_store(scripted), **settings) as (channel, server):
        request = jobs_pb2.WatchJobRequest(name="clusters/c/jobs/j")
        watch = jobs_pb2_grpc.JobsStub(channel).WatchJob(request)
        assert await watch.read()

        def change() -> bool:
            scripted.job = replace(JOB, last_error=long, version=scripted.asked)
            return not server.watches.taken()

        await until(change)
        with pytest.raises(grpc.aio.AioRpcError, match=r"has read no message for 0\.3 s") as ended:
            await drain(watch)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not logged_lines(caplog, "rpc_failed")


MIB = 2**20
LIST, WATCH = "/tessera.v1.Jobs/ListJobs", "/tessera.v1.Jobs/WatchJob"

LARGE = jobs_pb2.Job(name="x" * 100_000)


class LargeAnswers(jobs_pb2_grpc.JobsServicer):
    """A service whose lists have 3 MiB, and whose watches do not end until ``fails`` is set."""

    def __init__(self) -> None:
        self.listed = self.sent = self.ended = 0
        self.fails = asyncio.Event()

    async def ListJobs(self, request: Any, context: Any) -> jobs_pb2.ListJobsResponse:
        self.listed += 1
        return jobs_pb2.ListJobsResponse(next_page_token="x" * 3 * MIB)

    async def WatchJob(self, request: Any, context: Any) -> AsyncIterator[jobs_pb2.Job]:
        try:
            while True:
                self.sent += 1
                yield LARGE
                if self.fails.is_set():
                    raise NotAllowed("no longer")
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def serve_large(
    room: AnswerRoom, unread_s: float = 60.0
) -> AsyncIterator[tuple[LargeAnswers, str]]:
    servicer = LargeAnswers()  # type: ignore[abstract] # the others are never called
    server = grpc.aio.server(
        interceptors=[CallInterceptor(an_open_gate(), unread_s), BoundedAnswers(room)]
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def pump(caller: UnreadConnection) -> bool:
    caller.pump()
    return True


async def test_large_unread_answers_are_refused_beyond_a_bound() -> None:
    room = AnswerRoom(most_bytes=100 * MIB, most_bytes_per_client=10 * MIB)
    async with serve_large(room) as (servicer, address):
        caller = UnreadConnection(address, source="127.0.0.3")
        for _ in range(5):
            caller.call(LIST, b"")
        # Three answers of 3 MiB fit into 10 MiB. The others are refused, which needs no window.
        await until(lambda: pump(caller) and len(caller.open_streams) == 3)
        assert servicer.listed == 5
        assert 9 * MIB <= room.waiting_bytes <= 10 * MIB
        async with grpc.aio.insecure_channel(address) as channel:  # from 127.0.0.1
            answer = await jobs_pb2_grpc.JobsStub(channel).ListJobs(jobs_pb2.ListJobsRequest())
        assert len(answer.next_page_token) == 3 * MIB
        caller.close()
        await until(lambda: room.waiting_bytes == 0)


async def test_a_refused_answer_says_what_to_do_and_a_single_one_is_never_too_large() -> None:
    room = AnswerRoom(most_bytes=4 * MIB, most_bytes_per_client=100 * MIB)
    async with serve_large(room) as (_, address):
        caller = UnreadConnection(address, source="127.0.0.3")
        caller.call(LIST, b"")
        await until(lambda: pump(caller) and room.waiting_bytes >= 3 * MIB)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = jobs_pb2_grpc.JobsStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="ask for smaller pages") as caught:
                await stub.ListJobs(jobs_pb2.ListJobsRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        caller.close()
    room = AnswerRoom(most_bytes=1, most_bytes_per_client=1)
    async with serve_large(room) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = jobs_pb2_grpc.JobsStub(channel)
        for _ in range(3):
            answer = await stub.ListJobs(jobs_pb2.ListJobsRequest())
            assert len(answer.next_page_token) == 3 * MIB


async def test_a_client_that_disconnects_is_no_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shorten_left_clients()
    with caplog.at_level(logging.INFO):
        async with serve_large(AnswerRoom()) as (servicer, address):
            callers = [UnreadConnection(address) for _ in range(3)]
            for caller in callers:
                caller.call(WATCH, b"")
            await until(lambda: all(pump(c) and c.begun_streams for c in callers))
            for caller in callers:
                caller.close()
            await until(lambda: servicer.ended == len(callers))
        room = AnswerRoom()  # of a client that leaves before it reads an answer
        async with serve_large(room) as (_, address):
            caller = UnreadConnection(address)
            caller.call(LIST, b"")
            await until(lambda: pump(caller) and room.waiting_bytes > 0)
            caller.close()
            await until(lambda: room.waiting_bytes == 0)
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO or r.exc_info] == []


async def test_a_failing_stream_still_says_why() -> None:
    async with (
        serve_large(AnswerRoom()) as (servicer, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        answers = jobs_pb2_grpc.JobsStub(channel).WatchJob(jobs_pb2.WatchJobRequest())
        assert await answers.read() == LARGE
        servicer.fails.set()
        with pytest.raises(grpc.aio.AioRpcError, match="no longer") as caught:
            await read_to_the_end(answers)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def read_to_the_end(answers: Any) -> None:
    while await answers.read() == LARGE:
        pass


CROWDED, CALLERS = "crowded", 40


@asynccontextmanager
async def hold_cluster_row(database: Database, cluster: str) -> AsyncIterator[None]:
    """Hold a cluster's row, as a slow transaction does."""
    with database.engine.connect() as connection, connection.begin():
        lock = sa.text("SELECT 1 FROM clusters WHERE name = :name FOR UPDATE")
        await asyncio.to_thread(connection.execute, lock, {"name": cluster})
        yield


async def join_agent(channel: grpc.aio.Channel, cluster: str, node: str) -> Any:
    """Open an agent's stream, and say hello."""
    stub: Any = agents_pb2_grpc.AgentsStub(channel)
    call = stub.Sync()
    hello = agents_pb2.Hello(
        parent=f"clusters/{cluster}",
        agent_id=f"agent-{node}",
        incarnation="1",
        nodes=[agents_pb2.AgentNode(node=node, gpu_type="a100", gpus=4)],
    )
    await call.write(agents_pb2.AgentMessage(hello=hello))
    return call


@pytest.fixture
async def channel(store: Store) -> AsyncIterator[grpc.aio.Channel]:
    a_cluster(store)
    a_cluster(store, name=CROWDED)
    async with serving(store, store_threads=4, lease_s=6.0, heartbeat_s=1.0, margin_s=3.0) as (
        channel,
        _,
    ):
        yield channel


async def test_agents_waiting_for_one_cluster_cost_no_other_agent_its_lease(
    channel: grpc.aio.Channel, store: Store, database: Database
) -> None:
    async with AsyncExitStack() as left, hold_cluster_row(database, CROWDED):
        crowd = [await join_agent(channel, CROWDED, f"forged-{k}") for k in range(CALLERS)]
        for call in crowd:
            left.callback(call.cancel)
        async with asyncio.timeout(PATIENCE_S):
            call = await join_agent(channel, C, "late")
            left.callback(call.cancel)
            assert (await call.read()).HasField("welcome")
        before = await until(lambda: store.read(get_node, C, "late").silent_s)
        await until(lambda: store.read(get_node, C, "late").silent_s > before + 1.0)
        await call.write(agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(), sent_at_s=5.0))
        await until(lambda: store.read(get_node, C, "late").silent_s < before + 1.0)
