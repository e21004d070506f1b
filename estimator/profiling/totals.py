"""Times of layers from data sheets, scaled to the measured time of their model. This needs no JAX.

They serve a model whose graph is not the profiled one, so that layers cannot be matched one by one.
An example is a JAX step that was measured for an architecture described by its sizes. The result is
a :class:`tessera.estimator.plans.Compute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.plans import Compute, Training
from tessera.estimator.profiling.compute import Point
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTotals:
    """Layer times of ``fallback``, scaled by the ratio of measured to fallback model seconds.

    ``points`` has the time of all layers together for some numbers of samples, by tensor degree.
    Between these, the logarithm of the ratio is linear in the logarithm of samples, and beyond them
    it is constant. A degree that was not measured has the ratios of the nearest one that was.
    """

    points: Mapping[int, Sequence[Point]]
    fallback: Compute

    def __post_init__(self) -> None:
        """Check that something was measured.

        Raises:
            InvalidInput: nothing was measured.
        """
        if not self.points or not all(self.points.values()):
            raise InvalidInput("points", "nothing was measured; profile first")

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        samples, tp = np.asarray(samples, dtype=np.float64), np.asarray(tp, dtype=np.int64)
        result = np.stack(self.fallback.layer_s(graph, training, samples, tp))  # (2, D, L)
        for degree in np.unique(tp).tolist():
            rows = np.flatnonzero(tp == degree)
            at, log_ratio = self._log_ratios(graph, training, degree)
            where = np.log(samples[rows])
            scale = np.exp([np.interp(where, at, each) for each in log_ratio])  # (2, rows)
            result[:, rows] *= scale[:, :, np.newaxis]
        return result[0], result[1]

    def _log_ratios(self, graph: Graph, training: Training, tp: int) -> tuple[Floats, Floats]:
        """Return log samples, ascending, and log ratios, (2, points), at the nearest degree."""
        degree = min(self.points, key=lambda known: (abs(log2(known) - log2(tp)), known))
        points = sorted(self.points[degree])
        samples = np.array([p[0] for p in points])
        measured = np.array([p[1:] for p in points]).T
        plain = np.stack(
            self.fallback.layer_s(
                graph, training, samples, np.full(len(points), degree, dtype=np.int64)
            )
        ).sum(axis=2)
        forward, both = np.log(measured[0] / plain[0]), measured[1] > 0
        backward = np.log(np.where(both, measured[1] / plain[1], 1.0))
        # A backward pass that is too short to be measured is assumed to have the ratio of its
        # forward pass.
        return np.log(samples), np.stack([forward, np.where(both, backward, forward)])
