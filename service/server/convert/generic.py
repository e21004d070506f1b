"""Records as messages, and the values of messages for records, by their descriptors.

A field has one name, and its type decides the rest. The moment ``create_time`` is ``created_s`` in a
record, the duration ``restart`` is ``restart_s``, and ``run_seconds`` is ``run_s``. Enums have the same
words, and nested records are nested messages. Plans of conversions are made once for each pair of types.

Callers convert what needs more than the value, such as the full name of a reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as fields_of
from enum import Enum
from functools import cache, partial
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tessera.formulation.base import limits
from tessera.formulation.base.selectors import Selector
from tessera.formulation.job.execution_plan import ExecutionPlan
from tessera.service import fields

MessageType = TypeVar("MessageType", bound=Message)
Maker = TypeVar("Maker", bound=Callable[..., Any])

Reader = Callable[[str, Any], Any]
"""A reader of a value of a message. Its first argument is the value's place in errors."""

_TIMES: Final[dict[str, tuple[Callable[[float], Message], Reader]]] = {
    "Timestamp": (fields.timestamp_of, fields.seconds_since_1970),
    "Duration": (fields.duration_of, fields.seconds_of_duration),
}


def _make_once(make: Maker) -> Maker:
    """Return a function that makes the plan of each pair of types once."""
    return cache(make)  # type: ignore[return-value] # classes can be hashed


def to_message(record: object, kind: type[MessageType], **other_fields: Any) -> MessageType:
    """Return the message of a record. ``other_fields`` are the fields that the caller has converted.

    A time or a duration is unset if it is None or infinite, or if it is 0 by default.
    """
    return kind(**_plan_writing(type(record), kind, *other_fields)(record), **other_fields)


def values_of(record: object, kind: type[Message], *excluded_fields: str) -> dict[str, Any]:
    """Return the values of the fields that a record and its message share, but for ``excluded_fields``."""
    return _plan_writing(type(record), kind, *excluded_fields)(record)


def read_values(
    place: str,
    message: Message,
    kind: type[Any],
    readers: Mapping[str, Reader | None],
) -> dict[str, Any]:
    """Return the values that a message states of some fields of a record, by the record's names.

    ``readers`` read the fields of their names, which are the API's; None takes a value as it is. An
    optional field that is unset has the record's default, as has a number of 0 whose default is
    another one.

    Raises:
        InvalidInput: names the place of a wrong value, e.g. ``job.restart``.
    """
    values = {}
    plan = _plan_reading(type(message), kind)
    for name, reader in readers.items():
        attribute, default, has_presence = plan[name]
        value = getattr(message, name)
        is_unset = not message.HasField(name) if has_presence else default and not value
        if default is not MISSING and is_unset:
            values[attribute] = default
        else:
            values[attribute] = value if reader is None else reader(f"{place}.{name}", value)
    return values


@_make_once
def _plan_reading(message: type[Message], record: type[Any]) -> dict[str, tuple[str, Any, bool]]:
    """Return a record's field, its default and whether it is optional, by the API's name."""
    by_name = message.DESCRIPTOR.fields_by_name
    return {
        name: (attribute, _default_of(record, attribute), by_name[name].has_presence)
        for name, attribute in shared_fields(message, record).items()
    }


@_make_once
def shared_fields(message: type[Message], record: type[Any]) -> dict[str, str]:
    """Return the fields that a message and a record share: the record's names by the API's."""
    attributes = {field.name for field in fields_of(record)}
    pairs = {}
    for field in message.DESCRIPTOR.fields:
        for name in _record_names(field):
            if name in attributes:
                pairs[field.name] = name
                break
    return pairs


@_make_once
def usual_readers(message: type[Message], record: type[Any]) -> dict[str, Reader | None]:
    """Return the readers of the fields that a message and a record share, by the API's names.

    They check the bounds of numbers that users state of jobs, times and selectors, and no texts.
    """
    hints = get_type_hints(record, include_extras=True)
    return {
        name: _reader_of(message.DESCRIPTOR.fields_by_name[name], hints[attribute])
        for name, attribute in shared_fields(message, record).items()
    }


