"""The question what would happen, as an order that travels to a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.answer.hypotheses import Hypothesis
from tessera.formulation.records.spreads import ForecastHistory
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.forecasts.rhythm import RoundRhythm
from tessera.solvers.rounds.options import RoundOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FuturesOrder:
    """The futures to follow: at most ``futures`` pairs, from the same ``seed`` on both sides."""

    history: ForecastHistory
    rhythm: RoundRhythm
    futures: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HypothesisQuestion:
    """The question what changes do. The snapshot's last jobs are the ``added`` ones.

    Rounds with the changes have ``options``.
    """

    hypotheses: tuple[Hypothesis, ...]
    options: RoundOptions
    added: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WhatIfOrder:
    """A question about ``snapshot``, by rounds with ``options``.

    It must be answered before ``end_s`` of the machine's monotonic clock. Without ``futures``, only
    the next round is looked at.
    """

    snapshot: Snapshot
    options: RoundOptions
    question: HypothesisQuestion
    end_s: float
    futures: FuturesOrder | None = None
