"""Shapes on more nodes than a Cell needs, as rows of ``Cells`` that jobs may have as columns.

Placement spreads a gang over more nodes if blocks are missing. Where packing rows say that blocks
are missing, such shapes must be columns: otherwise the rows would forbid what placement may do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from tessera.formulation.base.tables import Bools, begins_group
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.snapshot import Snapshot

EXTRA_NODES: Final = 2
"""Numbers of nodes beyond the fewest that become columns.

Shares on still more nodes hardly weigh less, and their rates only fall. The widest of these columns
stands for all of them."""


@dataclass(slots=True)
class _WideRows:
    """Rows that are to be added: the row that each is copied from, its nodes and its rate."""

    source: list[int]
    nodes: list[int]
    rate: list[float]


def add_wide_shapes(
    snapshot: Snapshot, cells: Cells, kept: Bools, types: frozenset[int]
) -> tuple[Cells, Bools]:
    """Return the Cells with wider shapes on ``types``, and the rows that are worth offering.

    ``kept`` (bool[cells]) are those worth offering so far. For each count of which some row is, a
    row is added for each of the next ``EXTRA_NODES`` numbers of nodes, with the rate at which placement
    would value it, unless one is known. The fastest row of each number of nodes is kept.
    """
    nodes = snapshot.nodes
    most = np.bincount(
        nodes.gpu_type[nodes.schedulable], minlength=len(snapshot.gpu_types)
    ).tolist()
    fewest = -(-cells.gpus // np.maximum(snapshot.node_size()[cells.gpu_type], 1))
    starts = np.flatnonzero(begins_group(cells.workload, cells.gpu_type, cells.gpus))
    ends = np.append(starts[1:], len(cells))
    added, extra = _WideRows([], [], []), np.zeros(len(cells), dtype=np.bool_)
    wanted = np.isin(cells.gpu_type[starts], list(types))
    wanted &= np.logical_or.reduceat(kept, starts) if len(starts) else wanted
    for start, end in zip(starts[wanted].tolist(), ends[wanted].tolist(), strict=True):
        widest = min(int(cells.gpus[start]), most[int(cells.gpu_type[start])])
        known = set()
        for row in range(start, end):  # by falling rate, so the first is the fastest
            if int(cells.nodes[row]) not in known:
                known.add(int(cells.nodes[row]))
                extra[row] = True
        first = int(fewest[start]) + 1
        for count in range(first, min(first + EXTRA_NODES, widest + 1)):
            if count not in known:
                _add_fastest(cells, range(start, end), count, added)
    return _with_rows(cells, kept | extra, added)


def _add_fastest(cells: Cells, rows: range, nodes: int, added: _WideRows) -> None:
    """Add the shape on ``nodes`` nodes of whichever of ``rows`` is fastest there, if one runs."""
    rate, source = max(((cells.rate_on(row, nodes), -row) for row in rows), default=(0.0, 0))
    if rate > 0:
        added.source.append(-source)
        added.nodes.append(nodes)
        added.rate.append(rate)


def _with_rows(cells: Cells, kept: Bools, added: _WideRows) -> tuple[Cells, Bools]:
    """Return the Cells with these rows, all of which are kept, in the order of ``Cells``."""
    source = np.append(np.arange(len(cells)), np.array(added.source, dtype=np.int64))
    nodes = np.append(cells.nodes, np.array(added.nodes, dtype=np.int64))
    rate = np.append(cells.rate, np.array(added.rate))
    order = np.lexsort(
        (nodes, -rate, cells.gpus[source], cells.gpu_type[source], cells.workload[source])
    )
    columns: dict[str, Any] = {
        f.name: getattr(cells, f.name)[source[order]]
        for f in fields(cells)
        if f.name not in ("shapes", "nodes", "rate")
    }
    wide = Cells(shapes=cells.shapes, nodes=nodes[order], rate=rate[order], **columns)
    return wide, np.append(kept, np.ones(len(added.source), np.bool_))[order]
