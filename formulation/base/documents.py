"""Limits for each kind of document from outside, checked before anything is built.

JSON is read here. ``tessera.estimator.files.documents`` reads YAML within the same limits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tessera.formulation.base.errors import InvalidInput

MAX_NUMBER_CHARS: Final = 40
"""Characters of one number. No quantity here needs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLimits:
    """The sizes that a document of one kind may have."""

    size_bytes: int
    depth: int
    """Nesting depth of lists and mappings."""
    nodes: int
    """Keys and values together. Lists and mappings are values, too."""
    text: int = 65_536
    """Characters of one key or value."""
    yaml_bytes: int = 2**31
    """Bytes of a YAML text, which takes fifty times as long to read as JSON."""


ARCHITECTURE: Final = DocumentLimits(size_bytes=2**20, depth=16, nodes=100_000)
"""A model. Configurations of image classifiers name tens of thousands of labels."""
TOPOLOGY: Final = DocumentLimits(
    size_bytes=16 * 2**20, depth=8, nodes=2_000_000, text=1000, yaml_bytes=2**20
)
"""A network of up to a hundred thousand links, written one by one."""
POLICY: Final = DocumentLimits(size_bytes=65_536, depth=4, nodes=1000)
"""The options of a round."""
CLUSTER_FILE: Final = DocumentLimits(size_bytes=16 * 2**20, depth=16, nodes=1_000_000)
"""A cluster, jobs or tenants: up to ten thousand jobs."""
HARDWARE: Final = DocumentLimits(size_bytes=2**20, depth=8, nodes=20_000, text=1000)
"""The user's own GPU types."""
TABLE_ROW: Final = DocumentLimits(size_bytes=2**20, depth=16, nodes=100_000)
"""A line of a file of records, such as measured layers."""
NODE_LIST: Final = DocumentLimits(size_bytes=2**20, depth=4, nodes=100_000, text=1000)
"""The nodes of an agent, or the settings that its network is to be given."""
EXECUTION_PLAN: Final = DocumentLimits(size_bytes=2**18, depth=4, nodes=20_000, text=1000)
"""An execution plan with up to a thousand stages."""
STATED_PLAN: Final = DocumentLimits(size_bytes=65_536, depth=12, nodes=5000)
"""A file of a training runtime that states an execution plan."""
CELL_TRAFFIC: Final = DocumentLimits(size_bytes=2**20, depth=8, nodes=100_000, text=1000)
"""The traffic of a Cell with up to a thousand stages."""
SNAPSHOT: Final = DocumentLimits(size_bytes=2**31, depth=32, nodes=2**31, text=2**31)
"""A stored round. It is large by its nature, so only its depth and its numbers are limited."""

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SOME_STRINGS: Final = re.compile(
    rb'(?:[^"]*+"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)){1,5000}', re.DOTALL
)
"""The text up to the end of the next 5000 strings at most.

This is as much as is scanned without a pause for other threads.
"""
_LONG_NUMBER: Final = re.compile(rb"[-+.0-9eE]{%d}" % (MAX_NUMBER_CHARS + 1))
_SUSPECT: Final = re.compile(rb"\\u|N|I|[eE]\+?0*[1-9][0-9]{2}")
"""A text without a match holds no NUL, no surrogate and no number that is not finite."""
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_NO_CHARACTER: Final = re.compile("[\0\ud800-\udfff]")


class NotJson(InvalidInput):
    """An error for a text that is not JSON. It may be in another format."""


def read_json(field: str, text: str | bytes, limits: DocumentLimits) -> Any:
    """Return the value of a JSON text.

    Raises:
        NotJson: it is not JSON.
            InvalidInput: it is beyond the limits, names a key twice, or holds a number that is not
                finite or half of a character. The error names ``field``.
    """
    raw = to_utf8(field, text, limits)
    longest = _check_structure(field, raw, limits)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(mapping := dict(pairs)) == len(pairs):
            return mapping
        keys = [key for key, _ in pairs]
        repeated = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise InvalidInput(field, f"the key {repeated[:80]!r} occurs twice; name it once")

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise NotJson(field, f"is not JSON: {error}") from error
    if longest > limits.text or _SUSPECT.search(raw):
        for path, scalar in _scalars(value):
            check_scalar(field, path, scalar, limits)
    return value


