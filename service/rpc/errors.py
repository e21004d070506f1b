"""The translation of errors to gRPC: codes and google.rpc details."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tessera.formulation import errors
from tessera.formulation.secrets import hide_secrets
from tessera.solvers.base import SolverFailed

log = logging.getLogger(__name__)

DOMAIN: Final = "tessera"
"""``google.rpc.ErrorInfo.domain`` of every error; the reason is the error class's token."""

CODES: Final[dict[type[errors.TesseraError], grpc.StatusCode]] = {
    errors.TesseraError: grpc.StatusCode.INTERNAL,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestIdReused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ProblemTooLarge: grpc.StatusCode.FAILED_PRECONDITION,  # from stored values, not the caller's
    errors.InvalidCertificate: grpc.StatusCode.FAILED_PRECONDITION,  # it was stored, too
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.NoLongerKept: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.StaleEtag: grpc.StatusCode.ABORTED,
    errors.RoundSuperseded: grpc.StatusCode.ABORTED,
    errors.NotAllowed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NodeSilent: grpc.StatusCode.FAILED_PRECONDITION,
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


@contextlib.asynccontextmanager
async def translate_errors(
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
    """Return ``value`` without secrets, shortened to fit in the headers."""
    value = hide_secrets(value)
    raw = value.encode()
    if len(raw) <= _MAX_MESSAGE_BYTES:
        return value
    return raw[: _MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
