"""The model of iteration time that calibration teaches: a runtime's plans, at factors on their costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from estimator.calibration import Parameter, Subject
from estimator.cells import Setting, chosen, priced
from estimator.graph import merged
from estimator.planning.search import latency_of
from estimator.plans import Candidates, Groups, Network, Primitive
from estimator.rooflines import DEFAULT_RATES, Rates, RooflineCompute
from formulation.tables import Floats

PARAMETERS: Final = (
    Parameter(name="compute", value=1.0, shared_sd=0.3, family_sd=0.3, gpu_sd=0.15),
    Parameter(name="memory", value=1.0, shared_sd=0.3, family_sd=0.3, gpu_sd=0.15),
    Parameter(name="launch", value=1.0, shared_sd=0.7, family_sd=0.5, gpu_sd=0.3),
    Parameter(name="saturation", value=1.0, shared_sd=0.7, family_sd=0.7, gpu_sd=0.3),
    Parameter(name="collectives", value=1.0, shared_sd=0.5, family_sd=0.5, gpu_sd=0.3),
    Parameter(name="transfers", value=1.0, shared_sd=0.5, family_sd=0.5, gpu_sd=0.3),
)
"""Factors on seconds: of products, of memory traffic, of launches, of the work at which kernels saturate,
of collectives, of transfers between stages. Deviations by judgement: a data sheet tells compute to a third
or so, communication to a factor of two."""
STEP: Final = 0.02
"""Of a log parameter, for its derivative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledNetwork:
    """A network whose collectives and transfers take this many times as long."""

    network: Network
    collectives: float
    transfers: float

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return seconds of each collective, shape (K,)."""
        factor = self.transfers if primitive is Primitive.SEND else self.collectives
        return factor * self.network.seconds(primitive, payload_bytes, groups)


def scaled(setting: Setting, factors: Mapping[str, float], rates: Mapping[str, Rates]) -> Setting:
    """Return the setting at factors on its costs, by the names of :data:`PARAMETERS`."""
    own = rates[setting.graph.dtype].scaled(
        compute=factors["compute"], memory=factors["memory"], launch=factors["launch"]
    )
    own = replace(own, half_flops=own.half_flops * factors["saturation"])
    network = ScaledNetwork(
        network=setting.network, collectives=factors["collectives"], transfers=factors["transfers"]
    )
    compute = RooflineCompute(hardware=setting.hardware, rates={setting.graph.dtype: own})
    return replace(setting, compute=compute, network=network)


class CellTimes:
    """Iteration times of the plans that runtimes choose; meets :class:`estimator.calibration.TimeModel`."""

    def __init__(
        self,
        setting_of: Callable[[Subject], Setting],
        degrees_of: Callable[[Subject], Sequence[int]],
        rates: Mapping[str, Rates] = DEFAULT_RATES,
    ) -> None:
        """Take where a subject runs, and among which pipeline degrees its plan is chosen."""
        self._setting_of, self._degrees_of, self._rates = setting_of, degrees_of, rates
        self._settings: dict[Subject, Setting] = {}

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Return :data:`PARAMETERS`."""
        return PARAMETERS

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        """Return log seconds, shape (K,), and gradients, (K, P), at the plan that is chosen there."""
        values = np.full(len(subjects), np.nan)
        gradients = np.full((len(subjects), len(PARAMETERS)), np.nan)
        for i, subject in enumerate(subjects):
            setting = self._setting(subject)
            plan = self._plan(self._at(setting, log_values[i]), self._degrees_of(subject))
            if plan is None:
                continue
            values[i] = self._log_time(setting, plan, log_values[i])
            for p in range(len(PARAMETERS)):
                moved = log_values[i].copy()
                moved[p] += STEP
                gradients[i, p] = (self._log_time(setting, plan, moved) - values[i]) / STEP
        return values, gradients

    def _setting(self, subject: Subject) -> Setting:
        if subject not in self._settings:
            setting = self._setting_of(subject)
            self._settings[subject] = replace(setting, graph=merged(setting.graph, 16))
        return self._settings[subject]

    def _at(self, setting: Setting, log_values: Floats) -> Setting:
        names = [p.name for p in PARAMETERS]
        factors = dict(zip(names, np.exp(log_values).tolist(), strict=True))
        return scaled(setting, factors, self._rates)

    def _plan(self, setting: Setting, degrees: Sequence[int]) -> Candidates | None:
        """Return the stages of the plan that the runtime's search takes; None: nothing fits."""
        costs, options = priced(setting)
        if not len(options):
            return None
        runtime, count = setting.runtime, setting.training.micro_batches
        searched = latency_of(costs, count, runtime.planned_as or runtime.overlap)
        found = chosen(setting, costs, options, degrees)
        if not found:
            return None
        rows = min((f.rows for f in found.values()), key=searched.of)
        return costs.candidates.rows(np.array(rows, dtype=np.int64))

    def _log_time(self, setting: Setting, plan: Candidates, log_values: Floats) -> float:
        at = self._at(setting, log_values)
        latency = latency_of(at.costs(plan), at.training.micro_batches, at.runtime.overlap)
        return float(np.log(latency.of(np.arange(len(plan), dtype=np.int64))))
