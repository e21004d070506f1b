"""The examples under chains of plans: a change of plan does not change the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest

from tessera.formulation.job.execution_plan import ExecutionPlan, PlanStage
from tests.support.plan_changes import (
    GPT,
    ONE_DEVICE,
    RESNET,
    Run,
    Stretch,
    largest_difference,
    make_plans,
    plan_of_one_device,
    train_runs,
)

TOLERANCE = 1e-5
CHOICE_TOLERANCE = 1e-3
"""A router may choose another expert for a token that is worth the same to two of them."""

SEED = 3


def train_chain(
    example: str, plans: Mapping[str, ExecutionPlan], each: int, sizes: Mapping[str, float]
) -> tuple[float, float]:
    """Return how far a chain is from an undisturbed run, and how far that run's loss fell."""
    chain = tuple(Stretch(plan=name, iterations=each) for name in plans)
    steady = (Stretch(plan=ONE_DEVICE, iterations=each * len(chain)),)
    outcomes = train_runs(
        {ONE_DEVICE: plan_of_one_device(), **plans},
        [
            Run(name="undisturbed", seed=SEED, parts=steady),
            Run(name="chain", seed=SEED, parts=chain),
        ],
        example=example,
        sizes=sizes,
    )
    losses = outcomes["undisturbed"]
    assert len(losses) == each * len(plans)
    return largest_difference(outcomes["chain"], losses), losses[0] - losses[-1]


def whole(dp: int, tp: int = 1, ep: int = 1) -> ExecutionPlan:
    stage = replace(plan_of_one_device().stages[0], dp=dp, tp=tp, ep=ep)
    return replace(plan_of_one_device(), stages=(stage,))


def pipeline_of_experts() -> ExecutionPlan:
    stages = PlanStage(start=0, end=3, dp=2, ep=2), PlanStage(start=3, end=6, tp=2, ep=2)
    return replace(plan_of_one_device(), stages=stages, micro_batch=8, accumulation=2)


def test_a_change_between_two_plans_changes_no_loss_unless_the_optimizer_begins_again() -> None:
    """Each run trains two iterations under one of three plans, and two under another."""
    plans = {name: make_plans()[name] for name in ("DP", "TP", "PP")}
    pairs, half = list(permutations(plans, 2)), 2
    steady = [
        Run(name=name, seed=SEED, parts=(Stretch(plan=name, iterations=2 * half),))
        for name in (ONE_DEVICE, *plans)
    ]
    changing = [
        Run(
            name=f"{first} > {second}",
            seed=SEED,
            parts=(
                Stretch(plan=first, iterations=half),
                Stretch(plan=second, iterations=half, forgets=forgets),
            ),
        )
        for first, second, forgets in [*((*pair, False) for pair in pairs), (*pairs[0], True)]
    ]
    forgetful = replace(changing[-1], name="forgetful")
    losses = train_runs(
        {ONE_DEVICE: plan_of_one_device(), **plans}, [*steady, *changing[:-1], forgetful]
    )

    for first, second in pairs:
        for undisturbed in (first, ONE_DEVICE):
            changed = losses[f"{first} > {second}"]
            assert largest_difference(changed, losses[undisturbed]) <= TOLERANCE
    assert largest_difference(losses["forgetful"], losses[ONE_DEVICE]) >= 10 * TOLERANCE


@pytest.mark.night
def test_a_gpt_with_dropout_goes_through_nine_plans_as_if_undisturbed() -> None:
    sizes = {"width": 16, "sequence": 8, "dropout": 0.1}
    worst, fall = train_chain(GPT, make_plans(), 3, sizes)
    assert fall > 0.2  # so it trains
    assert worst <= TOLERANCE


def test_a_mixture_of_experts_keeps_its_loss_under_plans_that_divide_experts() -> None:
    plans = {"ep4": whole(4, ep=4), "ep2 tp2": whole(2, 2, 2), "pipeline": pipeline_of_experts()}
    worst, fall = train_chain("train_jax_moe", plans, 4, {"width": 16, "sequence": 16})
    assert fall > 0.1
    assert worst <= CHOICE_TOLERANCE


def test_a_wide_resnet_with_ghost_batches_keeps_its_loss() -> None:
    plans = {name: make_plans()[name] for name in ("DP", "TP", "unequal PP")}
    worst, fall = train_chain(RESNET, plans, 6, {})
    assert fall > 0.02
    assert worst <= TOLERANCE
