"""Cells: the resources that a workload can run on, with the rate at the best shape and at others.

A Cell (``values.CellKey``) has a rate for each shape, that is, for each number of nodes that its
GPUs are spread over.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final

import numpy as np

from tessera.formulation.demand import Demands
from tessera.formulation.errors import InvalidInput
from tessera.formulation.snapshot import Estimates, Snapshot
from tessera.formulation.tables import Bools, CellTable, Floats, Ints, Table, usual

LOCALITY_FACTOR = 0.9
"""Share of the rate that is kept for each halving of GPUs per node, where no estimate exists.

The value is from Arena's simulator, its rule 2.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes(Table):
    """Estimated rates by shape. The rows of one Cell are adjacent, fewest nodes first."""

    INDEX: ClassVar[str] = "shapes"
    nodes: Ints
    rate: Floats  # samples/s; 0 if the shape was tried and does not run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells(CellTable):
    """Feasible Cells of all workloads, sorted by (workload, type, gpus, falling rate)."""

    INDEX: ClassVar[str] = "cells"
    workload: Ints
    gpu_type: Ints
    gpus: Ints
    pipeline_degree: Ints
    plan: Ints  # index into Snapshot.plans
    nodes: Ints  # of the shape that `rate` holds for: the fewest that this cluster allows
    rate: Floats  # samples/s at that shape
    first_shape: Ints  # the Cell's rows of `shapes` are first_shape : first_shape + shape_count
    shape_count: Ints
    shapes: Shapes
    cpus: Ints = usual(0, is_new=True)  # cores that a job on the Cell needs in all
    host_bytes: Ints = usual(0, is_new=True)  # bytes of host memory that a job on it needs in all

    def __post_init__(self) -> None:
        """Check that no demand is negative."""
        Table.__post_init__(self)
        if (self.cpus < 0).any() or (self.host_bytes < 0).any():
            raise InvalidInput("cells", "cpus and host_bytes must be at least 0")

    @property
    def demand(self) -> Demands:
        """Return what a job on each Cell needs of nodes, as totals."""
        return Demands(gpus=self.gpus, cpus=self.cpus, host_bytes=self.host_bytes)

    def rate_on(self, cell: int, nodes: int) -> float:
        """Return samples/s of ``cell`` spread over ``nodes`` nodes; 0 if it is known not to run.

        The shape's own estimate is used if there is one. Otherwise the rate is the Cell's, times
        0.9 for each halving of GPUs per node below the Cell's shape. A better shape than the Cell's
        runs at the Cell's rate.
        """
        first = int(self.first_shape[cell])
        for row in range(first, first + int(self.shape_count[cell])):
            if self.shapes.nodes[row] == nodes:
                return float(self.shapes.rate[row])
        halvings = max(0.0, math.log2(nodes / int(self.nodes[cell])))
        return float(self.rate[cell] * LOCALITY_FACTOR**halvings)


