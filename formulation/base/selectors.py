"""Labels of nodes, and selectors: the requirements of jobs on them.

A selector is written as its requirements with commas between them, e.g.
``zone=a, disk in (ssd, nvme), owner!=lab``. A node matches it if it meets all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, Self

from tessera.formulation.base.errors import InvalidInput

MAX_NODE_LABELS: Final = 64
MAX_REQUIREMENTS: Final = 16
MAX_VALUES: Final = 64
"""Largest number of values of one requirement."""
MAX_SELECTOR_CHARS: Final = 2000
MAX_WORD_CHARS: Final = 63
"""Largest length of a key, and of a value."""

_WORD: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?", re.ASCII)
_WORD_RULE: Final = (
    f"must be 1 to {MAX_WORD_CHARS} letters, digits, '-', '_', '.' and '/', with a letter or digit at"
    " both ends"
)
_REQUIREMENT: Final = re.compile(
    r"\s*(?P<key>[^\s=!,()]+)\s*"
    r"(?:(?P<sign>!?=)\s*(?P<value>[^\s=!,()]+)|in\s*\((?P<values>[^()]*)\))\s*(?:,|$)"
)
_FORMS: Final = "write 'key=value', 'key!=value' or 'key in (a, b)', with commas between them"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on one label: its value is among ``values``, or is not if ``negated``.

    A node without the label meets only negated requirements.
    """

    key: str
    values: tuple[str, ...]  # in order of their text
    negated: bool = False

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with these labels meets the requirement."""
        return (labels.get(self.key) in self.values) is not self.negated

    def __str__(self) -> str:
        """Return the requirement as it is written, e.g. ``zone=a``."""
        if len(self.values) > 1:
            return f"{self.key} in ({', '.join(self.values)})"
        return f"{self.key}{'!=' if self.negated else '='}{self.values[0]}"


@dataclass(frozen=True, slots=True)
class Selector:
    """Requirements that nodes must all meet. Every node matches the empty selector."""

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def read(cls, field: str, text: str) -> Self:
        """Return the selector of a text.

        Raises:
            InvalidInput: of ``field``, if the text is not one, or is beyond a limit.
        """
        if len(text) > MAX_SELECTOR_CHARS:
            raise InvalidInput(
                field, f"must be at most {MAX_SELECTOR_CHARS:,} characters; it has {len(text):,}"
            )
        found, at = [], 0
        while at < len(text.rstrip()):
            match = _REQUIREMENT.match(text, at)
            if match is None:
                raise InvalidInput(
                    field, f"cannot be read from {text[at : at + 40]!r} on; {_FORMS}"
                )
            found.append(_requirement(field, match))
            at = match.end()
        if text.rstrip().endswith(","):
            raise InvalidInput(field, f"ends with a comma; {_FORMS}")
        if len(found) > MAX_REQUIREMENTS:
            raise InvalidInput(
                field, f"must have at most {MAX_REQUIREMENTS} requirements; it has {len(found)}"
            )
        return cls(tuple(dict.fromkeys(found)))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with these labels matches."""
        return all(requirement.is_met(labels) for requirement in self.requirements)

    def __str__(self) -> str:
        """Return the text of the selector in one form, which reads back as the same selector."""
        return ", ".join(map(str, self.requirements))


def _requirement(field: str, match: re.Match[str]) -> Requirement:
    key, listed = match["key"], match["values"]
    values = [match["value"]] if listed is None else [part.strip() for part in listed.split(",")]
    if len(values) > MAX_VALUES:
        raise InvalidInput(
            field,
            f"must have at most {MAX_VALUES} values of {key[:MAX_WORD_CHARS]!r};"
            f" it has {len(values)}",
        )
    for word in (key, *values):
        _require_word(field, word)
    return Requirement(key, tuple(sorted(set(values))), match["sign"] == "!=")


def _require_word(field: str, word: str) -> None:
    if len(word) > MAX_WORD_CHARS or not _WORD.fullmatch(word):
        raise InvalidInput(field, f"has {word[:80]!r}, but a key or value {_WORD_RULE}")


@lru_cache(maxsize=4096)
def stored_selector(text: str) -> Selector:
    """Return the selector of a text that was checked when it was stored."""
    return Selector.read("selector", text)


def require_node_labels(field: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a node, by key.

    Raises:
        InvalidInput: there are too many, or a key or value is not a word.
    """
    if len(labels) > MAX_NODE_LABELS:
        raise InvalidInput(
            field, f"must have at most {MAX_NODE_LABELS} labels; it has {len(labels)}"
        )
    for key, value in labels.items():
        _require_word(field, key)
        _require_word(f"{field}[{key}]", value)
    return dict(sorted(labels.items()))


SelectorText = Annotated[str, Selector]
"""The text of a selector, "" for none."""
