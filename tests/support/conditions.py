"""Adverse conditions of a simulated run: failures, stragglers and wrong estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tessera.formulation.records.estimates import EstimateRecord
from tessera.simulator.hazards import Hazards, draw_failures, draw_stragglers
from tessera.simulator.scenario import Scenario
from tessera.simulator.truth import perturb_estimates

OFTEN = Hazards(
    between_failures_s=4000.0, repair_s=900.0, between_lags_s=1500.0, lag_s=500.0, slowest=3.0
)


def conditions(scenario: Scenario, seed: int, error: float) -> dict[str, Any]:
    """Return failures and stragglers in the first hours, and wrong estimates."""
    return {
        "failures": draw_failures(scenario.nodes, 6000.0, seed, OFTEN),
        "stragglers": draw_stragglers(scenario.nodes, 6000.0, seed, OFTEN),
        "visible": perturb_estimates(assume_all_run(scenario), error, seed) if error else None,
        "patience_s": 3600.0,
    }


def assume_all_run(scenario: Scenario) -> list[EstimateRecord]:
    """Return the profiles as if all Cells ran, so that rounds discover those that do not."""
    return [
        e if math.isfinite(e.iter_time_s) else replace(e, iter_time_s=1.0)
        for e in scenario.profiles
    ]
