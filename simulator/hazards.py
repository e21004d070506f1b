"""Failures and lags of nodes, as they are given to a world, and drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.records.clusters import NodeSpec

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A node that is away from ``down_s`` until ``up_s``.

    If ``up_s`` is inf, the node never comes back.
    """

    node: str
    down_s: float
    up_s: float

    def __post_init__(self) -> None:
        """Refuse times that are out of order."""
        if not 0 <= self.down_s < self.up_s:
            raise InvalidInput(
                "failures", f"{self.node}: down_s must be at least 0, and up_s later"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A node on which iterations take ``factor`` times as long from ``start_s`` until ``end_s``.

    If several overlap on a node, the slowest counts. The slowest node of a gang slows the whole
    gang.
    """

    node: str
    start_s: float
    end_s: float
    factor: float

    def __post_init__(self) -> None:
        """Refuse times that are out of order, and factors that speed up."""
        if not 0 <= self.start_s < self.end_s:
            raise InvalidInput(
                "stragglers", f"{self.node}: start_s must be at least 0, and end_s later"
            )
        if not 1 <= self.factor < math.inf:
            raise InvalidInput(
                "stragglers", f"{self.node}: the factor must be at least 1 and finite"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """The rates and lengths of node failures and lags.

    Gaps and lengths are exponential and independent for each node. ``between_failures_s`` is
    counted for one node while it is up.

    The Llama 3 report (section 3.3.4) counts 419 unexpected interruptions in 54 days of 16,384
    GPUs. About 78 % of them came from hardware that was confirmed or suspected to be at fault. With
    nodes of eight GPUs, this is a failure of each node in 2,048 x 54 / 327, about 340 days, which is
    the default. Older and shared clusters fail more often. The repair times and all figures of lags
    are judgement.
    """

    between_failures_s: float = 340 * DAY_S
    """Mean seconds from a node's return to its next failure. If it is inf, nodes never fail."""
    repair_s: float = 4 * 3600.0
    """Mean seconds for which a failed node is away."""
    between_lags_s: float = 60 * DAY_S
    """Mean seconds from the end of a node's lag to its next one. If it is inf, nodes never lag."""
    lag_s: float = 2 * 3600.0
    """Mean seconds for which a node lags."""
    slowest: float = 2.0
    """The largest factor by which iterations on a lagging node take longer. Factors are drawn
    uniformly between 1 and this value."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        means = (self.between_failures_s, self.repair_s, self.between_lags_s, self.lag_s)
        if not all(mean > 0 for mean in means):
            raise InvalidInput("hazards", "mean times must be positive")
        if not 1 <= self.slowest < math.inf:
            raise InvalidInput("slowest", "must be a finite number of at least 1")


def draw_failures(
    nodes: Sequence[NodeSpec], until_s: float, seed: int, hazards: Hazards = Hazards()
) -> list[Failure]:
    """Return the failures that begin before ``until_s``, in order of their beginning.

    The same arguments give the same failures. Those of a node do not depend on the other nodes.
    """
    drawn = [
        Failure(node=node.name, down_s=down_s, up_s=up_s)
        for node, rng in _streams(nodes, seed, 0)
        for down_s, up_s in _spells(rng, hazards.between_failures_s, hazards.repair_s, until_s)
    ]
    return sorted(drawn, key=lambda f: (f.down_s, f.node))


def draw_stragglers(
    nodes: Sequence[NodeSpec], until_s: float, seed: int, hazards: Hazards = Hazards()
) -> list[Straggler]:
    """Return the lags that begin before ``until_s``, drawn and ordered like failures."""
    drawn = []
    for node, rng in _streams(nodes, seed, 1):
        for start_s, end_s in _spells(rng, hazards.between_lags_s, hazards.lag_s, until_s):
            factor = float(rng.uniform(1.0, hazards.slowest))
            drawn.append(Straggler(node=node.name, start_s=start_s, end_s=end_s, factor=factor))
    return sorted(drawn, key=lambda s: (s.start_s, s.node))


def _streams(
    nodes: Sequence[NodeSpec], seed: int, kind: int
) -> list[tuple[NodeSpec, np.random.Generator]]:
    """Return a separate random generator for each node, seeded by its name."""
    return [(node, np.random.default_rng([seed, kind, *node.name.encode()])) for node in nodes]


def _spells(
    rng: np.random.Generator, gap_s: float, length_s: float, until_s: float
) -> list[tuple[float, float]]:
    """Return the beginning and end of each spell before ``until_s``. Spells do not overlap."""
    if not math.isfinite(until_s):
        raise InvalidInput("until_s", "must be a finite number of seconds")
    spells: list[tuple[float, float]] = []
    at_s = 0.0
    while math.isfinite(gap_s):
        at_s += float(rng.exponential(gap_s))
        if at_s >= until_s:
            break
        end_s = at_s + float(rng.exponential(length_s))
        if end_s > at_s:
            spells.append((at_s, end_s))
        at_s = end_s
    return spells
