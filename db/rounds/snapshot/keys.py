"""The keys of rows as positions in a snapshot, in which keys never appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import sqlalchemy as sa

from tessera.formulation.base.tables import Ints


class KeyIndex:
    """A map from keys of rows to positions in the snapshot."""

    def __init__(self, keys: Sequence[int] | Ints = ()) -> None:
        """Index the rows of ``keys`` in their order in the snapshot."""
        own = np.asarray(keys, dtype=np.int64)
        self._order = np.argsort(own)
        self._sorted = own[self._order]

    def of(self, keys: Ints, absent: int = -1) -> Ints:
        """Return the position of each key, int64[keys], or ``absent`` for an unknown key."""
        if not len(self._sorted):
            return np.full(len(keys), absent, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._order[at], absent).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The positions of a cluster's rows. Those of its jobs are known once the jobs are read."""

    types: KeyIndex
    workloads: KeyIndex
    plans: KeyIndex
    nodes: KeyIndex
    jobs: KeyIndex

    @classmethod
    def of_cluster(cls, row: sa.Row[Any]) -> Self:
        """Return the positions of the rows of small tables, which have their key first."""
        types, workloads, plans, nodes = (
            KeyIndex([own[0] for own in rows])
            for rows in (row.gpu_types, row.workloads, row.plans, row.nodes)
        )
        return cls(types=types, workloads=workloads, plans=plans, nodes=nodes, jobs=KeyIndex())


def split_rows(rows: Sequence[Sequence[Any]], columns: int) -> list[tuple[Any, ...]]:
    """Return the columns of rows. There may be no rows."""
    return list(zip(*rows, strict=True)) or [()] * columns


def split_ints(rows: Sequence[Sequence[int]], columns: int) -> list[Ints]:
    """Return the columns of rows of whole numbers, each int64[rows]. There may be no rows."""
    return [np.array(column, np.int64) for column in split_rows(rows, columns)]