@_make_once
def _plan_writing(
    record: type[Any], kind: type[Message], *excluded_fields: str
) -> Callable[[object], dict[str, Any]]:
    """Return the function that returns the values of a record for its message.

    It is compiled, since a list of 10,000 jobs has a million values.
    """
    hints = get_type_hints(record)
    lines, scope = ["def values_of(record):", "    values = {}"], dict[str, Any]()
    for name, attribute in shared_fields(kind, record).items():
        if name in excluded_fields:
            continue
        field = kind.DESCRIPTOR.fields_by_name[name]
        is_zero_unset = not field.has_presence or _default_of(record, attribute) == 0
        test = "" if is_zero_unset else " is not None"
        expression = "value"
        if write := _writer_of(field, hints[attribute]):
            scope[f"write_{name}"], expression = write, f"write_{name}(value)"
        lines.append(f"    if (value := record.{attribute}){test}: values[{name!r}] = {expression}")
    exec("\n".join([*lines, "    return values"]), scope)  # noqa: S102 - of names of our fields
    values_of: Callable[[object], dict[str, Any]] = scope["values_of"]
    return values_of


def _writer_of(field: Any, hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that converts a record's value, or None if a message takes it as it is."""
    kinds = _kinds_in(hint)
    message = field.message_type
    if message is None:
        if field.enum_type is not None:
            (words,) = (kind for kind in kinds if issubclass(kind, Enum))
            return _number_enum(field.enum_type, words).__getitem__
        return ExecutionPlan.to_json if ExecutionPlan in kinds else None
    if message.name in _TIMES:
        return partial(_write_time, _TIMES[message.name][0])
    if message.GetOptions().map_entry:
        return None if dict in kinds else dict
    (record,) = (kind for kind in kinds if is_dataclass(kind))
    kind, plan = GetMessageClass(message), _plan_writing(record, GetMessageClass(message))
    if field.is_repeated:
        return lambda values: [kind(**plan(value)) for value in values]
    return lambda value: kind(**plan(value))


def _write_time(write: Callable[[float], Message], value_s: float) -> Message | None:
    return None if math.isinf(value_s) else write(value_s)


def _number_enum(numbers: EnumDescriptor, words: type[Enum]) -> dict[Enum, int]:
    """Return the numbers of an enum's members, whose names may have a prefix in the API."""
    by_name = {value.name: value.number for value in numbers.values}
    prefix = next(iter(by_name)).partition("_")[0]
    return {word: by_name.get(word.name, by_name.get(f"{prefix}_{word.name}", 0)) for word in words}


def _reader_of(field: Any, hint: Any) -> Reader | None:
    """Return the function that reads a value of a message, or None if it is taken as it is."""
    if Selector in get_args(hint):
        return _read_selector
    if field.message_type is not None and field.message_type.name in _TIMES:
        return _TIMES[field.message_type.name][1]
    if field.is_repeated:
        return _read_map if field.message_type is not None else _read_sequence
    if bounds := limits.JOB_BOUNDS.get(field.name):
        low, high = bounds
        if field.type == field.TYPE_DOUBLE:
            return partial(fields.require_real, low=low, high=high)
        return partial(fields.require_whole, low=int(low), high=int(high))
    return None


def _read_selector(place: str, text: str) -> str:
    return str(Selector.read(place, text))


def _read_map(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(values)


def _read_sequence(place: str, values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


@_make_once
def _default_of(record: type[Any], attribute: str) -> Any:
    """Return the default of a record's field, or MISSING."""
    (field,) = (field for field in fields_of(record) if field.name == attribute)
    return field.default


def _record_names(field: Any) -> list[str]:
    """Return the names that a record may have for a field of a message."""
    stem, _, unit = field.name.rpartition("_")
    if field.message_type is not None and field.message_type.name in _TIMES:
        stem = stem if unit == "time" and stem else field.name
    elif unit != "seconds":
        return [field.name]
    return [field.name, f"{stem}_s", *(f"{stem}{ending}_s" for ending in ("d", "ed", "s"))]


def _kinds_in(hint: Any) -> list[type]:
    """Return the classes that a type consists of, e.g. X in ``tuple[X, ...] | None``."""
    if isinstance(hint, type) and not get_args(hint):
        return [hint]
    if get_origin(hint) in (dict, Mapping):
        return [dict]
    return [kind for inner in get_args(hint) for kind in _kinds_in(inner)]
