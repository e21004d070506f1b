"""The questions about what would happen, as orders that travel to a process of their own."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.snapshot import Snapshot
from tessera.formulation.spreads import ForecastHistory
from tessera.formulation.what_if.hypotheses import Hypothesis
from tessera.formulation.what_if.records import Rule
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
class NodeWorthQuestion:
    """The question what one more node of each GPU type is worth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RulePriceQuestion:
    """The question what ``rules`` cost."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeededWeightQuestion:
    """The question with which weight ``job`` would run now."""

    job: str


Question = HypothesisQuestion | NodeWorthQuestion | RulePriceQuestion | NeededWeightQuestion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WhatIfOrder:
    """A question about ``snapshot``, by rounds with ``options``.

    It must be answered before ``end_s`` of the machine's monotonic clock. Without ``futures``, only
    the next round is looked at.
    """

    snapshot: Snapshot
    options: RoundOptions
    question: Question
    end_s: float
    futures: FuturesOrder | None = None
