"""The comparison of a shadow with the policy in force over many rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.records.policies import DecisionFigures, ShadowRound
from tessera.service.shadow_comparison import BATCHES, ComparedFigure, Verdicts, compare_rounds
from tessera.simulator.statistics import mean_interval

PLAIN = DecisionFigures(
    by_policy=(1.0, 5.0),
    by_shadow=(1.0,),
    effective_gpus=10.0,
    used_gpus=8,
    running=2,
    waiting=1,
    started=0,
    suspended=0,
    changed=0,
    solve_s=0.1,
    gap=math.nan,
)


def a_round(number: int, shadow: DecisionFigures, goals: Sequence[str] = ("a", "b")) -> ShadowRound:
    return ShadowRound(
        number=number,
        created_s=float(number),
        policy_goals=tuple(goals),
        shadow_goals=("c",),
        policy=PLAIN,
        shadow=shadow,
    )


def figure_of(rounds: Sequence[ShadowRound], name: str) -> ComparedFigure:
    (figure,) = [f for f in compare_rounds(rounds).figures if f.name == name]
    return figure


def test_without_rounds_there_is_nothing_to_compare() -> None:
    compared = compare_rounds([])
    assert (compared.compared, compared.failed, compared.figures) == (0, 0, ())
    assert compared.by_policy == Verdicts(better=0, equal=0, worse=0)


def test_the_first_goal_that_differs_decides() -> None:
    almost = replace(PLAIN, by_policy=(1.0 + 1e-9, 4.0))  # equal but for rounding, then worse
    better = replace(PLAIN, by_policy=(1.1, 0.0))
    compared = compare_rounds([a_round(3, almost), a_round(2, better), a_round(1, PLAIN)])
    assert compared.by_policy == Verdicts(better=1, equal=1, worse=1)
    assert compared.by_shadow == Verdicts(better=0, equal=3, worse=0)


def test_one_round_has_no_interval() -> None:
    figure = figure_of([a_round(1, replace(PLAIN, effective_gpus=12.0))], "effective GPUs")
    assert (figure.policy, figure.shadow, figure.difference.value) == (10.0, 12.0, 2.0)
    assert math.isnan(figure.difference.low)


def test_rounds_that_are_alike_widen_the_interval_of_many_rounds() -> None:
    # 80 rounds in runs of 20 that are the same: only four of them are independent.
    levels = np.repeat([8.0, 14.0, 9.0, 15.0], 20)
    rounds = [a_round(i, replace(PLAIN, effective_gpus=x)) for i, x in enumerate(levels, 1)]
    found = figure_of(rounds, "effective GPUs").difference
    means = (levels - 10.0).reshape(BATCHES, -1).mean(axis=1)
    assert found.value == pytest.approx(1.5)
    assert found.high - found.value == pytest.approx(mean_interval(means).high - means.mean())
    narrow = mean_interval(levels)
    assert found.high - found.low > narrow.high - narrow.low


def test_rounds_under_an_earlier_objective_and_failed_ones_are_left_out() -> None:
    failed = ShadowRound(number=3, created_s=3.0, problem="slow")
    before = a_round(1, replace(PLAIN, by_policy=(9.0,)), goals=("before",))
    compared = compare_rounds([failed, a_round(2, PLAIN), before])
    assert (compared.compared, compared.failed, compared.problem) == (1, 1, "slow")
    names = [figure.name for figure in compared.figures]
    assert names[:3] == ["by the policy: a", "by the policy: b", "by the shadow: c"]
