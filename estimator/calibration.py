"""Correction of the model and its estimates by measured iteration times, with uncertainty.

The logarithm of an iteration time is assumed to be normal. It is the sum of three parts: the model
at parameters that differ by family and by GPU type, a residual that similar Cells share, and noise.

With the model linearised in its log parameters, all of this is one Gaussian process (Rasmussen and
Williams 2006, sections 2.2 and 2.7). A few measurements are therefore enough, and none is required.
Each new one has an immediate effect, and every estimate has an uncertainty. The noise has heavy
tails, because single runs go wrong (Student's t by reweighting; Jylänki et al. 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints

Names = NDArray[np.str_]

NOISE_DEGREES_OF_FREEDOM = 4.0
"""Degrees of freedom of the noise. The value is a usual one, between Cauchy and normal noise (Lange
et al. 1989)."""
LINEARISATION_PASSES = 4
"""Number of linearisations of the model, and of reweightings after each linearisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A positive parameter of the model.

    The standard deviations are those of its logarithm: of the value that all share, of the part of
    a model family, and of the part of a GPU type.
    """

    name: str
    value: float
    shared_sd: float
    family_sd: float
    gpu_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The properties of a Cell by which it is compared with others."""

    family: str
    gpu_type: str
    nodes: int
    gpus_per_node: int
    global_batch: int
    parameters: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured iteration time of a Cell."""

    subject: Subject
    iter_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Standard deviations of the log time that the model misses, and length scales of similarity.

    The length scales are in doublings of GPUs and of the batch, and in e-folds of the parameters.
    """

    gpu_sd: float = 0.08  # of a GPU type at similar counts and batches
    family_sd: float = 0.1  # of a family at similar counts, batches and sizes
    pair_sd: float = 0.08  # of a family on a GPU type
    shape_sd: float = 0.18
    """Standard deviation of a shape (nodes x GPUs) of a GPU type, i.e. of its machines and network.
    It applies in full from 4 GPUs on, by half to two GPUs, and not to a single GPU."""
    noise_sd: float = 0.1
    gpus_length: float = 1.5
    batch_length: float = 3.0
    size_length: float = 1.0


class TimeModel(Protocol):
    """A model of iteration time with ``P`` positive parameters."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Return the parameters, in the order of the columns of ``log_values``."""
        ...

    def log_times(self, subjects: Sequence[Subject], log_values: Floats) -> tuple[Floats, Floats]:
        """Return log seconds, shape (K,), and their gradients by the log parameters, shape (K, P).

        ``log_values`` has shape (K, P). A time is NaN if the model has no execution plan for the
        subject.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An iteration time. Its logarithm has the standard deviation ``sd``."""

    iter_time_s: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Features:
    """Subjects as columns of shape (K,)."""

    family: Names
    gpu_type: Names
    nodes: Ints
    per_node: Ints
    gpus: Floats  # log2
    batch: Floats  # log2
    size: Floats  # natural log


def _features(subjects: Sequence[Subject]) -> _Features:
    return _Features(
        family=np.array([s.family for s in subjects], dtype=np.str_),
        gpu_type=np.array([s.gpu_type for s in subjects], dtype=np.str_),
        nodes=np.array([s.nodes for s in subjects], dtype=np.int64),
        per_node=np.array([s.gpus_per_node for s in subjects], dtype=np.int64),
        gpus=np.array([math.log2(s.nodes * s.gpus_per_node) for s in subjects]),
        batch=np.array([math.log2(s.global_batch) for s in subjects]),
        size=np.array([math.log(s.parameters) for s in subjects]),
    )


def _squared_distances(a: Floats, b: Floats, length: float) -> Floats:
    """Return squared distances in units of ``length``, shape (A, B)."""
    return ((a[:, None] - b[None, :]) / length) ** 2


def _same_groups(a: _Features, b: _Features) -> tuple[Bools, Bools, Bools]:
    """Return which pairs share the family, the GPU type, and the GPU type and shape.

    Each array has shape (A, B).
    """
    family = a.family[:, None] == b.family[None, :]
    gpu = a.gpu_type[:, None] == b.gpu_type[None, :]
    nodes = a.nodes[:, None] == b.nodes[None, :]
    return family, gpu, gpu & nodes & (a.per_node[:, None] == b.per_node[None, :])


