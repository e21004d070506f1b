"""The one error of this package, and the texts that no error may repeat."""

from __future__ import annotations

import re
from typing import Final

MAX_SHOWN_CHARS: Final = 24
"""Longest text without a dot or a slash that is shown, because a longer one may be a secret."""

_SECRET: Final = re.compile(
    r"tessera_(?:token|join)|eyJ[A-Za-z0-9_-]{8}|PRIVATE KEY|://[^/\s]*@|\bBearer\b", re.IGNORECASE
)


class ChannelRefused(ValueError):
    """The settings of a channel do not allow it to be opened. The message says what to do."""


def holds_secret(text: str) -> bool:
    """Return whether ``text`` contains a token, a private key or a password of a URL."""
    return _SECRET.search(text) is not None


def show_path(text: str) -> str:
    """Return a path for a message, followed by a space, or "" if it may be a secret instead."""
    is_path = len(text) <= MAX_SHOWN_CHARS or "/" in text or "." in text
    return f"{text} " if is_path and text.isprintable() and not holds_secret(text) else ""
