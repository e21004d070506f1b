"""Cells of recent snapshots, because rounds read the same estimates again and again."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.state.cells import Cells, build_cells
from tessera.formulation.state.dominance import find_undominated
from tessera.formulation.state.snapshot import Estimates, Snapshot


@dataclass(slots=True, kw_only=True, eq=False)
class _CacheEntry:
    """Cells, together with everything that they depend on."""

    estimates: Estimates
    given: tuple[Ints | Bools, ...]
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
    nodes = snapshot.nodes
    given = (
        np.array([w.global_batch for w in snapshot.workloads], dtype=np.int64),
        np.array([name != "" for name in snapshot.plans], dtype=np.bool_),
        nodes.gpu_type[nodes.schedulable],
        nodes.gpus[nodes.schedulable],
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
