"""Loops as rigid as those that Arena's artifact has for other schedulers' policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.tables import Ints
from tessera.solvers.schedulers.base import Seen
from tessera.solvers.schedulers.packing import Packing, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rigid:
    """Jobs one by one, in order of arrival; what runs keeps what it has until it ends.

    A waiting job gets the fastest of its options that has room: at the count that it requested, or at
    ``any_count``; on the type that it requested, or on ``any_type``. The artifact's Gavel and Sia solve an
    integer program for each job that arrives, in which few running jobs may change type; what is left of
    that here is the new job's choice.
    """

    name: str
    any_count: bool = False
    any_type: bool = False

    def choose(self, seen: Seen) -> Ints:
        """Return the column of each job, int64[jobs]; -1: it waits."""
        options = options_of(seen)
        allowed = np.ones(len(options), dtype=np.bool_)
        if not self.any_count:
            allowed &= options.as_requested
        if not self.any_type:
            allowed &= options.on_type
        packing = Packing(options, seen.capacity)
        packing.keep_running()
        for job, mine in enumerate(options.grouped(allowed)):
            if packing.option[job] < 0:
                packing.take_first(mine)
        return packing.choice
