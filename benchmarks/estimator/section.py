"""What one section of the estimator's benchmark found."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.simulator.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Figures by name, and the rows behind them (each a dictionary whose ``section`` is its own)."""

    figures: dict[str, Figure]
    rows: list[dict[str, Figure | str]] = field(default_factory=list)
