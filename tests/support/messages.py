"""Hostile messages: random fields, valid messages with broken fields, and broken bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

M = TypeVar("M", bound=Message)
Rng = np.random.Generator

DEPTH: Final = 6
"""Largest depth of nested messages."""

TEXTS: Final = (
    "",
    "x",
    "\0",
    "a\0b",
    "\ud7ff\ue000",
    "\u202e\u0301",
    "clusters/c",
    "clusters/d",
    "clusters/",
    "clusters/c/jobs/j",
    "clusters/c/jobs/missing",
    "clusters/c/nodes/n1",
    "clusters/c/rounds/1",
    "clusters/c/rounds/999999999999999999",
    "clusters/c/tenants/t",
    "clusters/c/topology",
    "clusters/c/networkPlans/-",
    "clusters/../c",
    "clusters/c\0/jobs/j",
    "'; DROP TABLE jobs; --",
    "-1",
    "1e999",
    "NaN",
    "null",
    "[]",
    "{}",
    "{a: &a [1], b: *a}",
    "[" * 10_000,
    "9" * 10_000,
    "a100",
    "h100",
    '"1"',
    '"99"',
    '"999999999999999999"',
    '"9999999999999999999"',
    "bert",
    "1.3B",
    "throughput",
    "max-min",
    "0*throughput",
    "1e308*jct + 1e308*cost",
    "jct then " * 50 + "jct",
    "fcfs",
    "greedy",
    "1:4,2:1",
    "*",
    "weight",
    "%s%n",
    "deadline",
    "MF8iLCJ4Il0",
    "WyIxIiwieCJd",
    "x" * 1001,
    "y" * 70_000,
    "\u00e9" * 200,
    "/" * 300,
    " ",
    "\n",
)
"""Names, tokens, etags, options and documents, valid and invalid."""

REALS: Final = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    5e-324,
    -5e-324,
    1e-9,
    1e9,
    1e15,
    1e18,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)

_BITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_WHOLE: Final = (
    0,
    1,
    2,
    3,
    8,
    100,
    10**4,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    10**12,
    2**53,
    10**18,
    253_402_300_799,
    253_402_300_800,
    315_576_000_000,
    2**63 - 1,
    2**64 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
)


def pick(rng: Rng, among: Sequence[Any]) -> Any:
    """Return a random element of a sequence."""
    return among[int(rng.integers(len(among)))]


def random_message(kind: Descriptor, rng: Rng, depth: int = DEPTH) -> Message:
    """Return a message with about half of its fields set to anything."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if rng.random() < 0.5:
            set_anything(message, field, rng, depth - 1)
    return message


def mutate(message: M, rng: Rng, most: int = 3) -> M:
    """Return a copy with one to ``most`` fields, at any depth, cleared or set to anything."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(int(rng.integers(1, most + 1))):
        inside: Message = copy
        while (parts := _parts(inside)) and rng.random() < 0.75:
            inside = pick(rng, parts)
        if not inside.DESCRIPTOR.fields:
            continue
        field = pick(rng, inside.DESCRIPTOR.fields)
        if rng.random() < 0.2:
            inside.ClearField(field.name)
        else:
            set_anything(inside, field, rng, 2)
    return copy


def broken_bytes(message: Message, rng: Rng) -> bytes:
    """Return the message's bytes with a few changed, cut off or added."""
    raw = bytearray(message.SerializeToString())
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(len(raw) + 1))
        match int(rng.integers(3)):
            case 0 if at < len(raw):
                raw[at] = int(rng.integers(256))
            case 1:
                raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                del raw[at:]
    return bytes(raw)


def set_text(message: Any, path: Sequence[FieldDescriptor], text: str) -> None:
    """Set the text at the end of a path, and make the messages on the way."""
    *outer, last = path
    for field in outer:
        held = getattr(message, field.name)
        message = held.add() if field.is_repeated else held
        if not field.is_repeated:
            message.SetInParent()
    if last.is_repeated:
        getattr(message, last.name).append(text)
    else:
        setattr(message, last.name, text)


def set_anything(message: Message, field: FieldDescriptor, rng: Rng, depth: int) -> None:
    """Set a field to any value of its type, or to a message while ``depth`` is left."""
    kind = field.message_type
    if kind is not None and depth < 0:
        return
    many = pick(rng, (0, 1, 1, 2, 3, 40)) if field.is_repeated else 1
    if not field.is_repeated and kind is None:
        setattr(message, field.name, _scalar(field, rng))
        return
    message.ClearField(field.name)
    held = getattr(message, field.name)
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        for _ in range(many):
            if value.message_type is None:
                held[_scalar(key, rng)] = _scalar(value, rng)
    elif field.is_repeated and kind is None:
        held.extend(_scalar(field, rng) for _ in range(many))
    elif kind is not None and field.is_repeated:
        one = random_message(kind, rng, depth)
        held.extend(one if i % 2 else random_message(kind, rng, depth) for i in range(many))
    elif kind is not None:
        held.CopyFrom(random_message(kind, rng, depth))


def _parts(message: Message) -> list[Message]:
    """Return the messages inside a message."""
    parts: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        parts += list(value) if field.is_repeated else [value]
    return parts


def _scalar(field: FieldDescriptor, rng: Rng) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = pick(rng, TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(rng.integers(2))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return pick(rng, REALS)
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None and rng.random() < 0.7:
            return pick(rng, [value.number for value in field.enum_type.values])
    low, high = _BITS[field.cpp_type]
    return pick(rng, [value for value in _WHOLE if low <= value <= high])
