"""Runs that change their execution plan once, for every ordered pair of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Final

from tessera.benchmarks.service.reconfigure.plans import ONE_DEVICE, plan_of_one_device
from tessera.benchmarks.service.reconfigure.runs import Outcome, Run, Stretch, train_runs
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.simulator.figures import Figure

FORGETFUL: Final = "forgetful"
"""The name of the run whose optimizer begins again."""


def compare_pairs(
    plans: Mapping[str, ExecutionPlan], iterations: int, *, dropout: float, seed: int
) -> tuple[dict[str, Figure], list[dict[str, Figure | str]]]:
    """Return the figures of all ordered pairs, and a row for each."""
    every_plan = {ONE_DEVICE: plan_of_one_device(), **plans}
    pairs = list(permutations(plans, 2))
    runs = _make_runs(list(every_plan), pairs, iterations, seed)
    outcomes = train_runs(every_plan, runs, sizes={"dropout": dropout})
    undisturbed = {name: outcomes[name].losses for name in every_plan}
    alone = undisturbed[ONE_DEVICE]
    table: list[dict[str, Figure | str]] = [
        {
            "from": first,
            "to": second,
            "difference": largest_difference(outcomes[f"{first} > {second}"], undisturbed[first]),
            "from_one_device": largest_difference(outcomes[f"{first} > {second}"], alone),
        }
        for first, second in pairs
    ]
    found = [row[key] for row in table for key in ("difference", "from_one_device")]
    figures: dict[str, Figure] = {
        "pairs": len(pairs),
        "iterations": iterations,
        "worst_difference": max(float(value) for value in found),
        "between_plans": max(largest_difference(outcomes[name], alone) for name in plans),
        "forgotten_difference": largest_difference(outcomes[FORGETFUL], alone),
        "loss_fall": alone[0] - alone[-1],
    }
    return figures, table


def largest_difference(outcome: Outcome, losses: Sequence[float]) -> float:
    """Return the largest absolute difference of a run's losses from others, by iteration."""
    return max(abs(own - other) for own, other in zip(outcome.losses, losses, strict=True))


def _make_runs(
    names: Sequence[str], pairs: Sequence[tuple[str, str]], iterations: int, seed: int
) -> list[Run]:
    """Return an undisturbed run of each plan, a run of each pair, and the forgetful run."""
    half, rest = iterations // 2, iterations - iterations // 2
    runs = [
        Run(name=name, seed=seed, parts=(Stretch(plan=name, iterations=iterations),))
        for name in names
    ]
    for first, second in pairs:
        parts = Stretch(plan=first, iterations=half), Stretch(plan=second, iterations=rest)
        runs.append(Run(name=f"{first} > {second}", seed=seed, parts=parts))
    first, second = pairs[0]
    parts = (
        Stretch(plan=first, iterations=half),
        Stretch(plan=second, iterations=rest, forgets=True),
    )
    return [*runs, Run(name=FORGETFUL, seed=seed, parts=parts)]
