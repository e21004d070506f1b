"""Clients that do not read: their answers are bounded, and a disconnection is not an error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tessera.benchmarks.service.hostile.wire import UnreadConnection
from tessera.formulation.errors import NotAllowed
from tessera.service.rpc.answers import AnswerRoom, BoundedAnswers, shorten_left_clients
from tessera.service.rpc.interceptor import CallInterceptor
from tessera.v1 import jobs_pb2, jobs_pb2_grpc
from tests.support.agents import until
from tests.support.gates import an_open_gate

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


async def test_a_refused_answer_says_what_to_do() -> None:
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


async def test_a_single_answer_is_never_too_large_for_the_limit() -> None:
    room = AnswerRoom(most_bytes=1, most_bytes_per_client=1)
    async with (
        serve_large(room) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = jobs_pb2_grpc.JobsStub(channel)
        for _ in range(3):
            answer = await stub.ListJobs(jobs_pb2.ListJobsRequest())
            assert len(answer.next_page_token) == 3 * MIB


async def test_a_client_that_disconnects_within_a_message_is_no_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with serve_large(AnswerRoom()) as (servicer, address):
            callers = [UnreadConnection(address) for _ in range(3)]
            for caller in callers:
                caller.call(WATCH, b"")
            await until(lambda: all(pump(c) and c.begun_streams for c in callers))
            for caller in callers:
                caller.close()
            await until(lambda: servicer.ended == len(callers))
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []


async def test_a_client_that_disconnects_before_reading_an_answer_causes_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shorten_left_clients()
    room = AnswerRoom()
    with caplog.at_level(logging.INFO):
        async with serve_large(room) as (_, address):
            caller = UnreadConnection(address)
            caller.call(LIST, b"")
            await until(lambda: pump(caller) and room.waiting_bytes > 0)
            caller.close()
            await until(lambda: room.waiting_bytes == 0)
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO or r.exc_info] == []


async def test_a_stream_begins_before_the_client_can_receive_its_first_message() -> None:
    async with serve_large(AnswerRoom()) as (_, address):
        caller = UnreadConnection(address)
        caller.call(WATCH, b"")
        await until(lambda: pump(caller) and caller.begun_streams)
        caller.close()


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