def to_utf8(field: str, text: str | bytes, limits: DocumentLimits) -> bytes:
    """Return the text in UTF-8.

    Raises:
        InvalidInput: it is too long, or not UTF-8.
    """
    if len(text) <= limits.size_bytes:
        try:
            raw = text.encode() if isinstance(text, str) else text.decode().encode()
        except (UnicodeEncodeError, UnicodeDecodeError) as error:
            raise InvalidInput(field, f"is not UTF-8 text: {error.reason}") from error
        if len(raw) <= limits.size_bytes:
            return raw
    raise InvalidInput(field, f"must be at most {limits.size_bytes:,} bytes")


def check_scalar(field: str, place: str, value: object, limits: DocumentLimits) -> None:
    """Refuse a text that is too long or has a NUL or a surrogate, and a non-finite number."""
    at = f"{place}: " if place else ""
    if isinstance(value, str):
        if len(value) > limits.text:
            raise InvalidInput(field, f"{at}a text may have at most {limits.text:,} characters")
        if _NO_CHARACTER.search(value):
            raise InvalidInput(
                field, f"{at}has a NUL or half of a character (a surrogate); remove it"
            )
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(field, f"{at}must be a finite number, not {value}")


def check_number(field: str, place: str, written: str) -> None:
    """Refuse a number that is too long, before it is parsed."""
    if len(written) > MAX_NUMBER_CHARS:
        at = f"{place}: " if place else ""
        raise InvalidInput(
            field, f"{at}the number {written[:20]}... has more than {MAX_NUMBER_CHARS} characters"
        )


def check_counts(field: str, depth: int, nodes: int, limits: DocumentLimits) -> None:
    """Refuse a document that is nested too deep or has too many values."""
    if depth > limits.depth:
        raise InvalidInput(field, f"nests lists and mappings more than {limits.depth} levels deep")
    if nodes > limits.nodes:
        raise InvalidInput(field, f"has more than {limits.nodes:,} keys and values")


def _check_structure(field: str, raw: bytes, limits: DocumentLimits) -> int:
    """Check depth, counts and lengths before anything is built.

    The check is exact up to where the text stops being JSON. Return the length in bytes of the
    longest text as it is written, or 0 if none can be too long.
    """
    longest, parts, end = 0, list[bytes](), 0
    # Cut the contents out of strings, so that brackets and separators can be counted.
    while some := _SOME_STRINGS.match(raw, end):
        part, end = some[0], some.end()
        if len(raw) > limits.text:
            longest = max(longest, *(m.end() - m.start() - 2 for m in _STRING.finditer(part)))
            if longest > 6 * limits.text:  # a character takes up to six bytes (\uXXXX)
                raise InvalidInput(field, f"a text may have at most {limits.text:,} characters")
        parts.append(_STRING.sub(b'"', part))
    bare = b"".join(parts) + raw[end:]
    if match := _LONG_NUMBER.search(bare):
        check_number(field, "", match[0].decode())
    brackets = bare.translate(None, _NOT_BRACKETS)
    nodes = bare.count(b",") + bare.count(b":") + len(brackets) // 2 + 1
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.depth:
            break
    check_counts(field, depth, nodes, limits)
    return longest


def _scalars(value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of all keys and of all values that are not lists or mappings."""
    left = [("", value)]
    while left:
        path, item = left.pop()
        if isinstance(item, dict):
            for key, child in item.items():
                yield path, key
                left.append((f"{path}.{key}" if path else key, child))
        elif isinstance(item, list):
            left.extend((f"{path}[{i}]", child) for i, child in enumerate(item))
        else:
            yield path, item
