"""Plans of one stage really train, and the losses do not depend on the plan."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.jax_programs import make_plan, train_cases
from tests.support.laws import IS_NIGHT

TOLERANCE: Final = 1e-5
"""The largest difference of losses at float32."""

ONE_DEVICE: Final = {
    "gpt alone": ("gpt", make_plan()),
    "random alone": ("random", make_plan()),
    "experts alone": ("experts", make_plan()),
}
PLANS: Final = {
    "DP 4": ("gpt", make_plan(dp=4)),
    "TP 4": ("gpt", make_plan(tp=4)),
    "ZeRO-1": ("gpt", make_plan(dp=2, tp=2, zero=1)),
    "ZeRO-2 with accumulation": ("gpt", make_plan(dp=4, zero=2, accumulation=2)),
    "ZeRO-3": ("gpt", make_plan(dp=2, tp=2, zero=3)),
    "sequence parallelism": ("gpt", make_plan(dp=2, tp=2, sp=True)),
    "states on the host": ("gpt", make_plan(dp=4, zero=1, offload="optimizer")),
    "all on the host": ("gpt", make_plan(dp=4, zero=3, offload="parameters")),
    "full recomputation": ("gpt", make_plan(dp=2, accumulation=4, recomputation="full")),
    "selective recomputation": ("gpt", make_plan(tp=2, recomputation="selective")),
    "random DP 2 x TP 2": ("random", make_plan(dp=2, tp=2, accumulation=2)),
    "random full recomputation": ("random", make_plan(dp=4, recomputation="full")),
    "experts over replicas": ("experts", make_plan(dp=4, ep=2, zero=3)),
    "experts over all": ("experts", make_plan(dp=2, tp=2, ep=4)),
    "experts over a part of tensors": ("experts", make_plan(tp=4, ep=2)),
}


RARE: Final = frozenset(
    {
        "ZeRO-1",
        "ZeRO-2 with accumulation",
        "states on the host",
        "selective recomputation",
        "random full recomputation",
        "experts over replicas",
        "experts over a part of tensors",
    }
)
"""Plans that only the full tests train. Each is much like another one."""
TRAINED: Final = {name: case for name, case in PLANS.items() if IS_NIGHT or name not in RARE}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    halves = {
        "bf16": ("gpt", make_plan(dp=2, tp=2, precision="bf16")),
        "DP 2 x TP 2": ("gpt", make_plan(dp=2, tp=2)),
    }
    return train_cases({**ONE_DEVICE, **TRAINED, **halves}, devices=4)


def find_difference(result: Any, other: Any) -> float:
    pairs = zip(
        (*result["losses"], result["evaluation"]),
        (*other["losses"], other["evaluation"]),
        strict=True,
    )
    return max(abs(float(one) - float(two)) for one, two in pairs)


@pytest.mark.parametrize("name", [*TRAINED, "DP 2 x TP 2"])
def test_losses_and_the_bits_of_the_initial_state_equal_those_of_one_device(
    results: dict[str, Any], name: str
) -> None:
    alone = results[f"{PLANS.get(name, ('gpt', {}))[0]} alone"]
    assert find_difference(results[name], alone) <= TOLERANCE
    assert results[name]["start"] == alone["start"]


def test_random_layers_change_losses_but_not_the_initial_state(
    results: dict[str, Any],
) -> None:
    plain, random = results["gpt alone"], results["random alone"]
    assert plain["losses"][0] != random["losses"][0]
    assert plain["start"] == random["start"]


def test_bf16_trains_nearly_as_float32_does(results: dict[str, Any]) -> None:
    difference = find_difference(results["bf16"], results["gpt alone"])
    assert TOLERANCE < difference < 0.05


def test_two_processes_train_as_one_does(results: dict[str, Any]) -> None:
    name = "DP 2 x TP 2"
    two = train_cases({name: ("gpt", make_plan(dp=2, tp=2))}, devices=2, processes=2)
    assert find_difference(two[name], results[name]) <= TOLERANCE
    assert two[name]["start"] == results[name]["start"]
