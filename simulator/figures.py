"""What a run found: figures with names, and a table where it compares."""

from __future__ import annotations

from dataclasses import dataclass, field

Figure = float | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run found. ``table`` has one dictionary a row, where the benchmark compares.

    ``waived`` names figures whose bound was set for other options than these.
    """

    seed: int
    figures: dict[str, Figure]
    waived: frozenset[str] = frozenset()
    table: list[dict[str, Figure | str]] = field(default_factory=list)
