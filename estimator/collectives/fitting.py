"""Rates of links fitted to measured tables: least squares on log times, with a data sheet prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tessera.estimator.collectives.links import LinkRates, algorithm_work
from tessera.estimator.collectives.records import Curve, Layout
from tessera.estimator.hardware import A10, CATALOGUE
from tessera.estimator.plans import Groups, Primitive
from tessera.formulation.base.tables import Bools, Floats

KNOTS: Final[Floats] = np.exp2(np.arange(2.0, 31.0))
"""Sizes in bytes, one for each octave, at which tables are compared with the model. All sizes have
the same weight."""

_PRIOR_SD: Final = 1.0
"""Standard deviation of the logarithm of a rate, i.e. a factor of e up or down. Ethernet below the
rate of a port deviates more, but has enough rows to outweigh the prior."""
_NOISE_SD: Final = 0.4
"""Standard deviation of a log time about five rates. Measured tables leave 0.3 to 0.5."""
_STEPS: Final = 40
_ALGORITHMS: Final = 3
_RATES: Final = 5
_LINK: Final = 3  # index among the costs
_PORT: Final = 4
_MAD_TO_SD: Final = 1.4826  # for a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTable:
    """A table at Q knots. Knots outside the table's sizes are moved to its ends."""

    work: NDArray[np.float64]  # shape (Q, algorithms, 5)
    log_seconds: Floats  # shape (Q,)
    covered: Bools  # whether each knot is within the table's sizes, shape (Q,); at least one is

    def log_modelled(self, rates: LinkRates) -> Floats:
        """Return the log seconds of the link model, shape (Q,)."""
        return np.asarray(np.log((self.work @ rates.costs).min(axis=1)), dtype=np.float64)


