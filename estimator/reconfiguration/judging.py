"""The choice of the model that predicts a workload's plans best, by the runs that each leaves out.

Three models are compared: the cost model of the graph with one factor, the published model of
reconfigurable training, and ours. Each predicts every measured run from the other ones. That of the
least error is fitted to all runs. It is fitted again once a run shows that it is wrong
(Morphling, appendix A.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

import numpy as np

from tessera.estimator.reconfiguration.appendix import appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import Configuration, ConfigurationTable
from tessera.estimator.reconfiguration.fitting import (
    MeasuredRun,
    check_offloaded,
    check_variety,
    fit_appendix,
    log_error,
    needs_refit,
)
from tessera.estimator.reconfiguration.pooling import fit_pooled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats

MAX_RUNS: Final = 12
"""Most runs of a model from which it is chosen, the latest ones. Each takes about a second."""

LEAST_SD: Final = 0.03
"""Standard deviation of log times below which no model is trusted: single iterations of one run
differ by some 3 % (:data:`tessera.estimator.reconfiguration.pooling.NOISE_SDS`)."""


class PlanModel(StrEnum):
    """A model of iteration times under all plans, as users read its name."""

    GRAPH = "the cost model with a factor"
    APPENDIX = "Morphling's model"
    POOLED = "our model of all runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A measured run, with the seconds that the cost model of the graph predicts for it."""

    run: MeasuredRun
    graph_s: float


Predictor = Callable[[Sequence[Configuration], Floats], Floats]
"""A function of configurations and their seconds by the cost model, shape (K,), to seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelChoice:
    """The model that predicts left-out runs of a workload best, fitted to all of them.

    ``errors`` are the root mean squared logarithmic errors of left-out runs by model. ``refused``
    says why a model is not among them.
    """

    model: PlanModel
    errors: Mapping[PlanModel, float]
    refused: Mapping[PlanModel, str]
    runs: tuple[PricedRun, ...]
    predictor: Predictor = field(repr=False)

    @property
    def sd(self) -> float:
        """Return the standard deviation of log times that the choice is known to have."""
        return max(LEAST_SD, self.errors[self.model])

    def predict_s(self, configuration: Configuration, graph_s: float) -> float:
        """Return the iteration time of a configuration in seconds."""
        return float(self.predictor([configuration], np.array([graph_s]))[0])

    def covers(self, configuration: Configuration) -> bool:
        """Return whether some run had the kind of plan: divided layers or not, offloaded or not."""
        return _kind(configuration) in {_kind(priced.run.configuration) for priced in self.runs}

    def is_outdated_by(self, runs: Sequence[PricedRun]) -> bool:
        """Return whether some of ``runs`` is predicted so badly that a new fit is necessary."""
        known = {priced.run for priced in self.runs}
        return any(
            needs_refit(self.predict_s(p.run.configuration, p.graph_s) / p.run.iter_time_s - 1.0)
            for p in runs
            if p.run not in known
        )

    def __str__(self) -> str:
        """Return the choice in a sentence for users, with the errors of all models."""
        rivals = [
            f"{model} {error:.1%}" for model, error in self.errors.items() if model != self.model
        ]
        others = f"; {', '.join(rivals)}" if rivals else ""
        return (
            f"{self.model}, fitted to {len(self.runs)} runs here, misses left-out ones by"
            f" {self.errors[self.model]:.1%}{others}"
        )


def choose_model(runs: Sequence[PricedRun], others: Sequence[MeasuredRun] = ()) -> ModelChoice:
    """Return the model that predicts each run of a workload best from the other ones.

    Of more than :data:`MAX_RUNS`, the last ones count. ``others`` are runs of other models on the
    same machines, from which ours learns, too. If two models are equally good, the simpler one is
    chosen.

    Raises:
        InvalidInput: the runs are too few, of several models or of one plan only, or a time is not
            positive; the message says what would be enough.
    """
    latest = tuple(runs[-MAX_RUNS:])
    own = [priced.run for priced in latest]
    check_variety(own)
    fits: dict[PlanModel, Callable[[Sequence[PricedRun]], Predictor]] = {
        PlanModel.GRAPH: _fit_factor,
        PlanModel.APPENDIX: _fit_appendix,
        PlanModel.POOLED: partial(_fit_ours, others=others),
    }
    refused: dict[PlanModel, str] = {}
    try:
        check_offloaded(own)
    except InvalidInput as wrong:
        refused[PlanModel.APPENDIX] = str(wrong)
        del fits[PlanModel.APPENDIX]
    errors = {model: _left_out_error(latest, fit) for model, fit in fits.items()}
    best = min(errors, key=lambda model: errors[model])
    return ModelChoice(
        model=best, errors=errors, refused=refused, runs=latest, predictor=fits[best](latest)
    )


def _left_out_error(
    runs: Sequence[PricedRun], fit: Callable[[Sequence[PricedRun]], Predictor]
) -> float:
    """Return the RMSLE of predictions of each run by a fit to the others."""
    predicted = [
        fit([*runs[:at], *runs[at + 1 :]])([left.run.configuration], np.array([left.graph_s]))[0]
        for at, left in enumerate(runs)
    ]
    measured = [priced.run.iter_time_s for priced in runs]
    return log_error(np.array(predicted), np.array(measured))


def _fit_factor(runs: Sequence[PricedRun]) -> Predictor:
    """Return the cost model with the median factor of runs."""
    factor = math.exp(
        float(np.median([math.log(priced.run.iter_time_s / priced.graph_s) for priced in runs]))
    )
    return lambda _configurations, graph_s: factor * graph_s


def _fit_appendix(runs: Sequence[PricedRun]) -> Predictor:
    parameters = fit_appendix([priced.run for priced in runs]).parameters
    return lambda configurations, _graph_s: appendix_iteration_s(
        ConfigurationTable.of(configurations), parameters
    )


def _fit_ours(runs: Sequence[PricedRun], others: Sequence[MeasuredRun]) -> Predictor:
    fit = fit_pooled([*(priced.run for priced in runs), *others])
    return lambda configurations, _graph_s: fit.predict_s(configurations)


def _kind(configuration: Configuration) -> tuple[bool, bool]:
    return configuration.tp * configuration.pp > 1, configuration.offload
