"""A scheduler of one's own: the jobs with the fewest requested GPUs start first.

    tessera simulate --policy fcfs --policy smallest_first:SmallestFirst

The current folder or PYTHONPATH must have this file.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import OptionPacking, options_of


class SmallestFirst:
    """A queue by requested GPUs. A job that does not fit is passed by the next one."""

    name = "smallest-first"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that the job waits."""
        options = options_of(seen, requested_only=True)
        packing = OptionPacking(options, seen.capacity)
        packing.keep_running()
        wanted = options.grouped(options.as_requested & options.on_type)
        for job in np.argsort(options.requested_gpus, kind="stable").tolist():
            if packing.option[job] < 0:
                packing.take_first(wanted[job])
        return packing.choice
