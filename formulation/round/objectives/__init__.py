"""Objectives as pure functions of a draft, and the translation of a policy's stages into goals.

``LINEAR_VALUES`` has the objectives that are sums, except for ``balanced``, which has a share
(``column_values``), and for plug-ins. ``LEVELS_OF`` has those that compare the worst-off jobs.
``NEEDS`` has the rules that drop columns for which an objective lacks data, each with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Final, cast

import numpy as np

from tessera.formulation.base.plugins import find_plugin
from tessera.formulation.base.tables import Floats
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import WEIGHTED_SUM, Goal, Levels, Linear
from tessera.formulation.round.grammar import BALANCED, Stage, share_of
from tessera.formulation.round.objectives.completion import (
    balance_throughput_and_completion,
    completion_values,
    makespan_levels,
)
from tessera.formulation.round.objectives.cost import (
    cost_values,
    jobs_running,
    priced_and_fast_enough,
)
from tessera.formulation.round.objectives.fairness import finish_time_fairness, max_min
from tessera.formulation.round.objectives.obligations import jobs_without_weight_wait
from tessera.formulation.round.objectives.throughput import throughput_values
from tessera.formulation.round.objectives.values import ColumnValues, require_values
from tessera.formulation.round.problem import VALUE_SCALE, bound_values, scale_values

LINEAR_VALUES: Final[dict[str, Callable[[Draft], ColumnValues]]] = {
    "throughput": throughput_values,
    # deadlines are promises, kept by rows; throughput decides among what keeps them
    "deadline": throughput_values,
    "jct": completion_values,
    "cost": cost_values,
}
LEVELS_OF: Final[dict[str, Callable[[Draft], Levels]]] = {
    "finish-time-fairness": finish_time_fairness,
    "max-min": max_min,
    "makespan": makespan_levels,
}
NEEDS: Final[dict[str, Callable[[Draft], Draft]]] = {"cost": priced_and_fast_enough}


def with_needs(draft: Draft) -> Draft:
    """Return the draft without columns that its objectives cannot or must not use."""
    draft = jobs_without_weight_wait(draft)
    for stage in draft.policy.stages:
        for term in stage.terms:
            if term.objective in NEEDS:
                draft = NEEDS[term.objective](draft)
    return draft


def goals_of(draft: Draft) -> tuple[Goal, ...]:
    """Return the goals of the policy's stages for ``draft``, in order. The last is a sum.

    Cost alone is least if nothing runs. Unless an earlier sum determines which jobs run, it is
    therefore preceded by a goal for the greatest weight of running jobs (Eq. 12).
    """
    goals: list[Goal] = []
    rewarded = False  # an earlier sum rewards running
    for stage in draft.policy.stages:
        draft.check()
        if stage.lexicographic:
            goals.append(_levels(draft, stage))
            continue
        if _only_cost(stage) and not rewarded:
            goals.append(jobs_running(draft))
        rewarded = rewarded or not _only_cost(stage)
        goals.append(_sum(draft, stage))
    return tuple(goals)


def column_values(draft: Draft, objective: str) -> ColumnValues:
    """Return the values of an objective that is a sum, with its share.

    Raises:
        InvalidInput: the objective is a plug-in, and what it returns are not values of the columns.
    """
    if (plugin := find_plugin(objective)) is not None:
        return require_values(draft, objective, cast(Callable[[Draft], object], plugin)(draft))
    name, share = share_of(objective)
    if name == BALANCED:
        return balance_throughput_and_completion(draft, share)
    return LINEAR_VALUES[name](draft)


def _only_cost(stage: Stage) -> bool:
    return all(term.objective == "cost" for term in stage.terms)


def _levels(draft: Draft, stage: Stage) -> Levels:
    levels = LEVELS_OF[stage.terms[0].objective](draft)
    return replace(levels, depth=draft.policy.fairness_levels, tolerance=stage.tolerance)


def _sum(draft: Draft, stage: Stage) -> Linear:
    parts = [(t.weight, column_values(draft, t.objective)) for t in stage.terms]
    alone = len(parts) == 1
    scale = parts[0][1].scale if alone else float(VALUE_SCALE)
    unit = parts[0][1].unit if alone else WEIGHTED_SUM
    gross = reduce(np.add, [_weighted(weight, v.gross) for weight, v in parts])
    price = reduce(np.add, [_weighted(weight, v.price) for weight, v in parts])
    del parts
    gross, price = bound_values(gross, price, scale, draft.job_start)
    gains = gross > price
    charged = scale_values(price, scale)
    del price
    value = scale_values(gross, scale)
    value -= charged
    # A column of the least worth is one unit, so that its job runs where GPUs would be idle.
    np.maximum(value, 1, out=value, where=gains)
    return Linear(
        name=stage.name,
        unit=unit,
        value=value,
        restart_price=charged,
        scale=scale,
        tolerance=stage.tolerance,
    )


def _weighted(weight: float, values: Floats) -> Floats:
    """Return ``weight * values``, without a copy if the weight is 1."""
    return values if weight == 1.0 else weight * values
