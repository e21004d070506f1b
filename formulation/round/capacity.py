"""Rows that limit columns to the capacity of node pools.

A pool is the schedulable nodes of one GPU type. Capacity rows are made in this module only. Every
column uses the GPU row of its type, so rules and statements need not look for those rows. Rows of
other resources exist only where some column needs that resource. A draft treats them like any other
row.

These rows see pools, not nodes, so placement may still find no nodes for what they allow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.base.resources import HOST_RESOURCES, NOT_STATED, HostResource, amounts_of
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.draft import Draft, RowUse
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.state.snapshot import Snapshot


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
        row
        for resource, needs, has in zip(
            HOST_RESOURCES, amounts_of(demand), amounts_of(nodes), strict=True
        )
        for row in _rows(draft, resource, needs, has)
    ]
    return replace(draft, rows=(*draft.rows, *rows))


def _rows(draft: Draft, resource: HostResource, needs: Ints, has: Ints) -> list[RowUse]:
    """Return the rows of one resource. ``needs`` is int64[columns] and ``has`` is int64[nodes]."""
    kind, unit = RowKind(resource.row), resource.row_unit
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
