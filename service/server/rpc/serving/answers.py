"""Limits on the answers that wait for their client, and streams that can be ended in the meantime.

A client that does not read leaves its answer in this process's memory. A stream can leave one
message; a unary answer can be as large as the largest message.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from tessera.formulation.base.errors import TooBusy
from tessera.service.server.rpc.serving.handlers import Behaviour, rewrap_handler
from tessera.service.server.tasks.lanes import client_of

LARGE_BYTES: Final = 256 * 2**10
"""Size up to which answers are not counted: the transport takes most of these immediately."""

MAX_WAITING_BYTES: Final = 512 * 2**20
"""Largest total size of the large answers that wait for all clients."""

MAX_WAITING_BYTES_PER_CLIENT: Final = 128 * 2**20
"""Largest total size of those that wait for one host: two of the largest answers."""

GRPC_LOGGER: Final = "grpc._cython.cygrpc"
"""Name of the logger that reports, with a traceback, an answer that could not be sent after its
handler had returned.
"""


class LeftClientFilter(logging.Filter):
    """A filter that shortens the traceback of an answer whose client has left to one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record if it reports a failed batch. Keep every record."""
        if record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info, record.event = None, "rpc_left"
        return True


_LEFT_CLIENTS: Final = LeftClientFilter()


def shorten_left_clients() -> None:
    """Log one line, not a traceback, for each answer whose client has left.

    One call affects the whole process.
    """
    logging.getLogger(GRPC_LOGGER).addFilter(_LEFT_CLIENTS)


class AnswerRoom:
    """An account of the large answers that their clients have not taken yet.

    It belongs to the event loop's thread.
    """

    def __init__(
        self,
        most_bytes: int = MAX_WAITING_BYTES,
        most_bytes_per_client: int = MAX_WAITING_BYTES_PER_CLIENT,
    ) -> None:
        self._most, self._most_per_client = most_bytes, most_bytes_per_client
        self._waiting: Counter[str] = Counter()

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes of large answers that wait."""
        return self._waiting.total()

    def take(self, client: str, size: int) -> None:
        """Reserve room for an answer.

        Raises:
            TooBusy: not enough room is left.
        """
        for whose, waiting, most in (
            ("for this client", self._waiting[client], self._most_per_client),
            ("in all", self._waiting.total(), self._most),
        ):
            if waiting and waiting + size > most:
                raise TooBusy(
                    f"{waiting / 2**20:,.0f} MiB of answers are waiting {whose}, and this one"
                    f" has {size / 2**20:,.0f} MiB; read the answers, or ask for smaller pages"
                )
        self._waiting[client] += size

    def give_back(self, client: str, size: int) -> None:
        """Release the room of an answer."""
        self._waiting[client] -= size
        if not self._waiting[client]:
            del self._waiting[client]


class BoundedAnswers(grpc.aio.ServerInterceptor):
    """An interceptor that refuses large answers for which there is no room.

    It also begins each stream before its first message. grpc.aio sends a stream's initial metadata
    with its first message. While that message waits, ending the stream would send the metadata a
    second time, which fails and leaves the stream open.
    """

    def __init__(self, room: AnswerRoom) -> None:
        self._room = room

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler with limits on its answers."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        bound = partial(_bound_unary, room=self._room)
        return rewrap_handler(handler, bound, _begin_stream, handler.request_deserializer)


def _bound_unary(behaviour: Behaviour, room: AnswerRoom) -> Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        answer = await behaviour(request, context)
        size = answer.ByteSize()
        if size > LARGE_BYTES:
            client = client_of(context.peer())
            room.take(client, size)
            context.add_done_callback(lambda _: room.give_back(client, size))  # type: ignore[arg-type] # a function is fine
        return answer

    return call


def _begin_stream(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        answers = behaviour(request, context)
        if inspect.isawaitable(answers):
            await answers
            return
        async with contextlib.aclosing(answers):
            async for answer in _after_metadata(answers, context):
                yield answer

    return call


async def _after_metadata(
    answers: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncGenerator[Any]:
    """Yield the answers. Send the initial metadata before the first, and only if there is one."""
    begun = False
    async for answer in answers:
        if not begun:
            await context.send_initial_metadata(())
        begun = True
        yield answer
