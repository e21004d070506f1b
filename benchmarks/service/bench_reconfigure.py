"""Losses of jobs whose execution plan changes, compared with undisturbed jobs and with other seeds."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tessera.benchmarks.harness.registry import register_case
from tessera.benchmarks.service.reconfigure.longruns import compare_with_seeds
from tessera.benchmarks.service.reconfigure.pairs import compare_pairs
from tessera.benchmarks.service.reconfigure.plans import make_plans
from tessera.simulator.figures import Report

TOLERANCE: Final = 1e-5
"""Largest absolute difference of a loss at float32. Plans add numbers up in different orders."""

PLANS: Final = 9
PAIRS: Final = PLANS * (PLANS - 1)


@register_case(
    "reconfigure",
    smoke={"plans": 3, "iterations": 4},
    worst_difference=("<=", TOLERANCE),
    pairs=("==", PAIRS),
    forgotten_difference=(">=", 10 * TOLERANCE),
    reconfigured_to_seeds=("<=", 1.0),
)
def measure_reconfiguration(
    plans: Annotated[int, typer.Option(min=2, max=PLANS, help="Execution plans.")] = PLANS,
    iterations: Annotated[
        int, typer.Option(min=2, help="Iterations of each run; the plan changes after half.")
    ] = 20,
    dropout: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of values that are dropped.")
    ] = 0.1,
    long: Annotated[
        bool, typer.Option(help="Train long runs that change often, and other seeds.")
    ] = False,
    mini_batches: Annotated[int, typer.Option(min=200, help="Iterations of each long run.")] = 3000,
    every: Annotated[
        int, typer.Option(min=10, help="Iterations of a long run between two changes, on average.")
    ] = 100,
    seed: int = 1,
) -> Report:
    """Train the small GPT of ``docs/examples/train_jax_gpt.py`` under changing execution plans.

    It has 6 layers and 56,064 parameters, and trains at float32 with a global batch of 16 on 4 virtual
    devices of this machine's processor. The plans are data parallelism, tensor parallelism, a pipeline,
    a pipeline of unequal stages, a mixed one, ZeRO-1, ZeRO-3, recomputation and accumulation. Between
    two plans is an Orbax checkpoint on a disk.

    Pairs: for each ordered pair of plans, a run trains half of its ``iterations`` under the first, and
    the rest under the second. ``worst_difference`` is the largest absolute difference of any loss from
    that of the same iteration of an undisturbed run, which is one under the first plan throughout, or
    one on a single device. Both are compared. The bound of 1e-5 is what float32 allows: ``between_plans``
    is the same difference between undisturbed runs. A comparison that finds nothing proves nothing. So
    ``forgotten_difference`` is that of a run whose optimizer begins again at the change, as if its state
    were not in the checkpoint, and must be ten times as large. ``loss_fall`` is that of one device.

    Long (Morphling, section 7.3 and Table 3): two runs of ``mini_batches`` iterations change at random
    moments to random plans. They and a run with another seed are compared with an undisturbed run on
    one device. The loss of training is the mean of the last 100 iterations. Those of validation and test
    are means over 512 samples that were not trained on, as the last plan evaluates them. For each,
    ``reconfigured`` is the largest difference of the runs that change, and ``seeds`` the difference of
    the other seed. ``reconfigured_to_seeds`` is the largest quotient of the two, and may be at most 1.
    """
    chosen = dict(list(make_plans().items())[:plans])
    if long:
        figures, table = compare_with_seeds(
            chosen, mini_batches, every=every, dropout=dropout, seed=seed
        )
        return Report(seed=seed, figures=figures, table=table)
    figures, table = compare_pairs(chosen, iterations, dropout=dropout, seed=seed)
    figures["tolerance"] = TOLERANCE
    waived = frozenset() if plans == PLANS else frozenset({"pairs"})
    return Report(seed=seed, figures=figures, waived=waived, table=table)
