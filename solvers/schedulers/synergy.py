"""Synergy (Mohan et al. 2022).

Morphling compares with it in sections 7.1 and 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.formulation.base.tables import Ints
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import OptionPacking, host_capacity, options_of
from tessera.solvers.schedulers.slots import jobs_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Synergy:
    """First come, first served, skipping jobs that do not fit.

    The GPU count and the execution plan are fixed, and no job is preempted. Synergy gives each job
    the CPUs and host memory to which it is sensitive. Here these are what the Cell of its plan
    states. A job for which the pools that state them have too few waits. Each job runs at the count
    and on the type that it requested, by the plan that it was submitted with. If that is not
    recorded, it is the best plan there. If it takes any type, it gets the fastest one with room.
    """

    name: str = "synergy"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen, submitted=True)
        packing = OptionPacking(options, seen.capacity, host_capacity(seen))
        packing.keep_running()
        wishes = options.grouped(options.as_requested & options.on_type)
        for job in jobs_in_order(seen).tolist():
            if packing.option[job] < 0:
                packing.take_first(wishes[job])
        return packing.choice
