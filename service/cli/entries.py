"""Types of the values in the command line's files: texts, numbers, durations and sizes.

This module imports pydantic, which takes as long as some commands. Only the readers of files import
it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from tessera.estimator.files.schemas import (
    Entry,
    converted_by,
    describe_value,
    described_as,
    number_between,
)
from tessera.formulation.base import limits
from tessera.formulation.base.errors import InvalidInput
from tessera.service.cli import options
from tessera.service.cli.yamlfile import text_of


class FileEntry(Entry):
    """A mapping in a file. A key without a value counts as absent."""

    null_is_absent: ClassVar = True


def _text(place: str, value: object) -> object:
    if isinstance(value, bool):
        raise InvalidInput(place, f"must be a text, not {describe_value(value)}; put it in quotes")
    return text_of(value)


def _seconds(place: str, value: object) -> object:
    text = text_of(value)
    return options.parse_seconds(place, text) if isinstance(text, str) else text


def _size(place: str, value: object) -> object:
    text = text_of(value)
    if not isinstance(text, str):
        raise InvalidInput(place, f"must be a text, not {describe_value(value)}")
    return options.size_bytes(place, text)


def _bytes(place: str, value: object) -> object:
    text = text_of(value)
    is_plain = isinstance(text, str) and text.strip().isdecimal()
    return _size(place, f"{text} B" if is_plain else value)


Text = Annotated[str, converted_by(_text)]
"""A text. What YAML reads as a number is the text that was written. A boolean must be quoted."""

Seconds = Annotated[float, number_between(0.0, limits.MAX_DURATION_S), converted_by(_seconds)]
"""A duration in seconds, written as e.g. ``5m``."""

Size = Annotated[int, converted_by(_size)]
"""A size in bytes, written as e.g. ``40GiB``."""

Bytes = Annotated[int, converted_by(_bytes)]
"""A size under a key that names its unit, ``_bytes``. A number without a unit is bytes."""

Texts = Annotated[list[Text], described_as("must be a list of texts, e.g. [python, train.py]")]

Labels = Annotated[dict[Text, Text], described_as("must map texts to texts, e.g. {team: vision}")]
