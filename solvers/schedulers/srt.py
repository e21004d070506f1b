"""Shortest remaining time first."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.round.rates import work_left
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import OptionPacking, options_of


class Srt:
    """Preemptive shortest remaining time at the requested count.

    Remaining time is the remaining work over the job's reference rate (Eq. 6c), so that jobs are
    compared by what they requested and not by the GPUs that they hold. In that order, each job gets
    its requested count. It stays where it runs now if it can, because a move costs a restart.
    Otherwise it gets the fastest type with room; a requested type is only a wish to this scheduler,
    but a pinned one is binding. A job for which there is no room waits, or is suspended, and blocks
    no other job.
    """

    name = "srt"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        packing = OptionPacking(options, seen.capacity)
        wanted = options.grouped(options.as_requested)
        stays = (
            options.runs & options.as_requested[options.current] if len(options) else options.runs
        )
        # A job without a Cell has NaN, which sorts last.
        remaining_s = work_left(seen.draft.snapshot) / seen.draft.requested_rate
        for job in np.argsort(remaining_s, kind="stable").tolist():
            if not (stays[job] and packing.take(int(options.current[job]))):
                packing.take_first(wanted[job])
        return packing.choice
