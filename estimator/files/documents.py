"""Reader of users' YAML and JSON, within the limits of ``tessera.formulation.base.documents``.

Every field and file that takes YAML is read here. A document is one plain value. Aliases, anchors,
tags and merge keys are refused, because with them a short text can represent a huge one.

Scalars are resolved as in YAML 1.2: ``true``, ``false`` and ``null``, in its three cases, and decimal
numbers. Everything else is a text, as it is written: ``010``, ``0x10``, ``1_000``, ``22:30``,
``yes``, ``NO``, ``2026-11-28``. YAML 1.1 would make other values of these. Where a number is wanted,
such a text is refused; where a text is wanted, nothing of it is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import yaml

from tessera.formulation.base.cancellation import never_cancelled, require_caller
from tessera.formulation.base.documents import (
    DocumentLimits,
    NotJson,
    check_counts,
    check_number,
    check_scalar,
    read_json,
    to_utf8,
)
from tessera.formulation.base.errors import InvalidInput

_Parser: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml, if PyYAML was built with it. It is ten times as fast."""

_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
"""A whole number in its only form, so that its digits are the text that was written."""
_REAL: Final = re.compile(
    r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?",
    re.ASCII,
)
_WORDS: Final[dict[str, Any]] = {
    "": None,
    "~": None,
    **{word: None for word in ("null", "Null", "NULL")},
    **{word: True for word in ("true", "True", "TRUE")},
    **{word: False for word in ("false", "False", "FALSE")},
}
_NO_KEY: Final = object()


class WrittenNumber(float):
    """A number that is not written as plain digits, with the text that was written."""

    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        """Return the number of a text such as ``1.10`` or ``1e5``."""
        number = super().__new__(cls, text)
        number.text = text
        return number


class NotYaml(InvalidInput):
    """An error for a text that is not YAML."""


def is_number(text: str) -> bool:
    """Return whether a text without quotes is read as a number."""
    return _REAL.fullmatch(text) is not None


def text_of(value: object) -> object:
    """Return the text that was written for a number, and any other value unchanged.

    The text of a boolean is not known: it may be ``true`` or ``True``.
    """
    if isinstance(value, WrittenNumber):
        return value.text
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_document(
    field: str, text: str, limits: DocumentLimits, cancelled: Callable[[], bool] = never_cancelled
) -> Any:
    """Return the single value of a text in YAML or JSON. If the text is empty, return None.

    JSON is YAML except for tabs between its values, so a text that is not JSON is read as YAML.

    Raises:
        InvalidInput: it is neither, or beyond the limits; names ``field``.
        DeadlineTooShort: it was cancelled.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            return read_json(field, text, limits)
        except NotJson:
            pass
    try:
        documents = read_yaml(field, text, limits, cancelled)
    except NotYaml as wrong:
        reason = wrong.problem.removeprefix("is not valid YAML: ")
        raise InvalidInput(field, f"is neither JSON nor YAML: {reason}") from wrong
    if len(documents) > 1:
        raise InvalidInput(field, f"holds {len(documents)} documents; give one")
    return documents[0] if documents else None


def read_yaml(
    field: str, text: str, limits: DocumentLimits, cancelled: Callable[[], bool] = never_cancelled
) -> list[Any]:
    """Return the values of the documents in a YAML text, without empty documents.

    Raises:
        NotYaml: it is not YAML.
        InvalidInput: it is beyond the limits, or a mapping names a key twice; names ``field`` and
            the line.
        DeadlineTooShort: it was cancelled.
    """
    raw = to_utf8(field, text, limits)
    if len(raw) > limits.yaml_bytes:
        raise InvalidInput(
            field, f"exceeds the limit of {limits.yaml_bytes:,} bytes for YAML; write it as JSON"
        )
    try:
        return [value for value in _values(field, raw, limits, cancelled) if value is not None]
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise NotYaml(field, f"is not valid YAML: {reason}") from error


def _values(
    field: str, raw: bytes, limits: DocumentLimits, cancelled: Callable[[], bool]
) -> Iterator[Any]:
    """Yield the value of each document, built from parser events."""
    builder = _Builder(field, limits)
    for event in yaml.parse(raw, Loader=_Parser):
        require_caller(cancelled)
        if isinstance(event, yaml.DocumentEndEvent):
            yield builder.take()
        elif isinstance(event, yaml.CollectionEndEvent):
            builder.close()
        elif isinstance(event, yaml.NodeEvent):
            builder.add(event)


class _Builder:
    """A value under construction: the open lists and mappings with their contents so far."""

    def __init__(self, field: str, limits: DocumentLimits) -> None:
        self._field, self._limits = field, limits
        self._document: Any = None
        self._open: list[list[Any] | dict[Any, Any]] = []
        self._keys: list[Any] = []  # for each open mapping, the key that waits for its value
        self._nodes = 0

    def take(self) -> Any:
        """Return the finished document and begin the next one."""
        document, self._document = self._document, None
        return document

    def close(self) -> None:
        """End the innermost list or mapping."""
        self._open.pop()
        self._keys.pop()

    def add(self, event: yaml.NodeEvent) -> None:
        """Add the value of an event to the innermost open list or mapping."""
        place = f"line {event.start_mark.line + 1}" if event.start_mark else "a line"
        if self._open and self._keys[-1] is not _NO_KEY:
            place += f": {str(self._keys[-1])[:80]}"
        self._refuse_references(place, event)
        self._nodes += 1
        if isinstance(event, yaml.ScalarEvent):
            check_counts(self._field, len(self._open), self._nodes, self._limits)
            self._place(place, self._scalar(place, event))
            return
        value: list[Any] | dict[Any, Any] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        check_counts(self._field, len(self._open) + 1, self._nodes, self._limits)
        self._place(place, value)
        self._open.append(value)
        self._keys.append(_NO_KEY)

    def _place(self, place: str, value: Any) -> None:
        if not self._open:
            self._document = value
            return
        inside, key = self._open[-1], self._keys[-1]
        if isinstance(inside, list):
            inside.append(value)
        elif key is not _NO_KEY:
            inside[key] = value
            self._keys[-1] = _NO_KEY
        elif isinstance(value, list | dict):
            raise InvalidInput(self._field, f"{place}: a key must be a string or a number")
        elif value in inside:
            raise InvalidInput(
                self._field, f"{place}: the key {str(value)[:80]!r} occurs twice; name it once"
            )
        else:
            self._keys[-1] = value

    def _refuse_references(self, place: str, event: yaml.NodeEvent) -> None:
        """Refuse aliases, anchors and tags."""
        if isinstance(event, yaml.AliasEvent):
            problem = f"the alias *{event.anchor} is not allowed; write the value out"
        elif event.anchor:
            problem = f"the anchor &{event.anchor} is not allowed; remove it"
        elif tag := getattr(event, "tag", None):
            problem = f"the tag {tag} is not allowed; remove it"
        else:
            return
        raise InvalidInput(self._field, f"{place}: {problem}")

    def _scalar(self, place: str, event: yaml.ScalarEvent) -> Any:
        """Return the value of a scalar: a text, a number, a boolean, or None."""
        text = event.value
        check_scalar(self._field, place, text, self._limits)
        if not event.implicit[0]:  # it is in quotes
            return text
        if text == "<<":
            raise InvalidInput(
                self._field, f"{place}: the key << is not allowed; write its values out"
            )
        if text in _WORDS:
            return _WORDS[text]
        if not is_number(text):
            return text
        check_number(self._field, place, text)
        if _WHOLE.fullmatch(text):
            return int(text)
        number = WrittenNumber(text)
        check_scalar(self._field, place, number, self._limits)
        return number
