"""The true speeds of the world's workloads, and the estimates that rounds see in their place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.cells import Cells, build_cells
from tessera.formulation.errors import InvalidInput
from tessera.formulation.records.estimates import EstimateRecord
from tessera.formulation.snapshot import Estimates, Nodes, Snapshot
from tessera.formulation.values import BEST_FOUND, Cell, GpuType, Workload


def estimates_table(
    profiles: Sequence[EstimateRecord],
    gpu_types: Sequence[GpuType],
    nodes: Nodes,
    workloads: Sequence[Workload],
    plans: Sequence[str],
) -> Estimates:
    """Return the profiles of the cluster's GPU types as a sorted table of a snapshot.

    A profile without a number of nodes holds for the fewest nodes that the cluster's node sizes
    allow.
    """
    types = {kind.name: i for i, kind in enumerate(gpu_types)}
    there = [(e, e.cell) for e in profiles if e.cell.gpu_type in types]
    work = {w: i for i, w in enumerate(workloads)}
    plan = {name: i for i, name in enumerate(plans)}
    size = np.zeros(len(types), dtype=np.int64)
    np.maximum.at(size, nodes.gpu_type, nodes.gpus)
    rows = sorted(
        (
            work[e.workload],
            types[c.gpu_type],
            c.gpus,
            c.pipeline_degree,
            plan[c.plan],
            c.nodes or math.ceil(c.gpus / max(1, int(size[types[c.gpu_type]]))),
            e.iter_time_s,
            int(e.source),
            math.nan if e.sd is None else e.sd,
            e.complete,
            e.cpus,
            e.host_bytes,
        )
        for e, c in there
    )
    columns = list(zip(*rows, strict=True)) if rows else [()] * 12
    names = ("workload", *Estimates.CELL, "nodes")
    ints = {
        name: np.array(column, dtype=np.int64) for name, column in zip(names, columns, strict=False)
    }
    return Estimates(
        **ints,
        iter_time_s=np.array(columns[6], dtype=np.float64),
        source=np.array(columns[7], dtype=np.int64),
        sd=np.array(columns[8], dtype=np.float64),
        complete=np.array(columns[9], dtype=np.bool_),
        cpus=np.array(columns[10], dtype=np.int64),
        host_bytes=np.array(columns[11], dtype=np.int64),
    )


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
