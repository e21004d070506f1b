"""Suggestions of known names for names that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

MIN_SIMILARITY: Final = 0.75
"""Similarity from which a known name is suggested for an unknown one. Equal names have 1."""


def suggest_name(name: object, choices: Collection[str]) -> str:
    """Return a suggestion of the most similar of the known names, or "" if no name is similar."""
    matches = difflib.get_close_matches(str(name), choices, n=1, cutoff=MIN_SIMILARITY)
    return f"; did you mean {matches[0]!r}?" if matches else ""
