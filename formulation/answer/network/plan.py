"""The decisions about the network: a path for each bundle, a priority level for each job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkPlan:
    """Paths and priority levels of jobs.

    Levels are 0 to ``levels`` - 1. The higher is served first (as in Crux, figure 13).
    """

    chosen: Ints  # (B,) candidate of each bundle, from 0
    priority: Floats  # (J,) P = k I, before swaps and compression; inf if there is no traffic
    order: Ints  # (J,) jobs, the most urgent first
    level: Ints  # (J,)
    levels: int
    offset_s: Floats | None = None
    """(J,) time by which each job's first iteration is delayed (CASSINI)."""

    @property
    def rank(self) -> Ints:
        """Return the place of each job in ``order``, (J,); 0 is the most urgent."""
        rank = np.empty(len(self.order), dtype=np.int64)
        rank[self.order] = np.arange(len(self.order))
        return rank
