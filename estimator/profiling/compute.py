"""Seconds of layers from profile records, or from another source scaled to similar records.

This is a :class:`tessera.estimator.plans.Compute`. It does not need JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera.estimator.graph import Graph
from tessera.estimator.plans import Compute, Training
from tessera.estimator.profiling.records import ProfileRecord, check_provenance
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints

Point = tuple[float, float, float]
"""Samples, with forward and backward seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of a graph's FLOPs by the origin of their seconds, at a tensor degree. They sum to 1.

    ``scaled`` seconds are the fallback times the ratio of measured to fallback seconds of similar
    kinds. ``unscaled`` seconds are the fallback alone, because no kind of the graph was measured.
    """

    measured: float
    scaled: float
    unscaled: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCompute:
    """Seconds measured on one device, interpolated over samples.

    Beyond the measured samples, the nearest measurement grows as ``fallback`` does. A (kind,
    degree) without a measurement takes the fallback times the geometric mean ratio of the nearest
    similar kinds. They are the same kind at another degree, kinds of the same main operator, or all
    kinds of the graph. Joined layers (``graph.merge_layers``) are the sum of their parts if each
    part was measured.
    """

    records: Sequence[ProfileRecord]
    fallback: Compute
    _points: Mapping[tuple[str, int], tuple[Point, ...]] = field(init=False)

    def __post_init__(self) -> None:
        """Group the records.

        Raises:
            InvalidInput: there are no records, or they have several devices, versions or data
                types.
        """
        if not self.records:
            raise InvalidInput("records", "must not be empty; profile the model first")
        first = self.records[0]
        check_provenance(self.records, versions=first.versions, device=first.device)
        if len({r.dtype for r in self.records}) > 1:
            raise InvalidInput("records", "must all have one data type; load each type separately")
        grouped: dict[tuple[str, int], dict[float, Point]] = {}
        for r in self.records:  # a later measurement replaces an earlier one
            grouped.setdefault((r.kind, r.tp), {})[r.samples] = (
                r.samples,
                r.forward_s,
                r.backward_s,
            )
        points = {key: tuple(sorted(series.values())) for key, series in grouped.items()}
        object.__setattr__(self, "_points", points)

    def coverage(self, graph: Graph, tp: int) -> Coverage:
        """Return the origin of a graph's seconds at a tensor degree."""
        total = max(float(graph.flops.sum()), 1e-300)
        known = [bool(self._series(kind, tp)) for kind in graph.kind]
        measured = float(graph.flops[known].sum()) / total
        like = any(self._series(k, degree) for k in graph.kind for degree in self._degrees())
        rest = max(0.0, 1.0 - measured)
        return Coverage(
            measured=measured, scaled=rest if like else 0.0, unscaled=0.0 if like else rest
        )

    def layer_s(
        self, graph: Graph, training: Training, samples: Floats, tp: Ints
    ) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of each layer, both of shape (D, L)."""
        if graph.dtype != self.records[0].dtype:
            raise InvalidInput(
                "records",
                f"have the data type {self.records[0].dtype}, but the graph has {graph.dtype};"
                " profile the model in that type",
            )
        samples, tp = np.asarray(samples, dtype=np.float64), np.asarray(tp, dtype=np.int64)
        plain = np.stack(self.fallback.layer_s(graph, training, samples, tp))  # (2, D, L)
        anchors = self._anchors(graph, training)
        result = plain.copy()
        for degree in np.unique(tp).tolist():
            rows = np.flatnonzero(tp == degree)
            for kind in dict.fromkeys(graph.kind):
                columns = np.flatnonzero(np.array(graph.kind) == kind)
                place = np.ix_(np.arange(2), rows, columns)
                if series := self._series(kind, degree):
                    base = anchors[kind, degree]
                    grown = plain[:, rows, columns[0]]
                    result[place] = _interpolated(series, base, samples[rows], grown)[:, :, None]
                else:
                    result[place] = plain[place] * self._ratio(kind, anchors)[:, None, None]
        return result[0], result[1]

    def _degrees(self) -> list[int]:
        return sorted({degree for _, degree in self._points})

    def _series(self, kind: str, tp: int) -> tuple[Point, ...]:
        """Return a kind's measurements by samples.

        For a joined kind, they are sums, for the numbers of samples at which all parts were
        measured.
        """
        parts = [self._points.get((part, tp), ()) for part in kind.split("+")]
        shared = set.intersection(*({p[0] for p in part} for part in parts))
        sums = [
            (s, *np.sum([p[1:] for part in parts for p in part if p[0] == s], axis=0).tolist())
            for s in sorted(shared)
        ]
        return tuple(sums)

    def _anchors(self, graph: Graph, training: Training) -> dict[tuple[str, int], Floats]:
        """Return the fallback's seconds at each kind's measured samples, shape (2, points)."""
        anchors: dict[tuple[str, int], Floats] = {}
        for degree in self._degrees():
            for column, kind in enumerate(graph.kind):
                series = self._series(kind, degree) if (kind, degree) not in anchors else ()
                if series:
                    at = np.array([p[0] for p in series])
                    both = self.fallback.layer_s(
                        graph, training, at, np.full(len(at), degree, dtype=np.int64)
                    )
                    anchors[kind, degree] = np.stack(both)[:, :, column]
        return anchors

    def _ratio(self, kind: str, anchors: Mapping[tuple[str, int], Floats]) -> Floats:
        """Return the ratio of measured to fallback seconds of similar kinds, forward and backward.

        Without similar kinds, the ratio is 1.
        """
        operator = kind.partition("-")[0]
        tests = (
            lambda other: other == kind,
            lambda other: other.partition("-")[0] == operator,
            lambda other: True,
        )
        for like in tests:
            logs = [
                np.log(np.array([p[1:] for p in self._series(other, degree)]).T / base)
                for (other, degree), base in anchors.items()
                if like(other)
            ]
            seen = [log[:, np.isfinite(log).all(axis=0)] for log in logs]
            if sum(log.shape[1] for log in seen):
                return np.asarray(np.exp(np.concatenate(seen, axis=1).mean(axis=1)))
        return np.ones(2)


def _interpolated(series: Sequence[Point], base: Floats, samples: Floats, grown: Floats) -> Floats:
    """Return seconds, shape (2, D).

    They are linear between measurements. Beyond them, they grow as ``grown`` does relative to the
    ``base`` of the nearest measurement.
    """
    at = np.array([p[0] for p in series])
    seconds = np.array([p[1:] for p in series]).T  # (2, points)
    inside = np.stack([np.interp(samples, at, row) for row in seconds])
    end = np.where(samples < at[0], 0, len(at) - 1)
    base_end = base[:, end]
    growth = np.divide(grown, base_end, out=np.ones_like(grown), where=base_end > 0)
    outside = (samples < at[0]) | (samples > at[-1])
    return np.where(outside, seconds[:, end] * growth, inside)
