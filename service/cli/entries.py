"""Types of the values in the command line's files: texts, numbers, durations and sizes.

This module imports pydantic, which takes as long as some commands. Only the readers of files import
it.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator

from tessera.estimator.schemas import (
    Entry,
    converted_by,
    describe_value,
    described_as,
    number_between,
)
from tessera.formulation.errors import InvalidInput
from tessera.service.cli import limits, options


class FileEntry(Entry):
    """A mapping in a file. A key without a value counts as absent."""

    null_is_absent: ClassVar = True


_EXPONENT: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]+")
"""A number such as 1e-06. YAML reads it as text, but JSON writes numbers in this form."""


def _text(place: str, value: object) -> object:
    if isinstance(value, float):
        raise InvalidInput(place, f"must be a text; put {value!r} in quotes")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _real(value: object) -> object:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _seconds(place: str, value: object) -> object:
    return options.parse_seconds(place, value) if isinstance(value, str) else value


def _size(place: str, value: object) -> object:
    text = _text(place, value)
    if not isinstance(text, str):
        raise InvalidInput(place, f"must be a text, not {describe_value(value)}")
    return options.size_bytes(place, text)


def _bytes(place: str, value: object) -> object:
    is_plain = str(value).strip().isdecimal()
    return _size(place, f"{value} B" if is_plain else value)


Text = Annotated[str, converted_by(_text)]
"""A text. A whole number is converted to its digits. Any other number must be quoted."""

Real = Annotated[float, BeforeValidator(_real)]

Seconds = Annotated[float, number_between(0.0, limits.MAX_DURATION_S), converted_by(_seconds)]
"""A duration in seconds, written as a number or as e.g. ``5m``."""

Size = Annotated[int, converted_by(_size)]
"""A size in bytes, written as e.g. ``40GiB``."""

Bytes = Annotated[int, converted_by(_bytes)]
"""A size under a key that names its unit, ``_bytes``. A number without a unit is bytes."""

Texts = Annotated[list[Text], described_as("must be a list of texts, e.g. [python, train.py]")]

Labels = Annotated[dict[Text, Text], described_as("must map texts to texts, e.g. {team: vision}")]
