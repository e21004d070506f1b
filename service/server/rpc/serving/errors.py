"""The translation of errors to gRPC: codes and google.rpc details."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Never

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tessera.formulation.base import errors
from tessera.formulation.base.logs import current_ids
from tessera.formulation.base.secrets import hide_secrets
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

CALLERS_IDS: Final = ("request_id", "round")
"""The ids of log records that the caller gets in ``ErrorInfo.metadata``."""

_MAX_MESSAGE_BYTES: Final = 600
"""Largest size of a message. All details travel in HTTP/2 headers, which peers limit to 8 KiB, and
a message occurs three times in them.
"""


def code_of(error: errors.TesseraError) -> grpc.StatusCode:
    """Return the canonical code of ``error``."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def status_of(error: errors.TesseraError) -> status_pb2.Status:
    """Return ``error`` as google.rpc.Status, with ErrorInfo and, for a wrong field, BadRequest."""
    details: list[Message] = [_info(error.reason, error.metadata())]
    if isinstance(error, errors.InvalidInput):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_short(error.field), description=_short(error.problem), reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return _make_status(code_of(error), str(error), details)


def _info(reason: str, facts: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    """Return the facts of an error, with the ids under which the log has more."""
    ids = {key: str(value) for key, value in current_ids().items() if key in CALLERS_IDS}
    short = {key: _short(value) for key, value in {**ids, **facts}.items()}
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=short)


def _make_status(
    code: grpc.StatusCode, message: str, details: Sequence[Message]
) -> status_pb2.Status:
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    number, _ = code.value
    if code is grpc.StatusCode.INTERNAL and (request_id := current_ids().get("request_id")):
        ending = f"; the server's log has the cause, with request_id {request_id}"
        message = f"{_short(message, len(ending.encode()))}{ending}"
    return status_pb2.Status(code=number, message=_short(message), details=packed)


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
        await _abort(context, error)
    except grpc.aio.InternalError as error:
        _end_abandoned(error)
    except Exception as error:
        log.exception("the call failed", extra={"event": "rpc_failed", "error": error})
        code = grpc.StatusCode.INTERNAL
        details = [_info(code.name, {})]
        await _end(context, _make_status(code, f"internal error in {method}", details))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.TesseraError) -> Never:
    code = code_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error(
            "the call failed",
            exc_info=error,
            extra={"event": "rpc_failed", "error": error},
        )
    else:
        log.info(
            "the call was refused",
            extra={"event": "rpc_refused", "code": code.name, "error": error},
        )
    await _end(context, status_of(error))


async def _end(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> Never:
    """Abort the call. The status waits until the client has taken the message before it."""
    try:
        ending = rpc_status.to_status(status)
        await context.abort(ending.code, ending.details, ending.trailing_metadata)
    except grpc.aio.InternalError as error:
        _end_abandoned(error)
    raise AssertionError("unreachable")


def _end_abandoned(error: grpc.aio.InternalError) -> Never:
    """End a call whose client left while a message was sent to it, which failed the operation."""
    log.info(
        "the client left during the call",
        extra={"event": "rpc_left", "error": error},
    )
    raise asyncio.CancelledError from error


def _short(value: str, reserved_bytes: int = 0) -> str:
    """Return ``value`` without secrets, shortened to fit in the headers with what is added to it."""
    value = hide_secrets(value)
    raw = value.encode()
    most_bytes = _MAX_MESSAGE_BYTES - reserved_bytes
    if len(raw) <= most_bytes:
        return value
    return raw[: most_bytes - 3].decode(errors="ignore") + "..."
