"""Families of pure knapsack problems, which are known to be hard to prove.

A GPU type is a knapsack, and a job is a class of items: it takes at most one of them, in one
knapsack. Sources: Pisinger, "A minimal algorithm for the multiple-choice knapsack problem" (1995)
and "Where are the hard knapsack problems?" (2005); Khan, Li, Manning and Akbar, "Solving the
knapsack problem for adaptive multimedia systems" (2002).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.benchmarks.rounds.families.problems import state_options
from tessera.benchmarks.rounds.families.snapshots import divide_evenly
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.problem import CouplingRow, Problem, RowKind

MAX_WEIGHT: Final = 1_000
"""Pisinger's range R of weights and values."""
ITEMS: Final = 10
"""The number of items of a class."""
MAX_SMALL_VALUE: Final = 6
MAX_SMALL_GPUS: Final = 8
SMALL_OPTIONS: Final = 3
MMKP_AMOUNT: Final = 10
MMKP_PRICE: Final = 10
"""The largest amount of a resource that an item takes, and the largest price of a unit of one."""


def draw_subset_sum(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw classes of items of even weights up to 1,000, whose values are their weights.

    Capacities are odd, so that no answer fills one. Together they are half of what the largest items
    of all classes weigh, unless ``gpus`` is given.
    """
    weight = 2 * rng.integers(1, MAX_WEIGHT // 2 + 1, (jobs, ITEMS))
    rows = knapsack_rows(_half_of_largest(weight, gpus, types) | 1)
    return _in_knapsacks(rng, weight, weight, rows)


def draw_inverse(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw inverse strongly correlated items: the weight is the value and a tenth of the range.

    In half of the rounds a class is a single item. In the others it has ten, whose values and
    weights are the sums of those of the items before and their own, so that none is dominated. The
    knapsacks hold half of what the largest items weigh, unless ``gpus`` is given.
    """
    items = 1 if rng.random() < 0.5 else ITEMS
    value = rng.integers(1, MAX_WEIGHT + 1, (jobs, items))
    weight = value + MAX_WEIGHT // 10
    value, weight = np.cumsum(value, axis=1), np.cumsum(weight, axis=1)
    return _in_knapsacks(rng, value, weight, knapsack_rows(_half_of_largest(weight, gpus, types)))


def draw_small_values(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw jobs whose columns are worth whole numbers from 0 to 6, on 1 to 8 GPUs.

    Shadow prices hardly distinguish them. There is one GPU for each job unless ``gpus`` is given.
    """
    shape = (jobs, SMALL_OPTIONS)
    value = rng.integers(0, MAX_SMALL_VALUE + 1, shape)
    amount = rng.integers(1, MAX_SMALL_GPUS + 1, shape)
    rows = knapsack_rows(divide_evenly(gpus or max(jobs, types), types))
    return _in_knapsacks(rng, value, amount, rows)


def draw_mmkp(rng: np.random.Generator, jobs: int, gpus: int, types: int) -> Problem:
    """Draw a multiple-choice multi-dimensional knapsack problem as Khan et al. describe it.

    Each of ``jobs`` groups must take one of its 10 items. An item takes 0 to 10 units of each of
    ``types`` resources (uniform). A unit of a resource has a price of 1 to 10 (uniform), and an item's
    value is the price of its resources and a uniform premium up to the mean of that price. A resource
    has half of its largest consumption by every group, or an equal share of ``gpus``. I07 to I13 are
    100, 150, 200, 250, 300, 350 and 400 groups of 10 resources.
    """
    amount = rng.integers(0, MMKP_AMOUNT + 1, (jobs, ITEMS, types))
    price = rng.integers(1, MMKP_PRICE + 1, types)
    premium = types * MMKP_AMOUNT // 2 * MMKP_PRICE // 2
    value = amount @ price + rng.integers(0, premium + 1, (jobs, ITEMS))
    capacity = divide_evenly(gpus, types) if gpus else np.full(types, jobs * MMKP_AMOUNT // 2)
    return state_options(value, amount, knapsack_rows(capacity), must_run=True)


def knapsack_rows(capacity: Ints) -> list[CouplingRow]:
    """Return a row of GPUs for each capacity (int64[types])."""
    return [
        CouplingRow(kind=RowKind.GPUS, subject=f"t{t}", capacity=room)
        for t, room in enumerate(capacity.tolist())
    ]


def _half_of_largest(weight: Ints, gpus: int, types: int) -> Ints:
    return divide_evenly(gpus or max(types, int(weight.max(axis=1).sum()) // 2), types)


def _in_knapsacks(
    rng: np.random.Generator, value: Ints, weight: Ints, rows: list[CouplingRow]
) -> Problem:
    """Return the problem in which each option is in one knapsack, which is drawn."""
    row = rng.integers(0, len(rows), (*value.shape, 1))
    return state_options(value, weight[:, :, None], rows, row)
