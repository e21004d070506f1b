"""Times of collectives from measured tables, also for layouts that were not measured.

Between measured sizes, the logarithm of time is interpolated over the logarithm of size. Below the
smallest size, its time applies, and above the largest, its bandwidth. For a layout that was not
measured, the time of the fitted links is multiplied by a factor that kriging derives from measured
layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from tessera.estimator.collectives.fitting import (
    KNOTS,
    LinkFits,
    TableKind,
    fit_kinds,
    groups_of,
    sample_table,
    sheet_rates,
)
from tessera.estimator.collectives.kriging import Kriging, SimilarityWeights, fit_kriging
from tessera.estimator.collectives.links import LinkRates, check_collectives, link_seconds
from tessera.estimator.collectives.records import Curve, Layout
from tessera.estimator.hardware import Hardware
from tessera.estimator.plans import Groups, Primitive, Shape
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints

MEASURED_SD: Final = (0.15, 0.02)
"""Standard deviations of the logarithm of a measured time, below ``LARGE_BYTES`` and from there on.
The artifact's tables of pairs in a node differ by this much between numbers of nodes."""
LARGE_BYTES: Final = 2.0**24
OCTAVE_SD: Final = 0.05
"""Additional standard deviation at an octave from the nearest measured size. With every other
octave of the artifact's tables left out, the median error was 3.2 %, and 68 % were within 5.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """Measured tables with everything fitted to them, shared by every :class:`TableNetwork`."""

    curves: dict[Layout, Curve]
    fits: LinkFits
    kriging: Kriging

    @classmethod
    def of(cls, curves: Sequence[Curve], likeness: SimilarityWeights | None = None) -> Self:
        """Fit the links and the distances of tables from them.

        Raises:
            InvalidInput: no table.
        """
        if not curves:
            raise InvalidInput("curves", "must contain at least one measured table")
        fits = fit_kinds(curves)
        return cls(
            curves={curve.layout: curve for curve in curves},
            fits=fits,
            kriging=fit_kriging(
                [curve.layout for curve in curves],
                log_distances(curves, fits),
                likeness or SimilarityWeights(),
            ),
        )

    def networks(self, gpu_type: str) -> tuple[str, ...]:
        """Return the networks on which a GPU type was measured."""
        names = {x.network for x in self.curves if x.gpu_type == gpu_type}
        return tuple(sorted(names))


def log_distances(curves: Sequence[Curve], fits: LinkFits) -> Floats:
    """Return the log of measured over modelled time at the knots, shape (C, Q).

    Beyond the sizes of a table, the distances at its ends apply.
    """
    rows = []
    for curve in curves:
        rates = fits.of(TableKind.of(curve.layout), sheet_rates(curve.layout.gpu_type))
        table = sample_table(curve)
        rows.append(table.log_seconds - table.log_modelled(rates))
    return np.array(rows)


def _modelled_s(layout: Layout, payload_bytes: Floats, rates: LinkRates) -> Floats:
    groups = groups_of([layout] * len(payload_bytes))
    return link_seconds(rates, layout.primitive, payload_bytes, groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TableCurve:
    """A curve for interpolation, with its uncertainty."""

    log_bytes: Floats
    log_seconds: Floats
    sd: tuple[float, float]  # of log seconds, below and from LARGE_BYTES
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableNetwork:
    """A :class:`tessera.estimator.plans.Network` of measured tables for nodes of one GPU type.

    ``network`` names the tables to use. It may be "" if the type has a single network or was not
    measured. Measured sends include the control messages of a runtime, about 1 ms in the Arena
    artifact's tables. Unless ``control_messages`` is set, they are subtracted as the difference of
    fitted launches.
    """

    tables: Tables
    hardware: Hardware
    shape: Shape
    network: str = ""
    control_messages: bool = True
    _known: dict[Layout, _TableCurve] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Choose the network if none is given."""
        name, have = self.hardware.name, self.tables.networks(self.hardware.name)
        if self.network and have and self.network not in have:
            raise InvalidInput(
                "network",
                f"{name} was not measured on {self.network!r}; use one of {', '.join(have)}",
            )
        if not self.network:
            if len(have) > 1:
                raise InvalidInput(
                    "network", f"{name} was measured on several; name one of {', '.join(have)}"
                )
            object.__setattr__(self, "network", have[0] if have else "default")

    def seconds(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return the seconds of each collective, shape (K,).

        They are 0 for groups of one GPU and for empty payloads.
        """
        check_collectives(payload_bytes, groups, self.shape)
        sends = (groups.size > 1) & (payload_bytes > 0)
        if not sends.any():
            return np.zeros(len(payload_bytes))
        which, known = self._looked_up(primitive, groups)
        payload = np.where(payload_bytes > 0, payload_bytes, 1.0)
        seconds = _interpolated_s(payload, which, known)
        if primitive is Primitive.SEND and not self.control_messages:
            seconds = self._without_control(seconds)
        return np.where(sends, seconds, 0.0)

    def uncertainty(self, primitive: Primitive, payload_bytes: Floats, groups: Groups) -> Floats:
        """Return the standard deviation of the logarithm of each time, shape (K,).

        It approximates the relative error and grows with the distance to the nearest measured size.
        For layouts that were not measured, it also grows with their distance from measured ones.
        """
        check_collectives(payload_bytes, groups, self.shape)
        which, known = self._looked_up(primitive, groups)
        payload = np.log(np.where(payload_bytes > 0, payload_bytes, 1.0))
        large = (payload_bytes >= LARGE_BYTES).astype(np.int64)
        sd = np.array([k.sd for k in known])[which, large]
        gap = np.zeros(len(payload))
        for u, k in enumerate(known):
            rows = which == u
            gap[rows] = _gap_octaves(payload[rows], k.log_bytes)
        return np.where(groups.size > 1, np.hypot(sd, OCTAVE_SD * gap), 0.0)

    def measured(self, primitive: Primitive, groups: Groups) -> NDArray[np.bool_]:
        """Return whether each layout was measured, shape (K,)."""
        which, known = self._looked_up(primitive, groups)
        return np.array([k.measured for k in known])[which]

    def _looked_up(self, primitive: Primitive, groups: Groups) -> tuple[Ints, list[_TableCurve]]:
        """Return the distinct layouts' curves, and the index of each row's curve, shape (K,)."""
        code = (groups.size << 40) | (groups.nodes << 20) | groups.node_groups
        codes, which = np.unique(code, return_inverse=True)
        mask = (1 << 20) - 1
        layouts = [
            self._layout(primitive, int(c >> 40), int((c >> 20) & mask), int(c & mask))
            for c in codes
        ]
        for layout in layouts:
            if layout not in self._known:
                self._known[layout] = self._curve_of(layout)
        return which.astype(np.int64), [self._known[layout] for layout in layouts]

    def _layout(self, primitive: Primitive, size: int, nodes: int, node_groups: int) -> Layout:
        return Layout(
            primitive=primitive,
            gpu_type=self.hardware.name,
            network=self.network,
            machine=self.shape,
            size=size,
            nodes=nodes,
            node_groups=node_groups,
        )

    def _curve_of(self, layout: Layout) -> _TableCurve:
        if (curve := self.tables.curves.get(layout)) is not None:
            return _TableCurve(
                log_bytes=np.log(curve.payload_bytes),
                log_seconds=np.log(curve.seconds),
                sd=MEASURED_SD,
                measured=True,
            )
        distance, sd = self.tables.kriging.predict([layout])
        sends = layout.primitive is Primitive.SEND
        rates = self._rates(sends=sends)
        small, large = MEASURED_SD
        link_sd = self.tables.fits.sd(self._kind(sends=sends), crossing=layout.nodes > 1)
        return _TableCurve(
            log_bytes=np.log(KNOTS),
            log_seconds=np.log(_modelled_s(layout, KNOTS, rates)) + distance[0],
            sd=(math.hypot(sd[0], link_sd, small), math.hypot(sd[0], link_sd, large)),
            measured=False,
        )

    def _rates(self, *, sends: bool) -> LinkRates:
        return self.tables.fits.of(self._kind(sends=sends), LinkRates.of(self.hardware))

    def _kind(self, *, sends: bool) -> TableKind:
        return TableKind(gpu_type=self.hardware.name, network=self.network, sends=sends)

    def _without_control(self, seconds: Floats) -> Floats:
        launch_s = self._rates(sends=False).launch_s
        control_s = max(0.0, self._rates(sends=True).launch_s - launch_s)
        return np.maximum(seconds - control_s, np.minimum(seconds, launch_s))


_CURVE_DISTANCE: Final = 1e3
"""Distance between curves on one axis, larger than the logarithm of any size."""


def _interpolated_s(payload_bytes: Floats, which: Ints, known: Sequence[_TableCurve]) -> Floats:
    low = np.array([k.log_bytes[0] for k in known])[which]
    high = np.array([k.log_bytes[-1] for k in known])[which]
    size = np.log(payload_bytes)
    # Put all curves on one axis, so that one interpolation covers all of them.
    axis = np.concatenate([k.log_bytes + _CURVE_DISTANCE * u for u, k in enumerate(known)])
    times = np.concatenate([k.log_seconds for k in known])
    inside = np.interp(np.clip(size, low, high) + _CURVE_DISTANCE * which, axis, times)
    return np.asarray(np.exp(inside + np.maximum(size - high, 0.0)), dtype=np.float64)


def _gap_octaves(log_payload: Floats, log_sizes: Floats) -> Floats:
    """Return the octaves to the nearest measured size, shape (K,)."""
    right = np.clip(np.searchsorted(log_sizes, log_payload), 0, len(log_sizes) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.minimum(
        np.abs(log_payload - log_sizes[left]), np.abs(log_payload - log_sizes[right])
    )
    return np.asarray(nearest / np.log(2), dtype=np.float64)
