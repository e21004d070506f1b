"""Gandiva: time slices where GPUs are short, growth where they are idle."""

from __future__ import annotations

import numpy as np

from tessera.formulation.tables import Ints
from tessera.solvers.schedulers.base import Seen
from tessera.solvers.schedulers.packing import Options, Packing, options_of


class Gandiva:
    """Gandiva (OSDI'18), read for whole GPUs.

    Time-slicing: jobs take turns of ``slice_s`` (None: a round). A job within its slice goes first, then
    those that wait, longest first, then those whose slice is over, latest start first; each gets its
    requested count, and one for which there is no room is skipped. While all fit, nobody is moved.
    Growth: only when no job waits, idle GPUs go to running jobs, one step of their known counts at a
    time, where a GPU adds most of the job's present rate; what they gained is theirs until somebody
    waits, then they shrink back.

    Not built, because a GPU has one holder here: packing several jobs on a GPU. Migration to a better
    locality is left to placement, which does it for every policy. Left open by the paper, and chosen
    here: the order of growth (it grows and watches; estimates take the place of watching), and the type of a
    job that takes any: the one with most GPUs free, since Gandiva balances load and compares no types.
    """

    name = "gandiva"

    def __init__(self, slice_s: float | None = None) -> None:
        self._slice_s = slice_s

    def choose(self, seen: Seen) -> Ints:
        """Return the column of each job."""
        options = options_of(seen)
        packing = Packing(options, seen.capacity)
        wanted = _wanted(options)
        kind = options.gpu_type.tolist()
        for job in self._turns(seen, options).tolist():
            packing.take_first(sorted(wanted[job], key=lambda o: -packing.free[kind[o]]))
        if not any(mine and packing.option[job] < 0 for job, mine in enumerate(wanted)):
            packing.keep_running()
            rate, gpus = options.rate.tolist(), options.gpus.tolist()
            packing.grow(lambda a, b: (rate[b] / rate[a] - 1) / (gpus[b] - gpus[a]))
        return packing.choice

    def _turns(self, seen: Seen, options: Options) -> Ints:
        """Return the jobs in the order in which they are served."""
        snapshot = seen.draft.snapshot
        slice_s = seen.draft.policy.round_s if self._slice_s is None else self._slice_s
        over = options.runs & (snapshot.now_s - snapshot.jobs.since_s >= slice_s)
        rank = np.where(over, 2, np.where(options.runs, 0, 1))
        within = np.where(
            over, -snapshot.jobs.since_s, np.where(options.runs, 0.0, snapshot.jobs.queued_s)
        )
        return np.lexsort((np.arange(len(rank)), within, rank))


def _wanted(options: Options) -> list[list[int]]:
    """Return the options at the requested count: on its present type for a job that runs.

    A running job that has no Cell of the requested count there wants what it has.
    """
    runs, now = options.runs[options.job], options.current[options.job]
    here = options.gpu_type == options.gpu_type[now] if len(options) else runs
    wanted = options.grouped(options.as_requested & np.where(runs, here, options.on_type))
    for job in np.flatnonzero(options.runs).tolist():
        if not wanted[job]:
            wanted[job] = [int(options.current[job])]
    return wanted
