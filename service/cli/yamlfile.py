"""Files that people write: YAML mappings whose every key and type is checked, with errors that say where."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from tessera.estimator.documents import read_yaml
from tessera.formulation.documents import CLUSTER_FILE, Limits
from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits, options

STDIN = "-"

_EXPONENT = re.compile(r"[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]+")
"""A number such as 1e-06: YAML takes it for a text, JSON writes numbers so."""

NEAR = 0.75
"""How like a known key an unknown one must be for the known one to be suggested; 1: the same."""


def read(path: str) -> str:
    """Return the text of a file; ``-`` is stdin."""
    if path == STDIN:
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(path, f"is not UTF-8 text: {error.reason}") from error


def documents(text: str, source: str, limits: Limits = CLUSTER_FILE) -> list[object]:
    """Return the documents of a YAML text; empty ones are left out. Raises InvalidInput."""
    return read_yaml(source, text, limits)


class Mapping:
    """A mapping of a file. ``where`` names it in errors, e.g. ``jobs.yaml: jobs[2]``.

    ``also`` are further keys that are taken but not advertised: what commands print and files may hold.
    """

    def __init__(
        self, where: str, value: object, allowed: Collection[str], also: Collection[str] = ()
    ) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(where, f"must be a mapping of keys to values, not {_kind(value)}")
        for key in value:
            if key not in allowed and key not in also:
                near = difflib.get_close_matches(str(key), allowed, n=1, cutoff=NEAR)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                known = ", ".join(allowed)
                raise InvalidInput(where, f"unknown key {key!r}{hint} (allowed: {known})")
        self.where = where
        self._values: dict[str, object] = value

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, key: str) -> object:
        """Return the value as it stands in the file; None: absent or empty."""
        return self._values.get(key)

    def at(self, key: str) -> str:
        """Return the name of ``key`` for errors."""
        return f"{self.where}: {key}"

    def text(self, key: str) -> str:
        """Return a text; a whole number is taken as its digits. "": absent."""
        match self.raw(key):
            case None:
                return ""
            case bool() as value:
                raise self._wrong(key, "a text", value)
            case str() | int() as value:
                return str(value)
            case float() as value:
                raise InvalidInput(self.at(key), f"must be a text; put {value!r} in quotes")
            case value:
                raise self._wrong(key, "a text", value)

    def whole(self, key: str, low: int, high: int) -> int:
        """Return a whole number in [low, high]; 0: absent."""
        match self.raw(key):
            case None:
                return 0
            case bool() as value:
                raise self._wrong(key, f"a whole number from {low:,} to {high:,}", value)
            case int() as value if low <= value <= high:
                return value
            case value:
                raise self._wrong(key, f"a whole number from {low:,} to {high:,}", value)

    def real(self, key: str, low: float, high: float) -> float:
        """Return a number in [low, high]; 0: absent."""
        match self.raw(key):
            case None:
                return 0.0
            case bool() as value:
                raise self._wrong(key, f"a number from {low:g} to {high:,g}", value)
            case int() | float() as value if low <= value <= high:
                return float(value)
            case str() as value if _EXPONENT.fullmatch(value) and low <= float(value) <= high:
                return float(value)
            case value:
                raise self._wrong(key, f"a number from {low:g} to {high:,g}", value)

    def flag(self, key: str) -> bool:
        """Return true or false; false: absent."""
        match self.raw(key):
            case None:
                return False
            case bool() as value:
                return value
            case value:
                raise self._wrong(key, "true or false", value)

    def seconds(self, key: str) -> float:
        """Return a duration in seconds, written as a number or as e.g. ``5m``; 0: absent."""
        value = self.raw(key)
        if isinstance(value, str):
            return options.seconds(self.at(key), value)
        return self.real(key, 0.0, limits.MAX_DURATION_S)

    def moment(self, key: str, now: Timestamp) -> Timestamp:
        """Return a time, written with its time zone or as a duration from ``now``."""
        value = self.raw(key)
        if isinstance(value, datetime):
            return options.instant(self.at(key), value)
        return options.moment(self.at(key), str(value), now)

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; numbers are taken as their digits. Empty: absent."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(_plain(v) for v in value):
            raise InvalidInput(self.at(key), "must be a list of texts, e.g. [python, train.py]")
        return [str(v) for v in value]

    def labels(self, key: str) -> dict[str, str]:
        """Return a mapping of texts to texts. Empty: absent."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(
            _plain(v) for pair in value.items() for v in pair
        ):
            raise InvalidInput(self.at(key), "must map texts to texts, e.g. {team: vision}")
        return {str(k): str(v) for k, v in value.items()}

    def items(self, key: str) -> list[tuple[str, object]]:
        """Return (where, value) of each item of a list. Empty: absent."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return [(f"{self.at(key)}[{i}]", item) for i, item in enumerate(value)]

    def _wrong(self, key: str, wanted: str, value: object) -> InvalidInput:
        return InvalidInput(self.at(key), f"must be {wanted}, not {_kind(value)}")


def _plain(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case None:
            return "nothing"
    return repr(value)