@lru_cache(maxsize=4096)
def sample_table(curve: Curve) -> SampledTable:
    """Return a table at the knots."""
    low, high = curve.payload_bytes[0], curve.payload_bytes[-1]
    knots = np.clip(KNOTS, low, high)
    covered = (KNOTS.clip(low, high * 1.02) - KNOTS) == 0
    covered[np.abs(np.log(KNOTS / low)).argmin()] |= not covered.any()
    done = algorithm_work(curve.layout.primitive, knots, groups_of([curve.layout] * len(knots)))
    padding = [done[:1]] * (_ALGORITHMS - len(done))  # a repeated algorithm changes no minimum
    return SampledTable(
        work=np.concatenate([done, *padding]).transpose(2, 0, 1),
        log_seconds=np.interp(np.log(knots), np.log(curve.payload_bytes), np.log(curve.seconds)),
        covered=covered,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKind:
    """A kind of tables with common rates.

    Sends have rates of their own, because measured sends include the control messages of a runtime.
    """

    gpu_type: str
    network: str
    sends: bool

    @classmethod
    def of(cls, layout: Layout) -> TableKind:
        """Return the kind to which a layout belongs."""
        return cls(
            gpu_type=layout.gpu_type,
            network=layout.network,
            sends=layout.primitive is Primitive.SEND,
        )


def fit_links(curves: Sequence[Curve], prior: LinkRates) -> LinkRates:
    """Return the rates that fit the log times of ``curves`` best, by Gauss-Newton.

    A rate that no table exercises remains at the prior.
    """
    tables = [sample_table(curve) for curve in curves]
    done = np.concatenate([table.work[table.covered] for table in tables])
    log_seconds = np.concatenate([table.log_seconds[table.covered] for table in tables])
    rows = np.arange(len(done))
    start = np.log(prior.costs)
    weight = (_NOISE_SD / _PRIOR_SD) ** 2
    costs = start.copy()
    for _ in range(_STEPS):
        parts = done * np.exp(costs)
        total = parts.sum(axis=2)
        fastest = total.argmin(axis=1)
        slope = parts[rows, fastest] / total[rows, fastest][:, None]
        off = log_seconds - np.log(total[rows, fastest])
        normal = slope.T @ slope + weight * np.eye(len(costs))
        step = np.linalg.solve(normal, slope.T @ off - weight * (costs - start))
        costs += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-6:
            break
    return LinkRates.from_seconds(np.exp(costs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkFits:
    """The rates of the measured kinds of table, and their predictions for other kinds."""

    rates: dict[TableKind, LinkRates]
    exercised: dict[TableKind, Bools]  # which of the five rates its tables exercise

    def of(self, kind: TableKind, sheet: LinkRates) -> LinkRates:
        """Return the fitted rates of a kind, or its :meth:`usual` rates if it was not measured."""
        return self.rates[kind] if kind in self.rates else self.usual(kind, sheet)

    def usual(self, kind: TableKind, sheet: LinkRates) -> LinkRates:
        """Return the base of a kind times the median ratio of rates to bases of similar kinds.

        The base is the data sheet. For sends, it is the rates fitted to collectives on the same
        links, if any were fitted.
        """
        ratios = self._ratios(kind.sends)
        if not len(ratios):
            return LinkRates.from_seconds(self._base(kind, sheet))
        usual = [
            float(np.median(column[known])) if (known := np.isfinite(column)).any() else 0.0
            for column in ratios.T
        ]
        return LinkRates.from_seconds(self._base(kind, sheet) * np.exp(usual))

    def sd(self, kind: TableKind, *, crossing: bool) -> float:
        """Return the standard deviation of the logarithm of the bandwidth that groups need.

        It is 0 for a measured bandwidth. Otherwise it is the spread of the bandwidths of similar
        kinds relative to their bases. The spread is a median absolute deviation, because one of the
        kinds may be Ethernet. If fewer than two kinds were measured, it is 1.
        """
        if kind in self.rates and self.exercised[kind][_PORT if crossing else _LINK]:
            return 0.0
        ratios = self._ratios(kind.sends)[:, [_LINK, _PORT]]
        ratios = ratios[np.isfinite(ratios)]
        if len(ratios) < 2:
            return 1.0
        return float(_MAD_TO_SD * np.median(np.abs(ratios - np.median(ratios))))

    def _ratios(self, sends: bool) -> NDArray[np.float64]:
        """Return the log of fitted over base costs of the measured kinds, shape (kinds, 5).

        Rates that were not exercised are NaN.
        """
        rows = [
            np.where(
                self.exercised[kind],
                np.log(rates.costs / self._base(kind, sheet_rates(kind.gpu_type))),
                np.nan,
            )
            for kind, rates in self.rates.items()
            if kind.sends == sends
        ]
        return np.array(rows).reshape(-1, _RATES)

    def _base(self, kind: TableKind, sheet: LinkRates) -> Floats:
        collectives = replace(kind, sends=False)
        same_links = kind.sends and collectives in self.rates
        return self.rates[collectives].costs if same_links else sheet.costs


def fit_kinds(curves: Sequence[Curve]) -> LinkFits:
    """Return the rates of each kind of table.

    They are fitted twice, first with data sheets as the prior and then with the usual rates. A kind
    without measurements of a port thereby gets the ports of other kinds.
    """
    kinds: dict[TableKind, list[Curve]] = {}
    for curve in curves:
        kinds.setdefault(TableKind.of(curve.layout), []).append(curve)
    exercised = {kind: _exercised_rates(own) for kind, own in kinds.items()}
    first = LinkFits(
        rates={kind: fit_links(own, sheet_rates(kind.gpu_type)) for kind, own in kinds.items()},
        exercised=exercised,
    )
    second = {
        kind: fit_links(own, first.usual(kind, sheet_rates(kind.gpu_type)))
        for kind, own in kinds.items()
    }
    return LinkFits(rates=second, exercised=exercised)


def sheet_rates(gpu_type: str) -> LinkRates:
    """Return the data sheet rates of a GPU type of the catalogue, or of a PCIe node for others."""
    return LinkRates.of(next((h for h in CATALOGUE if h.name == gpu_type), A10))


def _exercised_rates(curves: Sequence[Curve]) -> Bools:
    least = np.concatenate([sample_table(curve).work.min(axis=1) for curve in curves])
    return np.asarray((least > 0).any(axis=0), dtype=np.bool_)


def groups_of(layouts: Sequence[Layout]) -> Groups:
    """Return the groups of the given layouts."""
    return Groups(
        size=np.array([x.size for x in layouts], dtype=np.int64),
        nodes=np.array([x.nodes for x in layouts], dtype=np.int64),
        node_groups=np.array([x.node_groups for x in layouts], dtype=np.int64),
    )
