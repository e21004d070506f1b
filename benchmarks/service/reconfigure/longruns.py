"""Long runs that often change their execution plan, compared with a run of another seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tessera.benchmarks.service.reconfigure.plans import ONE_DEVICE, plan_of_one_device
from tessera.benchmarks.service.reconfigure.runs import Outcome, Run, Stretch, train_runs
from tessera.formulation.execution_plan import ExecutionPlan
from tessera.simulator.figures import Figure

CHANGING: Final = 2
"""Runs that change their plan."""

LAST_ITERATIONS: Final = 100
"""Iterations whose mean is the loss of training."""

OTHER_SEED: Final = "other seed"
MEASURES: Final = ("train", "validation", "test")


def compare_with_seeds(
    plans: Mapping[str, ExecutionPlan], iterations: int, *, every: int, dropout: float, seed: int
) -> tuple[dict[str, Figure], list[dict[str, Figure | str]]]:
    """Return the figures of long runs, and a row for each run."""
    generator = np.random.default_rng(seed)
    changing = [
        Run(
            name=f"changing {number + 1}",
            seed=seed,
            parts=draw_parts(list(plans), iterations, every, generator),
        )
        for number in range(CHANGING)
    ]
    steady = (Stretch(plan=ONE_DEVICE, iterations=iterations),)
    runs = [
        Run(name=ONE_DEVICE, seed=seed, parts=steady),
        Run(name=OTHER_SEED, seed=seed + 1, parts=steady),
        *changing,
    ]
    every_plan = {ONE_DEVICE: plan_of_one_device(), **plans}
    outcomes = train_runs(every_plan, runs, sizes={"dropout": dropout}, measures=True)
    losses = {run.name: measure_losses(outcomes[run.name]) for run in runs}
    figures: dict[str, Figure] = {
        "mini_batches": iterations,
        "changes": sum(len(run.parts) - 1 for run in changing),
        "plans": len({part.plan for run in changing for part in run.parts}),
    }
    quotients = list[float]()
    for place, measure in enumerate(MEASURES):
        base = losses[ONE_DEVICE][place]
        own = max(abs(losses[run.name][place] - base) for run in changing)
        other = abs(losses[OTHER_SEED][place] - base)
        figures |= {f"{measure}_reconfigured": own, f"{measure}_seeds": other}
        quotients.append(own / other)
    figures["reconfigured_to_seeds"] = max(quotients)
    rows: list[dict[str, Figure | str]] = [
        {
            "run": run.name,
            "changes": len(run.parts) - 1,
            **dict(zip(MEASURES, losses[run.name], strict=True)),
        }
        for run in runs
    ]
    return figures, rows


def draw_parts(
    names: Sequence[str], iterations: int, every: int, generator: np.random.Generator
) -> tuple[Stretch, ...]:
    """Return parts of random lengths, ``every`` iterations on average, each under another plan."""
    parts, left, last = list[Stretch](), iterations, ""
    while left:
        length = min(left, int(generator.integers(every // 2, every + every // 2 + 1)))
        last = str(generator.choice([name for name in names if name != last]))
        parts.append(Stretch(plan=last, iterations=length))
        left -= length
    return tuple(parts)


def measure_losses(outcome: Outcome) -> tuple[float, float, float]:
    """Return the losses of training, validation and test at the end of a run."""
    train = statistics.fmean(outcome.losses[-LAST_ITERATIONS:])
    return train, outcome.validation, outcome.test
