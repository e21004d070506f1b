"""Objectives as pure functions of a draft, and how the stages of a policy become goals.

``LINEAR_VALUES`` has what is summed, ``LEVELS_OF`` what compares the worst-off jobs, ``NEEDS`` the rules
that drop the columns for which an objective lacks data, each with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from formulation.draft import Draft
from formulation.goals import Goal, Levels, Linear
from formulation.grammar import Stage
from formulation.objectives.throughput import throughput
from formulation.objectives.values import Valued
from formulation.problem import VALUE_SCALE, scaled

LINEAR_VALUES: Final[dict[str, Callable[[Draft], Valued]]] = {
    "throughput": throughput,
    "deadline": throughput,  # deadlines are promises, kept by rows; among what keeps them, throughput decides
}
LEVELS_OF: Final[dict[str, Callable[[Draft], Levels]]] = {}
NEEDS: Final[dict[str, Callable[[Draft], Draft]]] = {}


def with_needs(draft: Draft) -> Draft:
    """Return the draft without the columns that its objectives cannot judge."""
    for stage in draft.policy.stages:
        for term in stage.terms:
            if term.weight > 0 and term.objective in NEEDS:
                draft = NEEDS[term.objective](draft)
    return draft


def goals_of(draft: Draft) -> tuple[Goal, ...]:
    """Return what the policy's stages mean for ``draft``, in order; the last is a sum."""
    found: list[Goal] = []
    for stage in draft.policy.stages:
        found.append(_levels(draft, stage) if stage.lexicographic else _sum(draft, stage))
    return tuple(found)


def _levels(draft: Draft, stage: Stage) -> Levels:
    return LEVELS_OF[stage.terms[0].objective](draft)


def _sum(draft: Draft, stage: Stage) -> Linear:
    parts = [(t.weight, LINEAR_VALUES[t.objective](draft)) for t in stage.terms if t.weight > 0]
    alone = len(parts) == 1 and parts[0][0] == 1.0
    scale = parts[0][1].scale if alone else float(VALUE_SCALE)
    nothing = np.zeros(len(draft.cell))
    gross = scaled(sum((weight * v.gross for weight, v in parts), nothing), scale)
    price = scaled(sum((weight * v.price for weight, v in parts), nothing), scale)
    return Linear(
        name=stage.name, unit=parts[0][1].unit if alone else "weighted sum", value=gross - price,
        restart_price=price, scale=scale, tolerance=stage.tolerance,
    )  # fmt: skip
