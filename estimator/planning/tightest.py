"""The plan that needs the least memory. It explains why no plan fits at a pipeline degree."""

from __future__ import annotations

import numpy as np

from tessera.estimator.memory import UsableMemory, in_flight, memory_bytes
from tessera.estimator.plans import StageCosts, Training
from tessera.formulation.tables import Floats, Ints


def tightest_plan(
    costs: StageCosts,
    training: Training,
    gpus: int,
    stages: int,
    layers: int,
    room: UsableMemory | None = None,
) -> Ints | None:
    """Return the rows, in order, of the plan whose fullest GPU needs the least memory.

    If nothing can run at all, return None. This is dynamic programming over (stages left, first
    layer left, GPUs left), as in ``chain.py``, but with memory that grows with the stages left
    (1F1B).
    """
    flights = in_flight(training.schedule, stages, training.micro_batches)[::-1]
    order = np.argsort(costs.candidates.start, kind="stable")
    rows = order[np.isfinite(costs.busy_s[order]) & (costs.candidates.gpus[order] <= gpus)]
    if not len(rows):
        return None
    here = _Rows(costs, rows, gpus, layers)
    best = np.full((stages + 1, layers + 1, gpus + 1), np.inf)
    best[0, layers, 0] = 0.0
    needed = [memory_bytes(costs, int(n), room)[rows] for n in flights]  # index: stages left - 1
    for left in range(1, stages + 1):
        total = np.maximum(needed[left - 1][:, None], here.after(best[left - 1]))
        best[left, here.starts] = np.minimum.reduceat(total, here.first, axis=0)
    if not np.isfinite(best[stages, 0, gpus]):
        return None
    return here.walk(best, needed, stages)


class _Rows:
    """The rows that can run, sorted by their first layer."""

    def __init__(self, costs: StageCosts, rows: Ints, gpus: int, layers: int) -> None:
        candidates = costs.candidates
        self.rows, self.gpus = rows, gpus
        self.start, self.end, self.size = (
            candidates.start[rows],
            candidates.end[rows],
            candidates.gpus[rows],
        )
        self.starts, self.first = np.unique(self.start, return_index=True)
        self.layers = layers

    def after(self, rest: Floats) -> Floats:
        """Return the memory needed after each row, shape (K, gpus + 1).

        The columns are the numbers of GPUs left before the row.
        """
        left = np.arange(self.gpus + 1)[None, :] - self.size[:, None]
        needed: Floats = np.where(left >= 0, rest[self.end[:, None], np.maximum(left, 0)], np.inf)
        return needed

    def walk(self, best: Floats, needed: list[Floats], stages: int) -> Ints:
        """Return the rows of the best plan."""
        chosen, layer, gpus = [], 0, self.gpus
        for left in range(stages, 0, -1):
            at = np.flatnonzero((self.start == layer) & (self.size <= gpus))
            rest = best[left - 1, self.end[at], gpus - self.size[at]]
            row = int(at[int(np.maximum(needed[left - 1][at], rest).argmin())])
            chosen.append(int(self.rows[row]))
            layer, gpus = int(self.end[row]), gpus - int(self.size[row])
        return np.array(chosen, dtype=np.int64)
