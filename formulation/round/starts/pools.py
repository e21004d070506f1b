"""The limits on tenants and arrays that planned starts keep free over time, like GPUs of nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.problem import TENANT_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class TenantPool:
    """A limit on the jobs of tenants, counted like a node."""

    name: str
    number: int
    size: int
    amount: Ints  # int64[columns]


class Pools:
    """All limits of a round. Their numbers follow those which the nodes have."""

    def __init__(self, draft: Draft) -> None:
        """Number the quotas, the limits on borrowing, and the arrays of a draft."""
        self.tenants: list[TenantPool] = []
        count = len(draft.snapshot.nodes)
        for use in draft.rows:
            if use.row.kind in TENANT_ROWS:
                amount = np.zeros(len(draft.cell), dtype=np.int64)
                amount[use.column] = use.amount
                number = count + len(self.tenants)
                self.tenants.append(TenantPool(use.row.name, number, use.row.capacity, amount))
        jobs, count = draft.snapshot.jobs, count + len(self.tenants)
        arrays = np.unique(jobs.array[jobs.array >= 0]).tolist()
        self.number_of_array = {array: count + k for k, array in enumerate(arrays)}
        self.sizes = [pool.size for pool in self.tenants]
        self.sizes += [int(jobs.array_limit[jobs.array == array].max()) for array in arrays]

    def uses_of(self, column: Ints) -> list[tuple[tuple[int, int], ...]]:
        """Return (pool, amount) of each column (int64[any]) for the tenants' pools that it uses."""
        if not self.tenants:
            return [()] * len(column)
        amounts = np.stack([pool.amount[column] for pool in self.tenants], axis=1).tolist()
        return [
            tuple((pool.number, n) for pool, n in zip(self.tenants, row, strict=True) if n)
            for row in amounts
        ]
