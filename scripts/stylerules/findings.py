"""A place that breaks a rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StyleFinding:
    """A place that breaks a rule, and what would mend it."""

    path: str
    """The file, relative to the root of the repository."""
    line: int
    rule: str
    text: str
    advice: str

    def __str__(self) -> str:
        """Return the finding as a line of an error."""
        return f"{self.path}:{self.line}: {self.text} ({self.rule}): {self.advice}"
