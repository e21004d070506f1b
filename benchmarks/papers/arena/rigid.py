"""Scheduling loops as rigid as those of Arena's artifact for other schedulers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.formulation.tables import Ints
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import OptionPacking, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RigidScheduler:
    """A scheduler that places jobs one by one, in order of arrival.

    A running job keeps its GPUs until it ends. A waiting job gets the fastest of its options that
    fits. Options have the number of GPUs that the job requested, or any number with ``any_count``.
    They are on the type that it requested, or on any type with ``any_type``. The artifact's Gavel
    and Sia solve an integer program for each job that arrives, in which few running jobs may change
    type. Here, only the new job's choice remains of that.
    """

    name: str
    any_count: bool = False
    any_type: bool = False

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs], or -1 for a job that waits."""
        options = options_of(seen)
        allowed = np.ones(len(options), dtype=np.bool_)
        if not self.any_count:
            allowed &= options.as_requested
        if not self.any_type:
            allowed &= options.on_type
        packing = OptionPacking(options, seen.capacity)
        packing.keep_running()
        for job, mine in enumerate(options.grouped(allowed)):
            if packing.option[job] < 0:
                packing.take_first(mine)
        return packing.choice
