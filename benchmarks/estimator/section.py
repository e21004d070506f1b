"""The result of one section of the estimator's benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.simulator.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSection:
    """Figures by name, and the rows behind them. Each row is a dictionary with its ``section``."""

    figures: dict[str, Figure]
    rows: list[dict[str, Figure | str]] = field(default_factory=list)
