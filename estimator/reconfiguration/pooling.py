"""Our model learned from runs of several models on the same machines, and the runs to measure.

The logarithm of a parameter is the sum of its usual value, a deviation that all models share, and
one of the model. Both are normal with the spreads of :data:`POOLED_PARAMETERS`. Their most probable
values, given all runs, are found by least squares (Gelman et al. 2013, chapter 15). So few runs of a
model suffice, and a model without runs is predicted by what the others have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from tessera.estimator.reconfiguration.configurations import Configuration, ConfigurationTable
from tessera.estimator.reconfiguration.fitting import (
    FITTED_RUNS,
    OFFLOADED_RUNS,
    MeasuredRun,
    check_times,
)
from tessera.estimator.reconfiguration.pooled import (
    POOLED_PARAMETERS,
    pooled_parts,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats

_VALUES: Final = np.log([p.value for p in POOLED_PARAMETERS])
_SHARED_SDS: Final = np.array([p.shared_sd for p in POOLED_PARAMETERS])
_MODEL_SDS: Final = np.array([p.model_sd for p in POOLED_PARAMETERS])
_NAMES: Final = tuple(p.name for p in POOLED_PARAMETERS)

NOISE_SDS: Final = (0.03, 0.1, 0.15)
"""Standard deviations of log times that a run misses: of the iteration, of its passes, and of its
optimizer. Iterations of one run differ by some 3 %. Runtimes draw the line between the parts
differently."""
UNEVEN_NOISE: Final = 3.0
"""Factor of the noise where nodes have unequal numbers of GPUs. Published runs on such placements are
erratic."""
_DEGREES_OF_FREEDOM: Final = 4.0
"""Degrees of freedom of the noise, a usual value between Cauchy and normal noise."""
_STEP: Final = 1e-5
"""Step of log parameters for numerical derivatives."""
_EVALUATIONS: Final = 100


def log_parts(table: ConfigurationTable, log_values: Floats) -> Floats:
    """Return log seconds of iterations, passes and optimizers, shape (3, K).

    ``log_values`` has shape (K, P).
    """
    values = {name: np.exp(log_values[:, i]) for i, name in enumerate(_NAMES)}
    parts = pooled_parts(table, values)
    return np.log(np.stack([parts.iteration_s, parts.busy_s, parts.update_s]))


def log_gradients(table: ConfigurationTable, log_values: Floats) -> tuple[Floats, Floats]:
    """Return log seconds, shape (3, K), and their gradients by log parameters, shape (3, K, P)."""
    at = log_parts(table, log_values)
    gradients = np.zeros((*at.shape, len(_NAMES)))
    for i in range(len(_NAMES)):
        stepped = log_values.copy()
        stepped[:, i] += _STEP
        gradients[..., i] = (log_parts(table, stepped) - at) / _STEP
    return at, gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFit:
    """The learned log parameters, with the loss of the fit, which is lower for better ones."""

    shared: Floats  # shape (P,)
    deviations: Mapping[str, Floats] = field(default_factory=dict)  # by model, shape (P,)
    loss: float = 0.0

    def predict_s(self, configurations: Sequence[Configuration]) -> Floats:
        """Return iteration times in seconds, shape (K,)."""
        nothing = np.zeros(len(_NAMES))
        own = [self.deviations.get(c.facts.name, nothing) for c in configurations]
        if not own:
            return np.zeros(0)
        table = ConfigurationTable.of(configurations)
        times: Floats = np.exp(log_parts(table, self.shared + np.stack(own))[0])
        return times


def fit_pooled(runs: Sequence[MeasuredRun]) -> PooledFit:
    """Return the most probable parameters of all models that have runs.

    The names in their facts separate the models. Without runs, the usual values are returned.

    Raises:
        InvalidInput: a time is not positive.
    """
    check_times(runs)
    if not runs:
        return PooledFit(shared=_VALUES)
    problem = _Problem.of(runs)
    unknowns = (1 + len(problem.models)) * len(_NAMES)
    found = least_squares(
        problem.residuals,
        np.zeros(unknowns),
        jac=problem.jacobian,
        method="lm",
        max_nfev=_EVALUATIONS,
    )
    shared, own = problem.split(found.x)
    return PooledFit(
        shared=shared,
        deviations=dict(zip(problem.models, own, strict=True)),
        loss=float(found.cost),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """The least-squares problem of K runs of M models, with standard normal unknowns."""

    models: tuple[str, ...]
    of_model: Floats  # shape (K, M), 1 for the model of a run
    table: ConfigurationTable
    log_times: Floats  # shape (3, K), NaN if not recorded
    noise: Floats  # shape (3, K)

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun]) -> _Problem:
        names = [run.configuration.facts.name for run in runs]
        models = tuple(sorted(set(names)))
        recorded = [(run.iter_time_s, run.busy_s, run.update_s) for run in runs]
        table = ConfigurationTable.of([run.configuration for run in runs])
        return cls(
            models=models,
            of_model=np.array([[float(name == model) for model in models] for name in names]),
            table=table,
            log_times=np.log(np.array(recorded, dtype=np.float64)).T,
            noise=_noise_sds(table),
        )

    def split(self, unknowns: Floats) -> tuple[Floats, Floats]:
        """Return the shared log parameters, shape (P,), and the deviations, shape (M, P)."""
        shared, *own = unknowns.reshape(-1, len(_NAMES))
        return _VALUES + _SHARED_SDS * shared, _MODEL_SDS * np.array(own)

    def residuals(self, unknowns: Floats) -> Floats:
        """Return damped errors of the recorded times, then the unknowns."""
        shared, own = self.split(unknowns)
        errors = log_parts(self.table, shared + self.of_model @ own) - self.log_times
        damped, _ = _damped_errors((errors / self.noise)[np.isfinite(self.log_times)])
        return np.concatenate([damped, unknowns])

    def jacobian(self, unknowns: Floats) -> Floats:
        """Return the derivatives of the residuals by the unknowns."""
        shared, own = self.split(unknowns)
        at, gradients = log_gradients(self.table, shared + self.of_model @ own)
        is_recorded = np.isfinite(self.log_times)
        _, slopes = _damped_errors(((at - self.log_times) / self.noise)[is_recorded])
        rows = gradients[is_recorded] * (slopes / self.noise[is_recorded])[:, None]
        runs = np.nonzero(is_recorded)[1]
        by_model = self.of_model[runs][:, :, None] * (rows * _MODEL_SDS)[:, None, :]
        measured = np.hstack([rows * _SHARED_SDS, by_model.reshape(len(rows), -1)])
        return np.vstack([measured, np.eye(len(unknowns))])


def _damped_errors(errors: Floats) -> tuple[Floats, Floats]:
    """Return errors whose squares are the loss of Student's t, and their slopes."""
    inner = errors**2 / _DEGREES_OF_FREEDOM
    damped = np.sign(errors) * np.sqrt(_DEGREES_OF_FREEDOM * np.log1p(inner))
    is_small = np.abs(errors) < 1e-6
    size = np.where(is_small, 1.0, np.abs(damped))
    return damped, np.where(is_small, 1.0, np.abs(errors) / (1 + inner) / size)


