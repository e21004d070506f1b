"""Hostile callers behave as described, against a small server over a real socket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tessera.benchmarks.service.forwarding import forward_from
from tessera.benchmarks.service.hostile.wire import UnreadConnection
from tests.support.agents import until

LARGE = b"x" * 100_000


class Echo(grpc.GenericRpcHandler):
    """A handler that sends large messages, and records its callers and how many it could send."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.peers: list[str] = []
        self.sent = 0
        self.ended = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, messages: AsyncIterator[bytes], context: Any) -> None:
        self.peers.append(context.peer())
        try:
            async for message in messages:
                self.received.append(message)
                await context.write(LARGE)
                self.sent += 1
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def serve_echo() -> AsyncIterator[tuple[Echo, str]]:
    echo, server = Echo(), grpc.aio.server()
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield echo, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def pump(caller: UnreadConnection) -> bool:
    """Let the caller send the replies that keep its connection alive."""
    caller.pump()
    return True


async def test_an_unread_call_reaches_the_server_and_takes_no_byte_of_its_answer() -> None:
    async with serve_echo() as (echo, address):
        caller = UnreadConnection(address, source="127.0.0.3")
        stream = caller.call("/a.B/C", b"first", end=False)
        await until(lambda: pump(caller) and echo.received == [b"first"])
        caller.say(stream, b"y" * 40_000, end=True)  # three frames
        await until(lambda: pump(caller) and len(echo.received) == 1)
        assert echo.peers[0].startswith("ipv4:127.0.0.3:")
        await until(lambda: pump(caller) and caller.begun_streams == {stream})
        assert caller.open_streams == {stream}
        assert not caller.closed
        # The answer is larger than what the server may send, so it sends nothing of it.
        assert len(caller._buffer) < len(LARGE)
        caller.close()
        await until(lambda: echo.ended == 1)


async def test_an_unread_call_notes_that_the_server_has_ended_it() -> None:
    async with serve_echo() as (echo, address):
        caller = UnreadConnection(address)
        caller.call("/a.B/C", b"first", end=False)
        await until(lambda: pump(caller) and echo.received == [b"first"])
    await until(lambda: pump(caller) and (caller.closed or not caller.open_streams))
    caller.close()


async def test_a_forwarder_carries_calls_from_another_host() -> None:
    async with serve_echo() as (echo, address):
        with forward_from("127.0.0.4", address) as forwarded:
            async with grpc.aio.insecure_channel(forwarded) as channel:
                method: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
                method = channel.stream_stream("/a.B/C")
                call = method()
                await call.write(b"hello")
                assert await call.read() == LARGE
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
        assert echo.peers[0].startswith("ipv4:127.0.0.4:")
