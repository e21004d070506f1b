"""Shortest remaining time first."""

from __future__ import annotations

import numpy as np

from tessera.formulation.rates import work_left
from tessera.formulation.tables import Ints
from tessera.solvers.schedulers.base import Seen
from tessera.solvers.schedulers.packing import Packing, options_of


class Srt:
    """Preemptive shortest remaining time at the requested count.

    Remaining time is the work left over the job's reference rate (Eq. 6), so that jobs are compared on
    what they asked for and not on what they happen to hold. In that order, each job gets its
    requested count: where it runs now if it can stay there, because a move costs a restart, else on the
    fastest type with room (a requested type is a wish to this policy; a pinned one binds). One for
    which there is no room waits, or is suspended, and blocks nobody.
    """

    name = "srt"

    def choose(self, seen: Seen) -> Ints:
        """Return the column of each job."""
        options = options_of(seen)
        packing = Packing(options, seen.capacity)
        wanted = options.grouped(options.as_requested)
        stays = (
            options.runs & options.as_requested[options.current] if len(options) else options.runs
        )
        remaining_s = (
            work_left(seen.draft.snapshot) / seen.draft.requested_rate
        )  # NaN: no Cell; sorts last
        for job in np.argsort(remaining_s, kind="stable").tolist():
            if not (stays[job] and packing.take(int(options.current[job]))):
                packing.take_first(wanted[job])
        return packing.choice
