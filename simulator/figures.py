"""The outcome of a benchmark run: named figures, and a table for benchmarks that compare."""

from __future__ import annotations

from dataclasses import dataclass, field

Figure = float | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of a run. ``table`` has one dictionary for each row, if the benchmark compares.

    ``waived`` names the figures whose bounds do not apply, because they were set for other options.
    """

    seed: int
    figures: dict[str, Figure]
    waived: frozenset[str] = frozenset()
    table: list[dict[str, Figure | str]] = field(default_factory=list)
