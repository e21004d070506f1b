"""Earliest deadline first, preemptive, with the deadline test of Arena's scheduler."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.round.promises.deadlines import finishes_in_time
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions, OptionPacking, options_of


class Edf:
    """Earliest deadline first (Liu and Layland 1973), on GPUs of several types.

    Jobs are taken by deadline, then by arrival. Each keeps what it runs on if that ends in time. If
    not, it gets the count and type that it requested, or else the fastest option. Only options
    count that have room and end in time, a restart included (Arena Eq. 6). GPUs of later jobs count
    as room: those jobs are suspended. A waiting job that no option can end in time is not started
    (Crius section 8.5 drops such jobs early). A running one continues as it is, if there is room
    after all others.
    """

    name = "edf"

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        packing = OptionPacking(options, seen.capacity)
        meets: Bools = finishes_in_time(seen.draft)[options.column]
        wanted = _by_preference(options, meets)
        deadline_s = seen.draft.snapshot.jobs.deadline_s
        for job in np.argsort(deadline_s, kind="stable").tolist():
            packing.take_first(wanted[job])
        for job in np.flatnonzero(options.runs).tolist():
            if packing.option[job] < 0 and not wanted[job]:
                packing.take(int(options.current[job]))
        return packing.choice


def _by_preference(options: JobOptions, meets: Bools) -> list[list[int]]:
    """Return the options of each job that end in time, in the order in which they are tried."""
    requested = options.as_requested & options.on_type
    rank = np.where(options.is_current, 0, np.where(requested, 1, 2)).tolist()
    # ``grouped`` puts the fastest first, and sorting keeps that order.
    return [sorted(own, key=lambda o: rank[o]) for own in options.grouped(meets)]
