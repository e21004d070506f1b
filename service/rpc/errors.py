"""The translation of errors to gRPC: codes, google.rpc details and the outermost guard."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tessera.formulation import errors
from tessera.service.rpc import names
from tessera.service.rpc.handlers import Behaviour, Parse, rewrap_handler
from tessera.service.rpc.lanes import CALLER, Share, client_of
from tessera.solvers.base import SolverFailed

log = logging.getLogger(__name__)

DOMAIN: Final = "tessera"
"""``google.rpc.ErrorInfo.domain`` of every error; the reason is the error class's token."""

CODES: Final[dict[type[errors.TesseraError], grpc.StatusCode]] = {
    errors.TesseraError: grpc.StatusCode.INTERNAL,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestIdReused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ProblemTooLarge: grpc.StatusCode.FAILED_PRECONDITION,  # from stored values, not the caller's
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.StaleEtag: grpc.StatusCode.ABORTED,
    errors.RoundSuperseded: grpc.StatusCode.ABORTED,
    errors.NotAllowed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotAuthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotMigrated: grpc.StatusCode.UNAVAILABLE,  # agents and clients wait for the upgrade
    errors.TooBusy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineTooShort: grpc.StatusCode.DEADLINE_EXCEEDED,
    SolverFailed: grpc.StatusCode.INTERNAL,
}
"""The canonical code of each error class. Other classes have the code of their nearest ancestor."""

_MAX_MESSAGE_BYTES: Final = 600
"""Largest size of a message. All details travel in HTTP/2 headers, which peers limit to 8 KiB, and
a message occurs three times in them.
"""


def code_of(error: errors.TesseraError) -> grpc.StatusCode:
    """Return the canonical code of ``error``."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def status_of(error: errors.TesseraError) -> status_pb2.Status:
    """Return ``error`` as google.rpc.Status, with ErrorInfo and, for a wrong field, BadRequest."""
    facts = {key: _short(value) for key, value in error.metadata().items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts)
    details: list[Message] = [info]
    if isinstance(error, errors.InvalidInput):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_short(error.field), description=_short(error.problem), reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    number, _ = code_of(error).value
    return status_pb2.Status(code=number, message=_short(str(error)), details=packed)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor.

    Every error leaves as a canonical code, and unexpected ones without their text. A stream ends
    when its client has not taken a message for ``unread_s``.
    """

    def __init__(self, unread_s: float = math.inf) -> None:
        self._unread_s = unread_s if math.isfinite(unread_s) else None

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler with a guard around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, parse = handler_call_details.method, handler.request_deserializer
        return rewrap_handler(
            handler,
            lambda behaviour: _guarded_unary(method, behaviour, parse),
            lambda behaviour: _guarded_stream(method, behaviour, parse, self._unread_s),
            None,
        )


def _guarded_unary(method: str, behaviour: Behaviour, parse: Parse | None) -> Behaviour:
    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _translated(method, context):
            message = _parsed(request, parse)
            _set_caller(context, message)
            return await behaviour(message, context)

    return call


def _guarded_stream(
    method: str, behaviour: Behaviour, parse: Parse | None, unread_s: float | None
) -> Behaviour:
    """Return a handler that closes the servicer's generator as soon as the call ends."""

    async def call(
        request: bytes | AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with _translated(method, context):
            if isinstance(request, bytes):
                message = _parsed(request, parse)
                _set_caller(context, message)
                answers = behaviour(message, context)
            else:
                _set_caller(context)
                answers = behaviour(_each_parsed(request, parse), context)
            if inspect.isawaitable(answers):
                await answers
                return
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await _send(context, answer, unread_s)

    return call


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


def _set_caller(
    context: grpc.aio.ServicerContext[Any, Any], request: Message | None = None
) -> None:
    """Set ``CALLER`` for this call: its client, and the cluster that its request names."""
    cluster = names.find_cluster(request) if request is not None else ""
    CALLER.set(Share(client=client_of(context.peer()), cluster=cluster))


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


@contextlib.asynccontextmanager
async def _translated(
    method: str, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    """Turn errors that are raised inside the block into an abort of the call."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except errors.TesseraError as error:
        await _abort(method, context, error)
    except grpc.aio.InternalError as error:
        _end_abandoned(method, error)
    except Exception:
        log.exception("unexpected error", extra={"action": "rpc_failed", "method": method})
        await _end(
            method,
            context,
            grpc.StatusCode.INTERNAL,
            f"internal error in {method}; the server's log has the cause",
        )


async def _abort(
    method: str, context: grpc.aio.ServicerContext[Any, Any], error: errors.TesseraError
) -> Never:
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("%s", error, exc_info=error, extra={"action": "rpc_failed", "method": method})
    else:
        log.info("%s: %s", code.name, error, extra={"action": "rpc_refused", "method": method})
    status = rpc_status.to_status(status_of(error))
    await _end(method, context, status.code, status.details, status.trailing_metadata)


async def _end(
    method: str,
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    details: str,
    metadata: Any = (),
) -> Never:
    """Abort the call. The status waits until the client has taken the message before it."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError as error:
        _end_abandoned(method, error)
    raise AssertionError("unreachable")


def _end_abandoned(method: str, error: grpc.aio.InternalError) -> Never:
    """End a call whose client left while a message was sent to it, which failed the operation."""
    log.info(
        "the client left during the call: %s", error, extra={"action": "rpc_left", "method": method}
    )
    raise asyncio.CancelledError from error


def _short(value: str) -> str:
    """Return ``value``, shortened to fit in the headers."""
    raw = value.encode()
    if len(raw) <= _MAX_MESSAGE_BYTES:
        return value
    return raw[: _MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
