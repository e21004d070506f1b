"""The outermost interceptor: every call passes the gate here, and every error is translated."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tessera.formulation.base import errors
from tessera.formulation.base.logs import add_ids, begin_ids
from tessera.service.server.rpc.serving.errors import translate_errors
from tessera.service.server.rpc.serving.handlers import Behaviour, Parse, rewrap_handler
from tessera.service.server.security.gate import Gate, Visit
from tessera.service.server.security.roles import short_method

MAX_OPEN_BYTES: Final = 256 * 1024
"""Largest request of a method that anyone may call. An enrolment for 1,000 nodes fits."""


REQUEST_ID_KEY: Final = "x-request-id"
"""Key of a call's metadata in which its caller may name it, for logs and errors."""

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
"""The names that a call may have. Others are replaced."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor.

    Every call passes ``gate`` before its request is parsed, and once more with the request. Every
    error leaves as a canonical code, and unexpected ones without their text. A stream ends when its
    client has not taken a message for ``unread_s``.
    """

    def __init__(self, gate: Gate, unread_s: float = math.inf) -> None:
        self._gate = gate
        self._unread_s = unread_s if math.isfinite(unread_s) else None

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler with the gate and a guard around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, parse = handler_call_details.method, handler.request_deserializer
        return rewrap_handler(
            handler,
            lambda behaviour: self._guarded_unary(method, behaviour, parse),
            lambda behaviour: self._guarded_stream(method, behaviour, parse),
            None,
        )

    def _guarded_unary(self, method: str, behaviour: Behaviour, parse: Parse | None) -> Behaviour:
        async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            _begin_request(method, context)
            async with (
                translate_errors(method, context),
                self._gate.enter(method, context) as visit,
            ):
                _require_size(request, visit)
                message = _parsed(request, parse)
                _adopt_request_id(context, message)
                await visit.admit(message)
                return await behaviour(message, context)

        return call

    def _guarded_stream(self, method: str, behaviour: Behaviour, parse: Parse | None) -> Behaviour:
        """Return a handler that closes the servicer's generator as soon as the call ends."""

        async def call(
            request: bytes | AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
        ) -> None:
            _begin_request(method, context)
            async with (
                translate_errors(method, context),
                self._gate.enter(method, context) as visit,
            ):
                if isinstance(request, bytes):
                    _require_size(request, visit)
                    message = _parsed(request, parse)
                    _adopt_request_id(context, message)
                    await visit.admit(message)
                    answers = behaviour(message, context)
                else:
                    await visit.admit(None)
                    answers = behaviour(_each_parsed(request, parse), context)
                if inspect.isawaitable(answers):
                    await answers
                    return
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        await _send(context, answer, self._unread_s)

        return call


def _begin_request(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Give what is logged for the call its method and its id: that of the caller, or a new one."""
    name = _callers_request_id(context) or uuid.uuid4().hex
    begin_ids(request_id=name, method=short_method(method))


def _adopt_request_id(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    if name := _callers_request_id(context, message):
        add_ids(request_id=name)


def _callers_request_id(context: grpc.aio.ServicerContext[Any, Any], message: Any = None) -> str:
    """Return the call's name in its metadata, or else its request's own id, or else ""."""
    named = [
        str(value) for key, value in context.invocation_metadata() or () if key == REQUEST_ID_KEY
    ]
    candidates = (*named, getattr(message, "request_id", ""))
    return next((name for name in candidates if REQUEST_ID.fullmatch(name)), "")


async def _send(
    context: grpc.aio.ServicerContext[Any, Any], answer: Any, unread_s: float | None
) -> None:
    """Send one message of a stream.

    Raises:
        TooBusy: the client does not take it.
    """
    try:
        async with asyncio.timeout(unread_s):
            await context.write(answer)
    except TimeoutError:
        raise errors.TooBusy(
            f"the client of this stream has read no message for {unread_s:g} s; call again, and read the"
            " messages as they arrive"
        ) from None


def _require_size(request: bytes, visit: Visit) -> None:
    """Refuse a large request of a caller that proved nothing, before it is parsed."""
    if visit.rule.is_open and len(request) > MAX_OPEN_BYTES:
        raise errors.InvalidInput(
            "request",
            f"has {len(request):,} bytes; this method takes at most {MAX_OPEN_BYTES:,}",
        )


def _parsed(request: bytes, parse: Parse | None) -> Any:
    """Return the message that these bytes encode.

    It is parsed inside the guard, because gRPC answers INTERNAL if its own parsing fails.

    Raises:
        InvalidInput: the bytes are not such a message, or a text in it is not UTF-8.
    """
    try:
        return request if parse is None else parse(request)
    except (DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(
            "request", "is not a message of this method; use the current .proto files, and UTF-8"
        ) from error


async def _each_parsed(requests: AsyncIterator[bytes], parse: Parse | None) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request, parse)
