"""The comparison of a shadow with the policy in force over many rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tessera.formulation.records.policies import DecisionFigures, ShadowRound
from tessera.simulator.statistics import Interval, mean_interval

BATCHES: Final = 20
"""Batches of consecutive rounds whose means make the interval, if there are at least two in each.

Consecutive rounds have almost the same jobs, so single rounds are not independent, and an interval
over them would be too narrow. Means of long batches nearly are (Law, "Simulation Modeling and
Analysis", 5th edition, 9.5.3)."""

TOLERANCE: Final = 1e-6
"""The relative difference up to which two values of a goal are equal."""

_Figure = tuple[str, Callable[[DecisionFigures], float]]

_FIGURES: Final[tuple[_Figure, ...]] = (
    ("effective GPUs", lambda f: f.effective_gpus),
    ("GPUs in use", lambda f: f.used_gpus),
    ("jobs running", lambda f: f.running),
    ("jobs waiting", lambda f: f.waiting),
    ("jobs started", lambda f: f.started),
    ("jobs suspended", lambda f: f.suspended),
    ("jobs changed", lambda f: f.changed),
    ("seconds to decide", lambda f: f.solve_s),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """A figure of both policies: the means, and the mean difference (shadow minus policy)."""

    name: str
    policy: float
    shadow: float
    difference: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The numbers of rounds in which the decisions of the shadow are better, equal or worse."""

    better: int
    equal: int
    worse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowComparison:
    """The summary of the rounds of a shadow."""

    compared: int
    failed: int
    problem: str  # the newest; "" if none failed
    figures: tuple[ComparedFigure, ...]
    by_policy: Verdicts
    by_shadow: Verdicts


def compare_rounds(rounds: Sequence[ShadowRound]) -> ShadowComparison:
    """Compare a shadow with the policy in force on ``rounds``, which are newest first.

    Rounds under another objective of the policy in force than the newest one are left out.
    """
    failed = [decided for decided in rounds if decided.problem]
    whole = [decided for decided in rounds if not decided.problem]
    same = [d for d in whole if d.policy_goals == whole[0].policy_goals]
    pairs = [(d.policy, d.shadow) for d in same if d.policy is not None and d.shadow is not None]
    figures = [_compare(name, pairs, read) for name, read in _figures_of(same)] if pairs else []
    return ShadowComparison(
        compared=len(pairs),
        failed=len(failed),
        problem=failed[0].problem if failed else "",
        figures=tuple(figures),
        by_policy=_judge([(p.by_policy, s.by_policy) for p, s in pairs]),
        by_shadow=_judge([(p.by_shadow, s.by_shadow) for p, s in pairs]),
    )


def _figures_of(rounds: Sequence[ShadowRound]) -> list[_Figure]:
    """Return the figures of rounds that have the same goals. There is at least one round."""
    return [
        *(
            (f"by the policy: {name}", partial(_goal, "by_policy", i))
            for i, name in enumerate(rounds[0].policy_goals)
        ),
        *(
            (f"by the shadow: {name}", partial(_goal, "by_shadow", i))
            for i, name in enumerate(rounds[0].shadow_goals)
        ),
        *_FIGURES,
    ]


def _goal(measure: str, index: int, figures: DecisionFigures) -> float:
    values = figures.by_policy if measure == "by_policy" else figures.by_shadow
    return values[index]


_Pairs = Sequence[tuple[DecisionFigures, DecisionFigures]]


def _compare(name: str, pairs: _Pairs, read: Callable[[DecisionFigures], float]) -> ComparedFigure:
    policy = np.array([read(one) for one, _ in pairs], float)
    shadow = np.array([read(other) for _, other in pairs], float)
    interval = mean_interval(_batch_means(shadow - policy))
    mean = float((shadow - policy).mean())
    half = (interval.high - interval.low) / 2
    return ComparedFigure(
        name=name,
        policy=float(policy.mean()),
        shadow=float(shadow.mean()),
        difference=Interval(value=mean, low=mean - half, high=mean + half),
    )


def _batch_means(values: np.ndarray) -> np.ndarray:
    """Return the means of batches of consecutive ``values`` (float64[rounds]), if there are enough."""
    if len(values) < 2 * BATCHES:
        return values
    return np.array([batch.mean() for batch in np.array_split(values, BATCHES)])


def _judge(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Verdicts:
    """Compare the goals in order: the first one that differs decides."""
    signs = [_sign(policy, shadow) for policy, shadow in pairs]
    return Verdicts(better=signs.count(1), equal=signs.count(0), worse=signs.count(-1))


def _sign(policy: Sequence[float], shadow: Sequence[float]) -> int:
    for one, other in zip(policy, shadow, strict=True):
        if abs(other - one) > TOLERANCE * max(abs(one), abs(other)):
            return 1 if other > one else -1
    return 0
