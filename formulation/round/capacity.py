"""Rows that limit columns to the capacity of node pools.

A pool is the schedulable nodes of one GPU type. Capacity rows are made in this module only. Every
column uses the GPU row of its type, so rules and statements need not look for those rows. Rows of
other resources exist only where some column needs that resource. A draft treats them like any other
row.

These rows see pools, not nodes, so placement may still find no nodes for what they allow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.state.demand import NOT_STATED
from tessera.formulation.state.snapshot import Snapshot

_MEBIBYTE: Final = 1 << 20
"""Bytes in one unit of a host memory row. Counted in bytes, the sum over columns may exceed 2^53.

Needs and capacity are rounded down, so the row never refuses what fits exactly.
"""


def gpu_rows(snapshot: Snapshot) -> tuple[CouplingRow, ...]:
    """Return one row for each GPU type, in the order of the types."""
    return tuple(
        CouplingRow(kind=RowKind.GPUS, subject=kind.name, capacity=gpus)
        for kind, gpus in zip(snapshot.gpu_types, snapshot.schedulable_gpus().tolist(), strict=True)
    )


def pools_have_enough(draft: Draft) -> Draft:
    """Add a row for each pool and each resource other than GPUs (Eq. 3a).

        sum_{c on t} d_rc x_c <= sum over schedulable nodes of t of what they have of r

    A row is added only where columns need the resource and all nodes of the pool state theirs. A
    node that does not state its capacity limits nothing, and neither does its pool.
    """
    demand, nodes = draft.demand, draft.snapshot.nodes
    if demand.of_gpus_alone:
        return draft
    rows = [
        *_rows(draft, RowKind.CPUS, demand.cpus, nodes.cpus, 1),
        *_rows(draft, RowKind.HOST_MEMORY, demand.host_bytes, nodes.host_bytes, _MEBIBYTE),
    ]
    return replace(draft, rows=(*draft.rows, *rows))


def _rows(draft: Draft, kind: RowKind, needs: Ints, has: Ints, unit: int) -> list[RowUse]:
    """Return the rows of one resource. ``needs`` is int64[columns] and ``has`` is int64[nodes]."""
    snapshot, uses = draft.snapshot, []
    for index, gpu_type in enumerate(snapshot.gpu_types):
        pool: Bools = snapshot.nodes.schedulable & (snapshot.nodes.gpu_type == index)
        column = np.flatnonzero((draft.gpu_type == index) & (needs > 0))
        if len(column) and not (has[pool] == NOT_STATED).any():
            row = CouplingRow(
                kind=kind, subject=gpu_type.name, capacity=int(has[pool].sum()) // unit
            )
            uses.append(RowUse(row=row, column=column, amount=needs[column] // unit))
    return uses
