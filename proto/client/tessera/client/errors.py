"""The errors of calls: a class for each kind, with the reason, the field and the details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

STATUS_KEY: Final = "grpc-status-details-bin"
"""The key of the trailing metadata in which a server sends google.rpc.Status."""

_FieldType = descriptor_pb2.FieldDescriptorProto
_TEXT, _BYTES = _FieldType.TYPE_STRING, _FieldType.TYPE_BYTES
_MESSAGE, _INT32 = _FieldType.TYPE_MESSAGE, _FieldType.TYPE_INT32
_ONE, _MANY = _FieldType.LABEL_OPTIONAL, _FieldType.LABEL_REPEATED


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field of a request that is wrong, e.g. ``job.iterations``, and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """The details of an error. Errors that do not come from Tessera's server have none.

    ``reason`` is a stable token, e.g. ``INVALID_INPUT``. ``facts`` say what the error is about,
    e.g. the ``resource`` that was not found.
    """

    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[FieldViolation] = ()


class CallError(Exception):
    """A failed call. The message says what to do.

    ``code`` is the gRPC code, ``text`` is gRPC's own description, and the other attributes are those
    of ``ErrorDetails``. ``field`` is the first wrong field, or "".
    """

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode,
        details: ErrorDetails | None = None,
        text: str = "",
    ) -> None:
        super().__init__(message)
        details = details or ErrorDetails()
        self.code, self.text = code, text
        self.reason, self.facts = details.reason, details.facts
        self.violations = tuple(details.violations)
        self.field = self.violations[0].field if self.violations else ""


class InvalidRequest(CallError):
    """A request with a wrong field; see ``field`` and ``violations``."""


class NotFound(CallError):
    """A resource does not exist, or the caller may not see it."""


class AlreadyExists(CallError):
    """A resource of this name exists."""


class Conflict(CallError):
    """Something changed meanwhile: an etag is old, or another round was committed first."""


class NotAllowed(CallError):
    """The state of the system does not allow the call."""


class NotAuthenticated(CallError):
    """The server does not know the caller: the token is missing, wrong or has expired."""


class PermissionDenied(CallError):
    """The caller's role does not allow the call."""


class LimitReached(CallError):
    """A limit is reached, or the server is too busy. Try again later."""


class DeadlineExceeded(CallError, TimeoutError):
    """The answer did not come in time."""


class Unavailable(CallError):
    """No server answers, or its database does not."""


class ServerTooOld(CallError):
    """The server does not have this call, because its release is older than this client."""


class ServerFailed(CallError):
    """The server failed. Its log has the cause."""


class JobNotSucceeded(Exception):
    """A job that was waited for has ended otherwise. ``state`` is the name of its state."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


KINDS: Final[Mapping[grpc.StatusCode, type[CallError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReached,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: ServerTooOld,
    grpc.StatusCode.INTERNAL: ServerFailed,
}
"""The class of errors with each code. Errors with other codes are ``CallError``."""


def to_error(error: grpc.RpcError, address: str, limit_s: float | None) -> CallError:
    """Return the error of a call to the server ``address`` that failed within ``limit_s`` seconds."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return CallError(str(error), grpc.StatusCode.UNKNOWN)
    code, text = error.code(), error.details() or ""
    details = read_details(error.trailing_metadata() or ())
    message = text or f"the call failed with {code.name}"
    if not details.reason and code is grpc.StatusCode.UNAVAILABLE:
        message = f"no server answers at {address} ({text.rpartition(': ')[2] or 'no answer'})"
    elif not details.reason and code is grpc.StatusCode.UNIMPLEMENTED:
        message = (
            f"the server at {address} is older than this client; upgrade it to the same release"
        )
    elif not details.reason and code is grpc.StatusCode.DEADLINE_EXCEEDED and limit_s is not None:
        message = f"{address} did not answer within {limit_s:g} s"
    return KINDS.get(code, CallError)(message, code, details, text)


def read_details(metadata: Any) -> ErrorDetails:
    """Return the details in the trailing metadata of a call, which is a sequence of pairs."""
    packed = next((value for key, value in metadata if key == STATUS_KEY), None)
    if packed is None:
        return ErrorDetails()
    status = _STATUS.FromString(packed)
    reason, facts, violations = "", dict[str, str](), list[FieldViolation]()
    for detail in status.details:
        kind = detail.type_url.rpartition("/")[2]
        if kind == "google.rpc.ErrorInfo":
            info = _ERROR_INFO.FromString(detail.value)
            reason, facts = info.reason, dict(info.metadata)
        elif kind == "google.rpc.BadRequest":
            request = _BAD_REQUEST.FromString(detail.value)
            violations += [
                FieldViolation(field=v.field, description=v.description)
                for v in request.field_violations
            ]
    return ErrorDetails(reason=reason, facts=facts, violations=tuple(violations))


def _describe_details() -> descriptor_pb2.FileDescriptorProto:
    """Return the messages of google.rpc that details need.

    They are described here, in a pool of their own, so that the client needs no other distribution.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="tessera/client/details.proto", package="google.rpc", syntax="proto3"
    )

    def add(message: Any, name: str, number: int, kind: Any, label: Any, of: str = "") -> None:
        message.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    packed = file.message_type.add(name="Packed")  # google.protobuf.Any
    add(packed, "type_url", 1, _TEXT, _ONE)
    add(packed, "value", 2, _BYTES, _ONE)
    status = file.message_type.add(name="Status")
    add(status, "code", 1, _INT32, _ONE)
    add(status, "message", 2, _TEXT, _ONE)
    add(status, "details", 3, _MESSAGE, _MANY, ".google.rpc.Packed")
    info = file.message_type.add(name="ErrorInfo")
    add(info, "reason", 1, _TEXT, _ONE)
    add(info, "domain", 2, _TEXT, _ONE)
    entry = info.nested_type.add(name="MetadataEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, _TEXT, _ONE)
    add(entry, "value", 2, _TEXT, _ONE)
    add(info, "metadata", 3, _MESSAGE, _MANY, ".google.rpc.ErrorInfo.MetadataEntry")
    bad = file.message_type.add(name="BadRequest")
    violation = bad.nested_type.add(name="FieldViolation")
    add(violation, "field", 1, _TEXT, _ONE)
    add(violation, "description", 2, _TEXT, _ONE)
    add(bad, "field_violations", 1, _MESSAGE, _MANY, ".google.rpc.BadRequest.FieldViolation")
    return file


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"google.rpc.{name}"))


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(_describe_details())
_STATUS, _ERROR_INFO, _BAD_REQUEST = map(_message_class, ("Status", "ErrorInfo", "BadRequest"))