def _noise_sds(table: ConfigurationTable) -> Floats:
    """Return the standard deviations of log times, shape (3, K)."""
    factor = np.where(table.is_even, 1.0, UNEVEN_NOISE)
    return np.array(NOISE_SDS)[:, None] * factor


def choose_runs(choices: Sequence[Configuration], *, runs: int = FITTED_RUNS) -> list[int]:
    """Return the indices of the configurations of a model to measure, best first.

    Each step takes the configuration whose time would lower the variance of the predictions of all
    choices most (Krause et al. 2008), before anything of the model was measured. At least
    ``OFFLOADED_RUNS`` use ZeRO-Offload, or as many as there are (Morphling, A.3).

    Raises:
        InvalidInput: there are fewer choices than runs.
    """
    if len(choices) < runs:
        raise InvalidInput(
            "choices",
            f"has {len(choices)} configurations, but {runs} are to be measured; allow more plans,"
            " placements or GPU counts",
        )
    table = ConfigurationTable.of(choices)
    _, gradients = log_gradients(table, np.tile(_VALUES, (len(choices), 1)))
    spread = (gradients[0] * (_SHARED_SDS**2 + _MODEL_SDS**2)) @ gradients[0].T
    noise = _noise_sds(table)[0] ** 2
    missing = min(OFFLOADED_RUNS, int(table.offload.sum()), runs)
    chosen: list[int] = []
    for left in range(runs, 0, -1):
        is_open = np.ones(len(choices), dtype=bool)
        is_open[chosen] = False
        if left <= missing:
            is_open &= table.offload
        gains = (spread**2).sum(axis=0) / (np.diag(spread) + noise)
        best = int(np.where(is_open, gains, -1.0).argmax())
        chosen.append(best)
        missing -= int(table.offload[best])
        column = spread[:, best]
        spread = spread - np.outer(column, column) / (spread[best, best] + noise[best])
    return chosen