def _covariance(prior: _Prior, a: _Features, by_a: Floats, b: _Features, by_b: Floats) -> Floats:
    """Return the prior covariance of log times, shape (A, B).

    The gradients ``by_a`` and ``by_b`` have shapes (A, P) and (B, P).
    """
    family, gpu, shape = _same_groups(a, b)
    total = (by_a * prior.shared) @ by_b.T
    total += family * ((by_a * prior.family) @ by_b.T) + gpu * ((by_a * prior.gpu) @ by_b.T)
    r = prior.residual
    # Similarity fades with the distance in GPUs and batch, and for families also in size.
    apart = _squared_distances(a.gpus, b.gpus, r.gpus_length) + _squared_distances(
        a.batch, b.batch, r.batch_length
    )
    near = np.exp(-0.5 * apart)
    nearer = near * np.exp(-0.5 * _squared_distances(a.size, b.size, r.size_length))
    # The residual of a shape is half as large for two GPUs and 0 for one.
    many = np.outer(np.minimum(a.gpus / 2, 1.0), np.minimum(b.gpus / 2, 1.0))
    total += gpu * (r.gpu_sd**2 * near) + shape * (r.shape_sd**2 * many)
    total += family * (r.family_sd**2 * nearer) + (family & gpu) * (r.pair_sd**2 * nearer)
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prior:
    """The parameters as arrays of shape (P,): log values, and variances of their three parts."""

    log_values: Floats
    shared: Floats
    family: Floats
    gpu: Floats
    residual: Residual


def _prior_of(parameters: Sequence[Parameter], residual: Residual) -> _Prior:
    return _Prior(
        log_values=np.log([p.value for p in parameters]),
        shared=np.square([p.shared_sd for p in parameters]),
        family=np.square([p.family_sd for p in parameters]),
        gpu=np.square([p.gpu_sd for p in parameters]),
        residual=residual,
    )


class Calibration:
    """A model with the corrections learned from measurements.

    Without measurements it is the model at its defaults.
    """

    def __init__(
        self,
        model: TimeModel,
        measurements: Sequence[Measurement] = (),
        residual: Residual | None = None,
    ) -> None:
        """Learn from ``measurements``, except those for which the model has no execution plan.

        Raises:
            InvalidInput: a time is not positive and finite.
        """
        self.model = model
        self._prior = _prior_of(model.parameters, residual or Residual())
        for m in measurements:
            if not (math.isfinite(m.iter_time_s) and m.iter_time_s > 0):
                raise InvalidInput(
                    "iter_time_s", f"must be above 0 s, not {m.iter_time_s}, for {m.subject}"
                )
        self._known = _features([])
        self._gradients = np.zeros((0, len(model.parameters)))
        self._weights = np.zeros(0)
        self._solve = np.zeros((0, 0))
        self.left_out = 0
        if measurements:
            self._learn(measurements)

    def _learn(self, measurements: Sequence[Measurement]) -> None:
        subjects = [m.subject for m in measurements]
        times = np.log([m.iter_time_s for m in measurements])
        for _ in range(LINEARISATION_PASSES):
            at = self.log_values(subjects)
            values, gradients = self.model.log_times(subjects, at)
            runs = np.isfinite(values)
            if not runs.all():
                self.left_out += int((~runs).sum())
                subjects = [s for s, r in zip(subjects, runs, strict=True) if r]
                at, values, gradients, times = at[runs], values[runs], gradients[runs], times[runs]
            if not subjects:
                return
            known = _features(subjects)
            # Extend the model's tangent at ``at`` to the defaults. The offsets are what remains to
            # explain.
            offsets = times - values + (gradients * (at - self._prior.log_values)).sum(axis=1)
            covariance = _covariance(self._prior, known, gradients, known, gradients)
            self._solve, self._weights = _robust_inverse(
                covariance, offsets, self._prior.residual.noise_sd
            )
            self._known, self._gradients = known, gradients

    def log_values(self, subjects: Sequence[Subject]) -> Floats:
        """Return the log parameters that hold for each subject, shape (K, P)."""
        at = np.tile(self._prior.log_values, (len(subjects), 1))
        if not len(self._weights):
            return at
        family, gpu, _ = _same_groups(_features(subjects), self._known)
        pull = self._weights[:, None] * self._gradients
        p = self._prior
        learned = pull.sum(axis=0) * p.shared
        result: Floats = at + learned + (family @ pull) * p.family + (gpu @ pull) * p.gpu
        return result

    def estimates(self, subjects: Sequence[Subject]) -> list[Estimate | None]:
        """Return the iteration times. An entry is None if the model has no execution plan."""
        if not subjects:
            return []
        at = self.log_values(subjects)
        values, gradients = self.model.log_times(subjects, at)
        features = _features(subjects)
        own = np.array(
            [
                _covariance(self._prior, f, g, f, g)[0, 0]
                for f, g in ((_features([s]), gradients[i : i + 1]) for i, s in enumerate(subjects))
            ]
        )
        if len(self._weights):
            cross = _covariance(self._prior, features, gradients, self._known, self._gradients)
            linear = (gradients * (at - self._prior.log_values)).sum(axis=1)
            values = values - linear + cross @ self._weights
            own = own - np.einsum("ij,jk,ik->i", cross, self._solve, cross)
        sds = np.sqrt(np.maximum(own, 0.0) + self._prior.residual.noise_sd**2)
        return [
            Estimate(iter_time_s=math.exp(v), sd=float(sd)) if math.isfinite(v) else None
            for v, sd in zip(values.tolist(), sds, strict=True)
        ]


