"""Fitting of the published model to measured runs, and when to fit it again (Morphling, A.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from tessera.estimator.reconfiguration.appendix import AppendixParameters, appendix_iteration_s
from tessera.estimator.reconfiguration.configurations import Configuration, ConfigurationTable
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats

FITTED_RUNS: Final = 7
"""Runs that the seven parameters need at least (Morphling, A.3)."""
OFFLOADED_RUNS: Final = 3
"""Of these, runs with ZeRO-Offload, which has three parameters of its own (Morphling, A.3)."""
REFIT_ERROR: Final = 0.10
"""Relative error of a prediction from which the model is fitted again. The text names no value. This
one is the largest error that it reports for fitted models (section 7.1), rounded."""
MAX_OVERLAP: Final = 100.0
"""Largest overlap exponent. At 100, two equal parts take 1.007 times one of them."""

_LOWEST: Final = np.array([0.5, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
_HIGHEST: Final = np.array([10.0, MAX_OVERLAP, 1e-7, 1e-5, MAX_OVERLAP, MAX_OVERLAP, np.inf])
"""Bounds of the parameters, in their order. A backward pass takes about two forward passes, and a
data sheet's GPU updates a parameter in some 2e-11 s, a core in some 1e-9 s."""
_SCALES: Final = np.array([1.0, 1.0, 1e-10, 1e-9, 1.0, 1.0, 1e-2])
"""Usual sizes of the parameters, in which the optimizer steps."""
_STARTS: Final = tuple(
    np.array([2.0, overlap, 5e-11, core, overlap, overlap, 1e-2])
    for overlap in (1.5, 5.0)
    for core in (1e-9, 2e-8)
)
"""Starting points. The loss has several minima, of which the lowest is taken."""
_EVALUATIONS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measured iteration time of a configuration."""

    configuration: Configuration
    iter_time_s: float
    busy_s: float | None = None
    """Seconds of forward and backward passes with what of the synchronisation is in them. If None,
    they were not recorded. The published model does not read them."""
    update_s: float | None = None
    """Seconds of the optimizer's step. If None, they were not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendixFit:
    """Fitted parameters with their loss on the runs: the RMSLE, about the relative error."""

    parameters: AppendixParameters
    rmsle: float


def log_error(predicted_s: Floats, measured_s: Floats) -> float:
    """Return the root mean squared logarithmic error (A.3)."""
    return float(np.sqrt(np.mean(np.log(predicted_s / measured_s) ** 2)))


def fit_appendix(runs: Sequence[MeasuredRun]) -> AppendixFit:
    """Return the parameters within bounds that minimise the RMSLE of Eq. (1) on runs of a model.

    The result depends on nothing but the runs and their order. :func:`check_variety` and
    :func:`check_offloaded` say whether the runs suffice.
    """
    table = ConfigurationTable.of([run.configuration for run in runs])
    measured_s = np.array([run.iter_time_s for run in runs])

    def log_errors(scaled: Floats) -> Floats:
        values = AppendixParameters.from_array(scaled * _SCALES)
        return np.asarray(
            np.log(appendix_iteration_s(table, values) / measured_s), dtype=np.float64
        )

    tried = [
        least_squares(
            log_errors,
            start / _SCALES,
            bounds=(_LOWEST / _SCALES, _HIGHEST / _SCALES),
            max_nfev=_EVALUATIONS,
        )
        for start in _STARTS
    ]
    best = min(tried, key=lambda result: float(result.cost)).x * _SCALES
    values = AppendixParameters.from_array(best)
    return AppendixFit(
        parameters=values, rmsle=log_error(appendix_iteration_s(table, values), measured_s)
    )


def check_variety(runs: Sequence[MeasuredRun]) -> None:
    """Check that runs are enough, of one model, and of several plans.

    Raises:
        InvalidInput: they are not; the message says what would be enough.
    """
    check_times(runs)
    if len(runs) < FITTED_RUNS:
        raise InvalidInput(
            "runs",
            f"has {len(runs)} of the {FITTED_RUNS} measured runs that the parameters need;"
            f" measure {FITTED_RUNS - len(runs)} more",
        )
    names = {run.configuration.facts.name for run in runs}
    if len(names) > 1:
        raise InvalidInput(
            "runs", f"are of {', '.join(sorted(names))}; fit each model to its own runs"
        )
    plans = {run.configuration.plan_name for run in runs}
    if len(plans) < 2:
        raise InvalidInput(
            "runs",
            f"are all of the plan {min(plans)}, so parts of the time cannot be separated;"
            f" add runs of another plan, e.g. {_other_plan(min(plans))}",
        )


def check_offloaded(runs: Sequence[MeasuredRun]) -> None:
    """Check that enough runs use ZeRO-Offload.

    Raises:
        InvalidInput: they do not; the message says how many would be enough.
    """
    offloaded = sum(run.configuration.offload for run in runs)
    if offloaded < OFFLOADED_RUNS:
        raise InvalidInput(
            "runs",
            f"has {offloaded} of the {OFFLOADED_RUNS} runs with ZeRO-Offload that its three"
            f" parameters need; measure {OFFLOADED_RUNS - offloaded} more with it",
        )


def check_times(runs: Sequence[MeasuredRun]) -> None:
    """Check that all recorded times are positive.

    Raises:
        InvalidInput: one is not; the message names it.
    """
    for run in runs:
        for name in ("iter_time_s", "busy_s", "update_s"):
            value = getattr(run, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise InvalidInput(
                    name,
                    f"must be above 0 s, not {value}, for {run.configuration.plan_name} on"
                    f" {run.configuration.gpus} GPUs; leave out runs that failed",
                )


def _other_plan(plan: str) -> str:
    return "dp" if "offload" in plan else "zero2+offload"


def needs_refit(error: float, threshold: float = REFIT_ERROR) -> bool:
    """Return whether a prediction with this relative error makes a new fit necessary (A.3).

    Raises:
        InvalidInput: the threshold is not above 0, or the error is not a number.
    """
    if not threshold > 0:
        raise InvalidInput("threshold", f"must be above 0, not {threshold}")
    if np.isnan(error):
        raise InvalidInput("error", "must be a number; there is no prediction to compare with")
    return abs(error) > threshold
