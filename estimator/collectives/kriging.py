"""Interpolation between layouts of the differences between measured tables and the link model.

The method is kriging, i.e. Gaussian process regression (Rasmussen and Williams, "Gaussian Processes
for Machine Learning", 2006, equations 2.25 and 2.26; leaving one out in closed form, equations 5.10
to 5.12). Similar layouts have similar differences. The covariance is the sum of two parts: one for
the same GPU type and machine, and one that all types share (the protocols of the library).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tessera.estimator.collectives.records import Layout
from tessera.estimator.plans import Primitive
from tessera.formulation.base.tables import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityWeights:
    """Weights of the differences between layouts.

    The similarity is exp(-sum of weight * squared difference), with differences of counts in
    octaves. The defaults are the rounded results of :func:`tune_weights` on the Arena artifact's
    tables.
    """

    primitive: float = 0.3
    gpu_type: float = 1.5
    machine_nodes: float = 0.4
    machine_gpus: float = 0.45
    size: float = 0.2
    nodes: float = 1.4
    node_groups: float = 0.05
    crossing: float = 50.0
    noise: float = 0.08  # variance that no other table explains
    common: float = 1.0  # variance of the part common to GPU types, relative to the other part


_SCALING: Final = {Primitive.REDUCE_SCATTER, Primitive.ALL_GATHER}
_SCALING_DISTANCE: Final = 0.2
"""Difference of reduce-scatter and all-gather, which move the same bytes over the same links in
opposite order."""
_SEND_DISTANCE: Final = 6.0
"""Difference of a send from a collective. A measured send goes through other software."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutDifferences:
    """The squared differences between the layouts of two lists, each of shape (A, C)."""

    primitive: Floats
    gpu_type: Floats
    counts: NDArray[np.float64]  # (A, C, 6), in the order of Likeness


def layout_differences(a: Sequence[Layout], b: Sequence[Layout]) -> LayoutDifferences:
    """Return the differences of the layouts ``a`` from the layouts ``b``."""
    return LayoutDifferences(
        primitive=_PRIMITIVE_DISTANCES[_codes(a)[:, None], _codes(b)[None]],
        gpu_type=(_systems(a)[:, None] != _systems(b)[None]).astype(np.float64),
        counts=(_counts(a)[:, None] - _counts(b)[None]) ** 2,
    )


def layout_covariance(d: LayoutDifferences, likeness: SimilarityWeights) -> Floats:
    """Return the covariance without noise, shape (A, C)."""
    weights = np.array(astuple(likeness)[2:8])
    alike = np.exp(
        -likeness.primitive * d.primitive - likeness.gpu_type * d.gpu_type - d.counts @ weights
    )
    general = np.exp(-likeness.primitive * d.primitive - d.counts[:, :, 2:] @ weights[2:])
    return np.asarray(alike + likeness.common * general, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kriging:
    """A predictor from the values of C ``layouts`` at Q knots to those of other layouts."""

    layouts: tuple[Layout, ...]
    likeness: SimilarityWeights
    inverse: Floats  # of the covariance with noise, shape (C, C)
    dual: Floats  # inverse @ values, shape (C, Q)
    variance: float  # of values without any information

    def predict(self, layouts: Sequence[Layout]) -> tuple[Floats, Floats]:
        """Return values, shape (A, Q), and their standard deviations, shape (A,)."""
        near = layout_covariance(layout_differences(layouts, self.layouts), self.likeness)
        at_itself = 1 + self.likeness.common + self.likeness.noise
        explained = np.einsum("ac,cd,ad->a", near, self.inverse, near, optimize=True)
        left = np.maximum(at_itself - explained, self.likeness.noise)
        return near @ self.dual, np.sqrt(self.variance * left)


def fit_kriging(layouts: Sequence[Layout], values: Floats, likeness: SimilarityWeights) -> Kriging:
    """Return a predictor of ``values``, shape (C, Q), for layouts other than the given ones.

    The scale of its uncertainty is the error of predicting each given layout from the others.
    """
    inverse = _inverse(layout_differences(layouts, layouts), likeness)
    dual = inverse @ values
    own = np.diag(inverse)
    return Kriging(
        layouts=tuple(layouts),
        likeness=likeness,
        inverse=inverse,
        dual=dual,
        variance=float(np.mean(dual**2 / own[:, None])) if len(layouts) > 1 else 1.0,
    )


def left_out_error(d: LayoutDifferences, values: Floats, likeness: SimilarityWeights) -> float:
    """Return the mean absolute error of predicting each layout from the others."""
    inverse = _inverse(d, likeness)
    return float(np.abs(inverse @ values / np.diag(inverse)[:, None]).mean())


def tune_weights(
    layouts: Sequence[Layout], values: Floats, start: SimilarityWeights, sweeps: int = 2
) -> SimilarityWeights:
    """Return weights that predict each layout better from the others, found by coordinate search."""
    d = layout_differences(layouts, layouts)
    best, error = start, left_out_error(d, values, start)
    for _ in range(sweeps):
        for name in SimilarityWeights.__dataclass_fields__:
            for factor in (0.3, 0.6, 1.6, 3.0):
                other = replace(best, **{name: factor * getattr(best, name)})
                new_error = left_out_error(d, values, other)
                if new_error < error:
                    best, error = other, new_error
    return best


def _inverse(d: LayoutDifferences, likeness: SimilarityWeights) -> Floats:
    covariance = layout_covariance(d, likeness)
    return np.asarray(
        np.linalg.inv(covariance + likeness.noise * np.eye(len(covariance))), dtype=np.float64
    )


_ORDER: Final = {primitive: i for i, primitive in enumerate(Primitive)}


def _primitive_distance(a: Primitive, b: Primitive) -> float:
    if a is b:
        return 0.0
    if Primitive.SEND in {a, b}:
        return _SEND_DISTANCE
    return _SCALING_DISTANCE if {a, b} == _SCALING else 1.0


_PRIMITIVE_DISTANCES: Final[Floats] = np.array(
    [[_primitive_distance(a, b) for b in Primitive] for a in Primitive]
)


def _codes(layouts: Sequence[Layout]) -> NDArray[np.int64]:
    return np.array([_ORDER[x.primitive] for x in layouts], dtype=np.int64)


def _systems(layouts: Sequence[Layout]) -> NDArray[np.str_]:
    return np.array([f"{x.gpu_type}/{x.network}" for x in layouts], dtype=np.str_)


def _counts(layouts: Sequence[Layout]) -> Floats:
    counts = [
        (x.machine.nodes, x.machine.gpus_per_node, x.size, x.nodes, x.node_groups) for x in layouts
    ]
    octaves = np.log2(np.array(counts, dtype=np.float64).reshape(-1, 5))
    return np.column_stack([octaves, octaves[:, 3] > 0])