def _robust_inverse(covariance: Floats, offsets: Floats, noise_sd: float) -> tuple[Floats, Floats]:
    """Return the inverse of covariance plus noise, shape (K, K), and its product with ``offsets``.

    The product has shape (K,). The noise of a measurement grows with its distance from the fit, by
    the weights of Student's t.
    """
    trust = np.ones(len(offsets))
    for _ in range(LINEARISATION_PASSES):
        noisy = covariance + np.diag(noise_sd**2 / trust)
        inverse = np.linalg.inv(noisy).astype(np.float64)
        weights: Floats = inverse @ offsets
        distance = (offsets - covariance @ weights) / noise_sd
        trust = np.minimum(
            (NOISE_DEGREES_OF_FREEDOM + 1) / (NOISE_DEGREES_OF_FREEDOM + distance**2), 1.0
        )
    return inverse, weights


def select_measurements(
    model: TimeModel,
    choices: Sequence[Subject],
    targets: Sequence[Subject],
    most: int,
    residual: Residual | None = None,
) -> list[int]:
    """Return the indices of the Cells to measure, best first.

    At most ``most`` choices are returned for each family and GPU type. Each step greedily takes the
    choice that reduces the variance of the estimates of ``targets`` most (Krause et al. 2008). This
    is done at the model's defaults, without any measured time.
    """
    prior = _prior_of(model.parameters, residual or Residual())
    subjects = [*choices, *targets]
    at = np.tile(prior.log_values, (len(subjects), 1))
    values, gradients = model.log_times(subjects, at)
    gradients = np.where(np.isfinite(values)[:, None], gradients, 0.0)
    features = _features(subjects)
    left = _covariance(prior, features, gradients, features, gradients)
    open_ = np.isfinite(values[: len(choices)])
    noise = prior.residual.noise_sd**2
    pairs = [(s.family, s.gpu_type) for s in choices]
    chosen: list[int] = []
    while open_.any():
        gains = (left[len(choices) :, : len(choices)] ** 2).sum(axis=0)
        gains = gains / (np.diag(left)[: len(choices)] + noise)
        best = int(np.where(open_, gains, -1.0).argmax())
        chosen.append(best)
        # Condition all remaining covariances on the chosen measurement.
        column = left[:, best]
        left = left - np.outer(column, column) / (left[best, best] + noise)
        open_[best] = False
        if sum(pairs[i] == pairs[best] for i in chosen) >= most:
            open_ &= np.array([p != pairs[best] for p in pairs])
    return chosen