def build_cells(snapshot: Snapshot) -> Cells:
    """Group the estimates into Cells and find the rate of each at its best shape on this cluster.

    The best shape has ``ceil(gpus / node size)`` nodes. Its rate is its own estimate if there is
    one. Otherwise it is that of the nearest better shape measured elsewhere, times 0.9 for each
    halving, or else that of the nearest worse one. Cells without a feasible estimate, or larger
    than the cluster, are left out.
    """
    e = snapshot.estimates
    batch = np.array([w.global_batch for w in snapshot.workloads], dtype=np.float64)
    unsorted = (e.workload, e.gpu_type, e.gpus, e.pipeline_degree, e.plan)
    order = np.lexsort((e.nodes, *reversed(unsorted)))
    keys = [key[order] for key in unsorted]
    spread, rate = e.nodes[order], batch[e.workload[order]] / e.iter_time_s[order]
    # Rows of one Cell are now adjacent: find where each Cell begins.
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(order)))
    workload, gpu_type, gpus, degree, plan = (key[first] for key in keys)
    # The best shape has the fewest nodes that this cluster allows.
    size, capacity = snapshot.node_size()[gpu_type], snapshot.schedulable_gpus()[gpu_type]
    fewest = -(-gpus // np.maximum(size, 1))
    best = _best_rate(spread, rate, first, np.repeat(fewest, count), fewest)
    keep = np.flatnonzero((gpus <= capacity) & (best > 0))
    by = keep[
        np.lexsort(
            (plan[keep], degree[keep], -best[keep], gpus[keep], gpu_type[keep], workload[keep])
        )
    ]
    return Cells(
        workload=workload[by],
        gpu_type=gpu_type[by],
        gpus=gpus[by],
        pipeline_degree=degree[by],
        plan=plan[by],
        nodes=fewest[by],
        rate=best[by],
        first_shape=first[by],
        shape_count=count[by],
        shapes=Shapes(nodes=spread, rate=rate),
    )


def _best_rate(spread: Ints, rate: Floats, first: Ints, target: Ints, fewest: Ints) -> Floats:
    """Return samples/s of each group at ``fewest`` nodes, float64[groups].

    ``spread``, ``rate`` and ``target`` (the group's ``fewest``) have one entry for each shape.
    ``first`` holds the first shape of each group.
    """
    if len(first) == 0:
        return np.zeros(0)
    runs, none = rate > 0, np.iinfo(np.int64).max
    position = np.arange(len(spread), dtype=np.int64)

    def at(index: Ints) -> Floats:
        return np.where((index >= 0) & (index < none), rate[np.clip(index, 0, len(rate) - 1)], 0.0)

    exact = np.maximum.reduceat(np.where(spread == target, position, -1), first)
    better = np.maximum.reduceat(np.where(runs & (spread < target), position, -1), first)
    worse = np.minimum.reduceat(np.where(runs & (spread > target), position, none), first)
    halvings = np.log2(fewest / np.maximum(spread[np.maximum(better, 0)], 1))
    inferred = np.where(better >= 0, at(better) * LOCALITY_FACTOR**halvings, at(worse))
    return np.where(exact >= 0, at(exact), inferred)


def find_undominated(cells: Cells) -> Bools:
    """Return, bool[cells], the Cells that no other Cell of the same workload and type dominates.

    A Cell is dominated by one that needs no more GPUs, CPU cores and host memory, and has no lower
    rate. Of equal Cells, the first in table order stays.
    """
    return _unbeaten(cells, np.arange(len(cells), dtype=np.int64))


def find_undominated_from(cells: Cells, workload: int, least: int) -> Ints:
    """Return the indices of the undominated Cells of ``workload`` on ``least`` or more GPUs.

    Smaller Cells do not count as dominating.
    """
    first, last = np.searchsorted(cells.workload, [workload, workload + 1]).tolist()
    large = first + np.flatnonzero(cells.gpus[first:last] >= least)
    undominated: Ints = large[_unbeaten(cells, large)]
    return undominated


def _unbeaten(cells: Cells, among: Ints) -> Bools:
    """Return, bool[among], the Cells ``among`` (rising indices) that no other of them dominates."""
    if len(among) == 0:
        return np.ones(0, dtype=np.bool_)
    workload, gpu_type, rate = cells.workload[among], cells.gpu_type[among], cells.rate[among]
    group = np.ones(len(among), dtype=np.bool_)
    group[1:] = (np.diff(workload) != 0) | (np.diff(gpu_type) != 0)
    demand = cells.demand.at(among)
    if not demand.of_gpus_alone:
        return _unbeaten_in_all(demand, rate, np.flatnonzero(group))
    # The running maximum restarts in each group: ranks are offset so that later groups rank higher.
    order = np.argsort(rate, kind="stable")
    rank = np.empty(len(among), dtype=np.int64)
    rank[order] = np.unique(rate[order], return_inverse=True)[1]
    rank += np.cumsum(group) * len(among)
    so_far = np.maximum.accumulate(rank)
    keep = np.ones(len(among), dtype=np.bool_)
    keep[1:] = rank[1:] > so_far[:-1]
    return keep


def _unbeaten_in_all(demand: Demands, rate: Floats, first: Ints) -> Bools:
    """Return, bool[Cells], those that no Cell of their group dominates in every resource.

    Groups begin at ``first``.
    """
    keep = np.ones(len(rate), dtype=np.bool_)
    for start, end in pairwise([*first.tolist(), len(rate)]):
        own = slice(start, end)
        # [i, j]: whether j is as good as i in each respect, and better in one
        needs = [column[own] for column in (demand.gpus, demand.cpus, demand.host_bytes)]
        losses = [*needs, -rate[own]]
        as_good = np.logical_and.reduce([loss[None, :] <= loss[:, None] for loss in losses])
        better = np.logical_or.reduce([loss[None, :] < loss[:, None] for loss in losses])
        earlier = np.tri(end - start, k=-1, dtype=np.bool_)
        keep[own] = ~(as_good & (better | earlier)).any(axis=1)
    return keep


@dataclass(slots=True, kw_only=True, eq=False)
class _CacheEntry:
    """Cells, together with everything that they depend on."""

    estimates: Estimates
    given: tuple[Ints, Ints, Ints]  # batches of the workloads, node sizes and GPUs of the types
    cells: Cells
    best: Bools

    def holds(self, estimates: Estimates) -> bool:
        """Return whether these are the estimates. If so, remember the new object."""
        old = self.estimates
        same = old is estimates or (len(old) == len(estimates) and old.equals(estimates))
        if same:
            self.estimates = estimates
        return same


MAX_CACHED_RESULTS: Final = 4
"""Number of results of ``cached_cells`` that are kept, because rounds of a few clusters take turns."""

_CACHE: Final[deque[_CacheEntry]] = deque(maxlen=MAX_CACHED_RESULTS)
_LOCK: Final = threading.Lock()


def cached_cells(snapshot: Snapshot) -> tuple[Cells, Bools]:
    """Return ``build_cells`` and ``find_undominated`` of the snapshot, cached if nothing has changed.

    Estimates change rarely but are read again for each round, so they are compared by content. This
    takes a twentieth of the time.
    """
    given = (
        np.array([w.global_batch for w in snapshot.workloads], dtype=np.int64),
        snapshot.node_size(),
        snapshot.schedulable_gpus(),
    )
    with _LOCK:
        known = [entry for entry in _CACHE if all(map(np.array_equal, entry.given, given))]
    for entry in sorted(known, key=lambda entry: entry.estimates is not snapshot.estimates):
        if entry.holds(snapshot.estimates):
            return entry.cells, entry.best
    cells = build_cells(snapshot)
    best = find_undominated(cells)
    with _LOCK:
        _CACHE.append(
            _CacheEntry(estimates=snapshot.estimates, given=given, cells=cells, best=best)
        )
    return cells, best
