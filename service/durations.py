"""Durations in the notation that people write, for options, files and settings."""

from __future__ import annotations

import re
from typing import Final

from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput

NEVER: Final = "never"
"""The word for an infinite duration, where one is allowed."""

_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = r"[0-9]+(?:\.[0-9]*)?"
_PLAIN: Final = re.compile(_NUMBER)
_NOTHING: Final = "0"
"""The only duration without a unit. Any other number may be meant in another unit, or as a time."""
_PART: Final = re.compile(rf"({_NUMBER})\s*(ms|[smhd])\s*")
_PARTS: Final = re.compile(rf"(?:{_PART.pattern})+")
_MAX_CHARS: Final = 100


def is_duration(text: str) -> bool:
    """Return whether ``text`` has the form of a duration. A number needs a unit."""
    stripped = text.strip()
    if len(stripped) > _MAX_CHARS:
        return False
    if stripped == _NOTHING:
        return True
    units = [unit for _, unit in _PART.findall(stripped)]
    order = sorted(set(units), key=lambda unit: -_SECONDS[unit])
    return _PARTS.fullmatch(stripped) is not None and units == order


def parse_duration_s(where: str, text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``500ms``, ``5m``, ``1.5h``, ``1h30m`` or ``1d``.

    Each unit may occur once, the larger ones first. Only 0 needs no unit.

    Raises:
        InvalidInput: ``text`` has another form, or is longer than a Duration can be.
    """
    if not is_duration(text):
        shown = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
        if _PLAIN.fullmatch(plain := shown.strip()):
            raise InvalidInput(
                where, f"{plain} has no unit; write e.g. {plain}s, {plain}m, {plain}h or {plain}d"
            )
        raise InvalidInput(
            where, f"{shown!r} is not a duration; write e.g. 90s, 5m, 2h, 1h30m or 1d"
        )
    parts = _PART.findall(text.strip())
    return require_duration_s(where, sum(float(value) * _SECONDS[unit] for value, unit in parts))


def require_duration_s(where: str, length_s: float) -> float:
    """Return ``length_s`` if a Duration can hold it and it is not negative. Raises InvalidInput."""
    if not 0 <= length_s <= limits.MAX_DURATION_S:
        raise InvalidInput(where, f"must lie in 0 to {limits.MAX_DURATION_S:,} seconds")
    return length_s
