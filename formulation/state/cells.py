"""Cells on shapes: the resources that a workload can run on, with the rate on each shape.

A Cell (``values.CellKey``) has a rate for each shape, that is, for each number of nodes that its
GPUs are spread over. A row of ``Cells`` is a Cell on one shape.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import HOST_NAMES, amounts_of, name_amounts
from tessera.formulation.base.tables import (
    Bools,
    CellTable,
    Floats,
    Ints,
    Table,
    begins_group,
    usual,
)
from tessera.formulation.base.values import CellKey
from tessera.formulation.state.host_tables import Demands, NeedsTable
from tessera.formulation.state.snapshot import Estimates, Snapshot

LOCALITY_FACTOR = 0.9
"""Share of the rate that is kept for each halving of GPUs per node, where no estimate exists.

The value is from Arena's simulator, its rule 2.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes(Table):
    """Rates by shape. The rows of one Cell are adjacent, fewest nodes first."""

    INDEX: ClassVar[str] = "shapes"
    nodes: Ints
    rate: Floats  # samples/s; 0 if the shape was tried and does not run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells(NeedsTable, CellTable):
    """Feasible Cells on feasible shapes, sorted by (workload, type, gpus, falling rate, nodes).

    All rows of a Cell point to the same shapes, and need the same.
    """

    INDEX: ClassVar[str] = "cells"
    workload: Ints
    gpu_type: Ints
    gpus: Ints
    pipeline_degree: Ints
    plan: Ints  # index into Snapshot.plans
    nodes: Ints  # of the shape that `rate` holds for
    rate: Floats  # samples/s at that shape
    first_shape: Ints  # the Cell's rows of `shapes` are first_shape : first_shape + shape_count
    shape_count: Ints
    shapes: Shapes
    complete: Bools = usual(False)  # if true, it runs on no shapes other than these
    sd: Floats = usual(0.0)
    """Standard deviation of the logarithm of its rates, the largest of any shape. 0 if unknown."""

    def __post_init__(self) -> None:
        """Check that no demand is negative."""
        Table.__post_init__(self)
        if any((needs < 0).any() for needs in amounts_of(self)):
            raise InvalidInput("cells", f"{' and '.join(HOST_NAMES)} must be at least 0")

    @property
    def demand(self) -> Demands:
        """Return what a job on each Cell needs of nodes, as totals."""
        return Demands(gpus=self.gpus, **name_amounts(amounts_of(self)))

    def rate_on(self, cell: int, nodes: int) -> float:
        """Return samples/s of the Cell of row ``cell`` spread over ``nodes`` nodes.

        The shape's own estimate is used if there is one. It is 0 if the Cell is known not to run
        there. A complete profile says so of each shape that it lacks. Otherwise the rate is that of
        the nearest narrower shape that runs, times 0.9 for each halving of GPUs per node. If only
        wider shapes are known to run, no job is placed on this one; a job that is there all the
        same counts as running as on the nearest wider one.
        """
        first = int(self.first_shape[cell])
        inferred = 0.0
        for row in range(first, first + int(self.shape_count[cell])):
            spread, rate = int(self.shapes.nodes[row]), float(self.shapes.rate[row])
            if spread == nodes:
                return rate
            if spread > nodes and inferred:
                break
            if rate > 0 and not self.complete[cell]:
                inferred = rate * LOCALITY_FACTOR ** max(0.0, math.log2(nodes / spread))
        return inferred

    def rates_on(self, cell: int, nodes: Sequence[int]) -> list[float]:
        """Return ``rate_on`` for each of ``nodes``, which rise."""
        first, count = int(self.first_shape[cell]), int(self.shape_count[cell])
        spread = self.shapes.nodes[first : first + count].tolist()
        rate = self.shapes.rate[first : first + count].tolist()
        running = [] if self.complete[cell] else [k for k in range(count) if rate[k] > 0]
        rates, known = [], dict(zip(spread, rate, strict=True))
        for n in nodes:
            while len(running) > 1 and spread[running[1]] < n:
                running.pop(0)
            near = running[0] if running else -1
            inferred = 0.0
            if near >= 0:
                halvings = max(0.0, math.log2(n / spread[near]))
                inferred = rate[near] * LOCALITY_FACTOR**halvings
            rates.append(known.get(n, inferred))
        return rates

    def row_on(self, cell: int, nodes: int) -> int:
        """Return the row that a job gets if row ``cell`` was chosen and ``nodes`` nodes are given.

        On its own shape, that is the row itself. On another shape, it is the fastest row for that
        shape of the same workload, type and GPU count. If there is no such row, it is the row
        itself, at the rate that ``rate_on`` infers. Rows that need more CPU cores or host memory
        than row ``cell`` are left out, because the round has not set so much aside.
        """
        if self.nodes[cell] == nodes:
            return cell
        # Rows of a count are sorted by falling rate, so the first is the fastest.
        same_shape = (row for row in self.rows_like(cell) if self.nodes[row] == nodes)
        return next((row for row in same_shape if self._needs_no_more(row, cell)), cell)

    def _needs_no_more(self, row: int, than: int) -> bool:
        return all(bool(needs[row] <= needs[than]) for needs in amounts_of(self))

    def rows_like(self, cell: int) -> range:
        """Return the rows of the same workload, type and GPU count as row ``cell``."""
        low, high = 0, len(self)
        for column in (self.workload, self.gpu_type, self.gpus):
            low, high = _equal_range(column.data, int(column[cell]), low, high)
        return range(low, high)

    def placed_rate(self, cell: int, nodes: int) -> float:
        """Return samples/s of a job that is given ``nodes`` nodes for row ``cell``."""
        return self.rate_on(self.row_on(cell, nodes), nodes)


