"""Dominance among Cells: the rows of ``Cells`` that are worth offering.

A row dominates another of the same workload and type if it is not slower, is on no more nodes, and
needs no more GPUs, CPU cores and host memory. Of the rows of one GPU count that are left, each is
strictly faster than all narrower ones. A workload therefore has at most as many columns for a type
and a count as there are numbers of nodes on which that count is known to run.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tessera.formulation.base.resources import amounts_of
from tessera.formulation.base.tables import Bools, Floats, Ints, begins_group
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.host_tables import Demands


def find_undominated(cells: Cells) -> Bools:
    """Return, bool[cells], the rows that no other row of the same workload and type dominates.

    Of equal rows, the first in table order stays.
    """
    return _unbeaten(cells, np.arange(len(cells), dtype=np.int64), cells.nodes)


def find_undominated_from(cells: Cells, workload: int, least: int) -> Ints:
    """Return the indices of the undominated rows of ``workload`` on ``least`` or more GPUs.

    Smaller Cells do not count as dominating.
    """
    large = _rows_from(cells, workload, least)
    return large[_unbeaten(cells, large, cells.nodes[large])]


def find_fastest(cells: Cells, workload: int, least: int = 0) -> Ints:
    """Return the indices of the rows of ``workload`` that are undominated whatever their shape.

    A row then dominates on more nodes, too, so at most one row of each type and GPU count is left.
    Cells on fewer than ``least`` GPUs do not count.
    """
    large = _rows_from(cells, workload, least)
    return large[_unbeaten(cells, large, np.ones(len(large), dtype=np.int64))]


def _rows_from(cells: Cells, workload: int, least: int) -> Ints:
    first, last = np.searchsorted(cells.workload, [workload, workload + 1]).tolist()
    rows: Ints = first + np.flatnonzero(cells.gpus[first:last] >= least)
    return rows


def _unbeaten(cells: Cells, among: Ints, nodes: Ints) -> Bools:
    """Return, bool[among], the rows ``among`` (rising indices) that no other of them dominates.

    ``nodes`` is int64[among].
    """
    if len(among) == 0:
        return np.ones(0, dtype=np.bool_)
    workload, gpu_type, rate = cells.workload[among], cells.gpu_type[among], cells.rate[among]
    new = begins_group(workload, gpu_type)
    demand = cells.demand.at(among)
    if not demand.of_gpus_alone:
        return _unbeaten_in_all(demand, nodes, rate, np.flatnonzero(new))
    # Rows are sorted by GPUs, then falling rate, then nodes. So only an earlier row dominates.
    group = np.cumsum(new) - 1
    narrow = nodes <= _least_of_later(nodes, group)
    keep = ~_beaten_by(narrow, rate, group)
    # A row that is wider than some later one dominates only those that are as wide. After the first
    # step, few such rows are left.
    left = np.flatnonzero(keep)
    for width in np.unique(nodes[keep & ~narrow]).tolist():
        among_left = left[nodes[left] >= width]
        wide = ~narrow[among_left] & (nodes[among_left] == width)
        keep[among_left[_beaten_by(wide, rate[among_left], group[among_left])]] = False
    return keep


def _least_of_later(nodes: Ints, group: Ints) -> Ints:
    """Return the fewest nodes among each row and the later rows of its group, int64[rows]."""
    # The running minimum restarts in each group: those of earlier groups are lower by an offset.
    offset = group * (int(nodes.max()) + 1)
    least: Ints = np.minimum.accumulate((nodes + offset)[::-1])[::-1] - offset
    return least


def _beaten_by(winners: Bools, rate: Floats, group: Ints) -> Bools:
    """Return whether an earlier row of the same group among ``winners`` is as fast, bool[rows]."""
    # The running maximum restarts in each group: ranks are offset so that later groups rank higher.
    order = np.argsort(rate, kind="stable")
    rank = np.empty(len(rate), dtype=np.int64)
    sorted_rate = rate[order]
    rank[order] = np.cumsum(np.append(True, sorted_rate[1:] != sorted_rate[:-1]))
    base = group * (len(rate) + 1)
    so_far = np.maximum.accumulate(np.where(winners, rank, 0) + base)
    beaten = np.zeros(len(rate), dtype=np.bool_)
    beaten[1:] = (rank + base)[1:] <= so_far[:-1]
    return beaten


def _unbeaten_in_all(demand: Demands, nodes: Ints, rate: Floats, first: Ints) -> Bools:
    """Return, bool[rows], those that no row of their group dominates in every respect.

    Groups begin at ``first``.
    """
    keep = np.ones(len(rate), dtype=np.bool_)
    for start, end in pairwise([*first.tolist(), len(rate)]):
        own = slice(start, end)
        # [i, j]: whether j is as good as i in each respect, and better in one
        needs = [column[own] for column in (demand.gpus, *amounts_of(demand), nodes)]
        losses = [*needs, -rate[own]]
        as_good = np.logical_and.reduce([loss[None, :] <= loss[:, None] for loss in losses])
        better = np.logical_or.reduce([loss[None, :] < loss[:, None] for loss in losses])
        earlier = np.tri(end - start, k=-1, dtype=np.bool_)
        keep[own] = ~(as_good & (better | earlier)).any(axis=1)
    return keep
