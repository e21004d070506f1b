"""Readers of plain dictionaries. Errors name the path and say what is allowed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator
from typing import Final

from tessera.formulation.base.errors import InvalidInput

LOW_BYTES_PER_S: Final = 1e6
HIGH_BYTES_PER_S: Final = 1e14
HIGH_DELAY_S: Final = 10.0
_UNITS: Final = {
    "": 1.0,
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
}
_AMOUNT: Final = re.compile(
    r"((?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)", re.ASCII
)
_NEAR: Final = 0.6


class Fields:
    """A mapping with checked keys and values. ``where`` is its path, "" for the whole document."""

    def __init__(self, where: str, value: object, allowed: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(
                where, f"must be a mapping of keys to values, not {show_value(value)}"
            )
        for key in value:
            if key not in allowed:
                raise InvalidInput(
                    where,
                    f"unknown key {key!r}{similar_word_hint(key, allowed)}; allowed: {', '.join(allowed)}",
                )
        self.where = where
        self._values: dict[str, object] = value

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def at(self, key: str) -> str:
        """Return the path of ``key``."""
        return f"{self.where}.{key}" if self.where else key

    def raw(self, key: str) -> object:
        """Return the value unchanged. Raises InvalidInput if it is absent."""
        if key not in self:
            raise InvalidInput(self.where, f"needs the key {key!r}")
        return self._values[key]

    def text(self, key: str) -> str:
        """Return a text. A whole number is converted to its digits."""
        return read_text(self.at(key), self.raw(key))

    def one_of(self, key: str, allowed: Collection[str]) -> str:
        """Return one of ``allowed``."""
        value = self.raw(key)
        if not isinstance(value, str) or value not in allowed:
            raise InvalidInput(
                self.at(key),
                f"must be one of {', '.join(allowed)}, not {show_value(value)}"
                f"{similar_word_hint(value, allowed)}",
            )
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in [low, high]."""
        if key not in self and default is not None:
            return default
        return read_whole(self.at(key), self.raw(key), low, high)

    def speed(self, key: str, default: float | None = None) -> float:
        """Return bytes/s, written as a number or as e.g. ``200 Gb/s``."""
        if key not in self and default is not None:
            return default
        return _amount(
            self.at(key),
            self.raw(key),
            LOW_BYTES_PER_S,
            HIGH_BYTES_PER_S,
            "a number of bytes/s from 1e6 to 1e14, or a text such as 200 Gb/s or 25 GB/s",
            _UNITS,
        )

    def delay(self, key: str) -> float:
        """Return seconds. The default is 0."""
        if key not in self:
            return 0.0
        return _amount(
            self.at(key),
            self.raw(key),
            0.0,
            HIGH_DELAY_S,
            "a number of seconds from 0 to 10",
            {"": 1.0},
        )

    def flag(self, key: str) -> bool:
        """Return true or false. The default is false."""
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise InvalidInput(self.at(key), f"must be true or false, not {show_value(value)}")

    def items(self, key: str) -> Iterator[tuple[str, object]]:
        """Yield (path, value) of each item of a list."""
        yield from list_items(self.at(key), self.raw(key))

    def wholes(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of whole numbers. The default is an empty list."""
        return tuple(
            read_whole(at, v, low, high) for at, v in (self.items(key) if key in self else ())
        )


def list_items(where: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of each item of a list. Raises InvalidInput if it is not a list."""
    if not isinstance(value, list | tuple):
        raise InvalidInput(where, f"must be a list, not {show_value(value)}")
    yield from ((f"{where}[{i}]", item) for i, item in enumerate(value))


def read_text(where: str, value: object) -> str:
    """Return a text that is not empty. A whole number is converted to its digits."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InvalidInput(where, f"must be a text, not {show_value(value)}")
    return str(value)


def read_whole(where: str, value: object, low: int, high: int) -> int:
    """Return a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(
            where, f"must be a whole number from {low:,} to {high:,}, not {show_value(value)}"
        )
    return value


def to_float(value: float) -> float:
    """Return the number as a float. It is infinite if a whole number is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def similar_word_hint(value: object, allowed: Collection[str]) -> str:
    """Return a hint at a similar allowed word, or "" if no word is similar."""
    matches = difflib.get_close_matches(str(value), allowed, n=1, cutoff=_NEAR)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def show_value(value: object) -> str:
    """Return the value in a form for messages."""
    match value:
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case None:
            return "nothing"
    return repr(value)


def _amount(
    where: str, value: object, low: float, high: float, wanted: str, units: dict[str, float]
) -> float:
    """Return a number, or one with a unit, which is a text."""
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    number = float("nan")
    if match is not None and match[2] in units:
        number = float(match[1]) * units[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = to_float(value)
    if not low <= number <= high:
        raise InvalidInput(where, f"must be {wanted}, not {show_value(value)}")
    return number
