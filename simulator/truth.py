"""The true speeds of the world's workloads, and estimates of them with errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import BEST_FOUND, Cell, Workload
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.state.cells import Cells, build_cells
from tessera.formulation.state.snapshot import Snapshot


def perturb_estimates(
    profiles: Sequence[EstimateRecord], error: float, seed: int
) -> list[EstimateRecord]:
    """Return estimates of the profiles with a mean relative error of about ``error``, e.g. 0.1.

    An iteration's time is multiplied by exp(s z), where z is standard normal. The mean of the
    relative error is about ``error`` if s = error sqrt(pi / 2). All shapes of a Cell have the same
    error, as if one model predicted their times. The estimates know which Cells do not run.
    """
    if not 0 <= error < 1:
        raise InvalidInput("error", "must be at least 0 and below 1")
    rng = np.random.default_rng(seed)
    factors: dict[tuple[Workload, Cell], float] = {}
    perturbed = []
    for e in profiles:
        cell = e.workload, e.cell.on(0)
        if cell not in factors:
            factors[cell] = math.exp(error * math.sqrt(math.pi / 2) * rng.standard_normal())
        perturbed.append(replace(e, iter_time_s=e.iter_time_s * factors[cell]))
    return perturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The true rates of all Cells of a cluster's workloads."""

    cells: Cells
    batch: tuple[int, ...]  # samples in an iteration of each workload
    of: dict[tuple[int, Cell], int]  # (workload, Cell on any nodes) -> row of ``cells``

    def iterations_per_s(self, workload: int, cell: Cell) -> float:
        """Return the true rate of a Cell on ``cell.nodes`` nodes.

        If it does not run there, return 0. A Cell without a recorded plan, on which a job of unknown
        rate runs, has the rate of the best plan on its GPUs.
        """
        row = self.of.get((workload, cell.on(0)))
        rows = [] if row is None else [row]
        if row is None and cell.pipeline_degree == BEST_FOUND and not cell.plan:
            same = (workload, cell.gpu_type, cell.gpus)
            rows = [k for (w, c), k in self.of.items() if (w, c.gpu_type, c.gpus) == same]
        rates = [self.cells.rate_on(row, cell.nodes) for row in rows]
        return max(rates, default=0.0) / self.batch[workload]


def truth_of(snapshot: Snapshot) -> Truth:
    """Return the truth given by the estimates of ``snapshot``, with all nodes present."""
    cells = build_cells(snapshot)
    keys = zip(cells.workload.tolist(), map(snapshot.cell, cells.keys()), strict=True)
    return Truth(
        cells=cells,
        batch=tuple(w.global_batch for w in snapshot.workloads),
        of={key: i for i, key in enumerate(keys)},
    )
