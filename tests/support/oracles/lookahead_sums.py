"""The samples and resources of one job's schedule, in plain loops."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.lookahead import Lookahead


def trained_samples(ahead: Lookahead, job: int, pick: Ints, first: int = 0) -> float:
    """Return the samples that ``job`` trains by its deadline with ``pick`` (int64[slots]).

    ``pick`` has an option for each slot. Slots before ``first`` are not counted, but a segment that
    began there continues.
    """
    gain, cost = ahead.gain, ahead.cost
    total = 0.0
    for slot in range(first, ahead.slots):
        option = int(pick[slot])
        if option >= 0:
            begins = slot == 0 or int(pick[slot - 1]) != option
            total += float(gain[option, slot]) - (float(cost[option]) if begins else 0.0)
    return total


def resource_usage_of(ahead: Lookahead, job: int, pick: Ints) -> Ints:
    """Return the use of resources by ``job`` with ``pick`` (int64[slots]).

    The shape is int64[resources, slots].
    """
    used = np.zeros_like(ahead.capacity)
    runs = np.flatnonzero(pick >= 0)
    used[:, runs] = ahead.use[pick[runs]].T
    if ahead.steady[job]:
        kept = {int(ahead.cells.gpu_type[ahead.cell[o]]): int(ahead.floor[o]) for o in pick[runs]}
        for option in ahead.options_of(job):
            kind = int(ahead.cells.gpu_type[ahead.cell[option]])
            if kind == ahead.held[job]:
                kept[kind] = int(ahead.floor[option])
        for kind, gpus in kept.items():
            used[kind] = np.maximum(used[kind], gpus)
    return used
