"""Texts that name tenants and their jobs, and the part of them that a caller may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

HIDDEN_NAME: Final = "(another tenant)"
"""The words in place of a name that a caller may not read."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tenant, or of something of its own, for callers that see the tenant."""

    text: str
    tenant: str

    def __str__(self) -> str:
        """Return the name."""
        return self.text


@dataclass(frozen=True, slots=True)
class NamingText:
    """A text with names, as its parts in order."""

    parts: tuple[str | Name, ...]

    def __str__(self) -> str:
        """Return the whole text, for those who see all tenants."""
        return "".join(map(str, self.parts))


Text = str | Name | NamingText
"""A text that ``render`` makes fit for a caller."""

SeesTenant = Callable[[str], bool]
"""A function that returns whether a caller may know of a tenant."""


def fill(template: str, **values: Text | float) -> Text:
    """Return a template of ``str.format`` with values for its words."""
    texts: list[Text] = []
    for literal, word, form, _ in Formatter().parse(template):
        value = values[word] if word else ""
        texts += [
            literal,
            value if isinstance(value, Name | NamingText) else format(value, form or ""),
        ]
    return join("", texts)


def join(separator: str, texts: Sequence[Text]) -> Text:
    """Return texts as one text, with a separator between them."""
    parts: list[str | Name] = []
    for text in texts:
        parts += [separator, *_parts(text)]
    return _text_of(parts[1:])


def render(text: Text, sees_tenant: SeesTenant) -> str:
    """Return a text for a caller that sees some tenants, with other words for names of others."""
    return "".join(
        part if isinstance(part, str) else part.text if sees_tenant(part.tenant) else HIDDEN_NAME
        for part in _parts(text)
    )


def plain_text(text: Text) -> Any:
    """Return a text as plain values for JSON. Each name is a list."""
    if isinstance(text, str):
        return text
    return [part if isinstance(part, str) else [part.text, part.tenant] for part in _parts(text)]


def text_from(plain: Any) -> Text:
    """Return the text that ``plain_text`` wrote."""
    if isinstance(plain, str):
        return plain
    return _text_of([part if isinstance(part, str) else Name(*part) for part in plain])


def _text_of(parts: Sequence[str | Name]) -> Text:
    parts = tuple(part for part in parts if part)
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return parts[0] if len(parts) == 1 else NamingText(parts)


def _parts(text: Text) -> tuple[str | Name, ...]:
    return text.parts if isinstance(text, NamingText) else (text,)
