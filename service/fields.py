"""Checks of single fields of a request. Each returns the value, or raises with the field's path."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Hashable, Iterable
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.formulation.base import limits
from tessera.formulation.base.access import IDENTITY
from tessera.formulation.base.errors import InvalidInput, StaleEtag
from tessera.formulation.records.store import Request

MAX_REQUEST_ID: Final = 64

_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799  # years 1 to 9999
_ETAG: Final = re.compile(r'"([0-9]{1,18})"')

_M = TypeVar("_M", bound=Message)


def require_whole(field: str, value: int, low: int, high: int) -> int:
    """Return ``value`` if it lies in [low, high]."""
    if not low <= value <= high:
        raise InvalidInput(field, f"must lie in {low:,} to {high:,}; it is {value:,}")
    return value


def require_real(field: str, value: float, low: float, high: float) -> float:
    """Return ``value`` if it is a finite number in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidInput(field, f"must be a number in {low:g} to {high:g}; it is {value:g}")
    return value


def require_text(field: str, value: str, most: int, *, required: bool = False) -> str:
    """Return ``value`` if it is printable and has at most ``most`` characters."""
    if required and not value:
        raise InvalidInput(field, "must not be empty")
    if len(value) > most or not value.isprintable():
        raise InvalidInput(field, f"must be at most {most} printable characters")
    return value


def require_batch_size(field: str, size: int, most: int) -> int:
    """Return ``size`` if it is an allowed number of items in one call."""
    if not 1 <= size <= most:
        raise InvalidInput(field, f"must hold 1 to {most:,} items; it holds {size:,}")
    return size


def require_distinct(fields: Iterable[tuple[str, Hashable]]) -> None:
    """Check that no two of the (field, value) pairs have the same value."""
    seen: dict[Hashable, str] = {}
    for field, value in fields:
        if (first := seen.setdefault(value, field)) is not field:
            raise InvalidInput(field, f"repeats {first}; name each only once in a call")


def etag_of(version: int) -> str:
    """Return the etag of a stored version. It is opaque to callers."""
    return f'"{version}"'


def version_of(etag: str) -> int | None:
    """Return the version of an etag, or None if no etag was sent.

    Raises:
        StaleEtag: this server never gave such an etag, so it matches nothing.
    """
    if not etag:
        return None
    if (match := _ETAG.fullmatch(etag)) is None:
        raise StaleEtag(f"etag {etag[:80]!r} matches nothing stored; read again and retry")
    return int(match[1])


def timestamp_of(seconds: float) -> Timestamp:
    """Return seconds since 1970 as a Timestamp, limited to the years 1 to 9999."""
    whole_s, nanos = _split(min(max(seconds, _FIRST_S), _LAST_S))
    return Timestamp(seconds=whole_s, nanos=nanos)


def seconds_since_1970(field: str, value: Timestamp) -> float:
    """Return a Timestamp as seconds since 1970."""
    if not (_FIRST_S <= value.seconds <= _LAST_S and 0 <= value.nanos < 10**9):
        raise InvalidInput(field, "is not a valid timestamp")
    return value.seconds + value.nanos / 1e9


def duration_of(seconds: float) -> Duration:
    """Return non-negative seconds as a Duration, limited to the longest one."""
    whole_s, nanos = _split(min(max(seconds, 0.0), limits.MAX_DURATION_S))
    return Duration(seconds=whole_s, nanos=nanos)


def seconds_of_duration(field: str, value: Duration) -> float:
    """Return a non-negative Duration as seconds."""
    if not (0 <= value.seconds <= limits.MAX_DURATION_S and 0 <= value.nanos < 10**9):
        raise InvalidInput(field, "must be a valid duration of 0 s or more")
    return value.seconds + value.nanos / 1e9


def mask_paths(field: str, mask: FieldMask, allowed: Collection[str]) -> list[str]:
    """Return the mask's paths in order, each once. ``*`` stands for all allowed paths.

    Raises:
        InvalidInput: a path that is unknown, or that callers may not change.
    """
    if list(mask.paths) == ["*"]:
        return list(allowed)
    for path in mask.paths:
        if path not in allowed:
            known = ", ".join(allowed)
            raise InvalidInput(field, f"cannot change {path[:80]!r}; it can change: {known}")
    return list(dict.fromkeys(mask.paths))


def request_key(message: _M, request_id: str) -> Request | None:
    """Return the key that makes ``message`` safe to repeat, or None if it has no request id."""
    if not request_id:
        return None
    key = require_text("request_id", request_id, MAX_REQUEST_ID)
    method = type(message).__name__.removesuffix("Request")
    digest = message_digest(message, without=("request_id",))
    if (caller := IDENTITY.get()).is_verified:  # nobody gets the answer to another's request
        proof = caller.key.partition("/")[0]  # a token and a provider may give the same name
        digest = hashlib.sha256(f"{digest} {proof} {caller.subject}".encode()).hexdigest()
    return Request(id=key, method=method, digest=digest)


def message_digest(message: _M, *, without: Collection[str]) -> str:
    """Return the SHA-256 of a message's deterministic encoding without some fields, in hex."""
    body = type(message)()
    body.CopyFrom(message)
    for name in without:
        body.ClearField(name)
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()


def _split(value: float) -> tuple[int, int]:
    whole_s = math.floor(value)
    nanos = round((value - whole_s) * 1e9)
    return (whole_s + 1, 0) if nanos == 10**9 else (whole_s, nanos)
