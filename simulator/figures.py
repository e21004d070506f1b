"""The outcome of a benchmark run: named figures, and a table if the benchmark compares."""

from __future__ import annotations

from dataclasses import dataclass, field

Figure = float | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of a run. ``table`` has one dictionary for each row, if the benchmark compares.

    ``waived`` names the figures whose bound was set for other options than these.
    """

    seed: int
    figures: dict[str, Figure]
    waived: frozenset[str] = frozenset()
    table: list[dict[str, Figure | str]] = field(default_factory=list)