def _equal_range(values: Sequence[int], wanted: int, low: int, high: int) -> tuple[int, int]:
    """Return the range within ``low : high``, where ``values`` rise, that holds ``wanted``."""
    low = bisect_left(values, wanted, low, high)
    return low, bisect_left(values, wanted + 1, low, high)


def build_cells(snapshot: Snapshot) -> Cells:
    """Return each Cell on each shape that this cluster can have and that is known to run.

    A shape's rate is its own estimate. The shape with the fewest nodes, ``ceil(gpus / node size)``,
    is inferred if no estimate of the same workload, type and GPU count is about it: from the
    nearest narrower shape, which was measured elsewhere, times 0.9 for each halving, or else from
    the nearest wider one. An execution plan with a name was made for its own shape, so nothing is
    inferred from it for narrower ones. Nothing at all is inferred where some estimate of the
    workload and type is from a complete profile.

    Cells larger than the cluster are left out, and so are shapes for which it has too few nodes.
    """
    e = snapshot.estimates.in_order()
    batch = np.array([w.global_batch for w in snapshot.workloads], dtype=np.float64)
    # Estimates of one Cell are adjacent, and so are Cells of one workload, type and GPU count.
    new_count = begins_group(e.workload, e.gpu_type, e.gpus)
    new_cell = new_count | begins_group(e.pipeline_degree, e.plan)
    first = np.flatnonzero(new_cell)
    cell = np.cumsum(new_cell) - 1
    gpu_type, gpus = e.gpu_type[first], e.gpus[first]
    fewest = -(-gpus // np.maximum(snapshot.node_size()[gpu_type], 1))
    known = _KnownShapes(
        cell=cell,
        nodes=e.nodes,
        rate=batch[e.workload] / e.iter_time_s,
        count=(np.cumsum(new_count) - 1)[first],
        fewest=fewest,
        complete=_marked_pairs(e)[first],
        is_named=np.array([name != "" for name in snapshot.plans], dtype=np.bool_)[e.plan[first]],
    )
    known = known.with_fewest_nodes()
    fits = (known.rate > 0) & (known.nodes >= fewest[known.cell])
    fits &= (gpus <= snapshot.schedulable_gpus()[gpu_type])[known.cell]
    wide = np.flatnonzero(fits & (known.nodes > fewest[known.cell]))
    of = known.cell[wide]
    fits[wide] = _has_nodes(snapshot, gpu_type[of], gpus[of], known.nodes[wide])
    row = np.flatnonzero(fits)
    count = known.count[known.cell[row]]
    row = row[np.lexsort((known.nodes[row], -known.rate[row], count))]
    of = known.cell[row]
    begin = np.searchsorted(known.cell, np.arange(len(first) + 1))
    return Cells(
        workload=e.workload[first][of],
        gpu_type=gpu_type[of],
        gpus=gpus[of],
        pipeline_degree=e.pipeline_degree[first][of],
        plan=e.plan[first][of],
        nodes=known.nodes[row],
        rate=known.rate[row],
        first_shape=begin[of],
        shape_count=np.diff(begin)[of],
        shapes=Shapes(nodes=known.nodes, rate=known.rate),
        complete=known.complete[of],
        **name_amounts(_most(needs, first)[of] for needs in amounts_of(e)),
        sd=np.maximum.reduceat(np.nan_to_num(e.sd), first)[of] if len(first) else np.zeros(0),
    )


def _most(needs: Ints, first: Ints) -> Ints:
    """Return the most that an estimate of each Cell states, int64[cells]. Some may state nothing."""
    return np.maximum.reduceat(needs, first) if len(first) and needs.any() else needs[first]


def _marked_pairs(e: Estimates) -> Bools:
    """Return whether some estimate of the same workload and type is complete, bool[estimates]."""
    if not e.complete.any():
        return e.complete
    new = begins_group(e.workload, e.gpu_type)
    marked = np.logical_or.reduceat(e.complete, np.flatnonzero(new))
    pairs: Bools = marked[np.cumsum(new) - 1]
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KnownShapes:
    """Rates of Cells by shape, fewest nodes first in each Cell, and facts about the Cells."""

    cell: Ints  # int64[shapes], rising
    nodes: Ints  # int64[shapes]
    rate: Floats  # float64[shapes], samples/s; 0 if it does not run
    count: Ints  # int64[cells], rising; a number for each workload, type and GPU count
    fewest: Ints  # int64[cells], the fewest nodes that this cluster allows
    complete: Bools  # bool[cells], whether they run on no other shapes
    is_named: Bools  # bool[cells], whether the Cell's execution plan has a name

    def with_fewest_nodes(self) -> _KnownShapes:
        """Return the shapes together with those of the fewest nodes that are inferred."""
        spoken = np.zeros(int(self.count.max(initial=-1)) + 1, dtype=np.bool_)
        spoken[self.count[self.cell[self.nodes == self.fewest[self.cell]]]] = True
        silent = np.flatnonzero(~spoken[self.count] & ~self.complete)
        if not len(silent):
            return self
        rate = self._inferred(silent)
        silent, rate = silent[rate > 0], rate[rate > 0]
        order = np.lexsort(
            (np.append(self.nodes, self.fewest[silent]), np.append(self.cell, silent))
        )
        return replace(
            self,
            cell=np.append(self.cell, silent)[order],
            nodes=np.append(self.nodes, self.fewest[silent])[order],
            rate=np.append(self.rate, rate)[order],
        )

    def _inferred(self, among: Ints) -> Floats:
        """Return samples/s of the Cells ``among`` at their fewest nodes, 0 if unknown."""
        runs, none = self.rate > 0, np.iinfo(np.int64).max
        position = np.arange(len(self.cell), dtype=np.int64)
        target = self.fewest[self.cell]
        first = np.flatnonzero(begins_group(self.cell))
        better = np.maximum.reduceat(np.where(runs & (self.nodes < target), position, -1), first)
        worse = np.minimum.reduceat(np.where(runs & (self.nodes > target), position, none), first)
        better, worse = better[among], worse[among]
        near = np.maximum(better, 0)
        halvings = np.log2(self.fewest[among] / self.nodes[near])
        wider = np.where(
            (worse < none) & ~self.is_named[among], self.rate[np.where(worse < none, worse, 0)], 0.0
        )
        return np.where(
            better >= 0, self.rate[near] * LOCALITY_FACTOR ** np.maximum(halvings, 0.0), wider
        )


def _has_nodes(snapshot: Snapshot, gpu_type: Ints, gpus: Ints, nodes: Ints) -> Bools:
    """Return whether enough schedulable nodes hold an equal share, rounded up, bool[shapes]."""
    has = np.zeros(len(nodes), dtype=np.bool_)
    share = -(-gpus // nodes)
    for kind in np.unique(gpu_type).tolist():
        own = snapshot.nodes.schedulable & (snapshot.nodes.gpu_type == kind)
        sizes = np.sort(snapshot.nodes.gpus[own])
        at = np.flatnonzero(gpu_type == kind)
        has[at] = len(sizes) - np.searchsorted(sizes, share[at]) >= nodes[at]
    return has


def find_most_compact(cells: Cells, among: Ints | None = None) -> Bools:
    """Return the rows on the fewest nodes of their workload, type and GPU count, bool[among].

    ``among`` are rising indices of rows. If it is None, it is every row.
    """
    rows = slice(None) if among is None else among
    nodes = cells.nodes[rows]
    if not len(nodes):
        return np.zeros(0, dtype=np.bool_)
    new = begins_group(cells.workload[rows], cells.gpu_type[rows], cells.gpus[rows])
    least = np.minimum.reduceat(nodes, np.flatnonzero(new))
    compact: Bools = nodes == least[np.cumsum(new) - 1]
    return compact


def one_cell() -> Cells:
    """Return a table of one Cell, for columns whose Cell does not matter."""
    zero, one, rate = np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1)
    return Cells(
        workload=zero,
        gpu_type=zero,
        gpus=one,
        pipeline_degree=one,
        plan=zero,
        nodes=one,
        rate=rate,
        first_shape=zero,
        shape_count=one,
        shapes=Shapes(nodes=one, rate=rate),
    )


def most_compact_by_job(cells: Cells, row: Ints, owner: Ints) -> Bools:
    """Return which of each job's rows are on the fewest nodes of their type and GPU count.

    ``row`` (int64[any], indices of rows) and ``owner`` list job after job, each by rising row.
    """
    if not len(row):
        return np.zeros(0, dtype=np.bool_)
    new = begins_group(owner, cells.gpu_type[row], cells.gpus[row])
    least = np.minimum.reduceat(cells.nodes[row], np.flatnonzero(new))
    compact: Bools = cells.nodes[row] == least[np.cumsum(new) - 1]
    return compact


def find_narrowest(cells: Cells) -> dict[tuple[int, CellKey], int]:
    """Return the row of each (workload, Cell) on its fewest nodes."""
    rows = np.argsort(-cells.nodes, kind="stable")  # the narrowest is written last
    keys = zip(cells.workload[rows].tolist(), cells.keys(rows), strict=True)
    return dict(zip(keys, rows.tolist(), strict=True))
