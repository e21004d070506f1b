"""Gandiva: time slices if GPUs are short, and growth if they are idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions, OptionPacking, options_of
from tessera.solvers.schedulers.parameters import ParameterRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Gandiva:
    """Gandiva (OSDI'18), applied to whole GPUs.

    Time-slicing: jobs take turns of ``slice_s`` (a round, if it is None). Jobs within their slice
    come first, then those that wait, longest first, and then those whose slice is over, latest
    start first. Each gets its requested count; a job for which there is no room is skipped. While
    all jobs fit, none is moved. Growth: only if no job waits, idle GPUs go to running jobs, one
    step of their known counts at a time, where a GPU adds most to the job's present rate. Jobs keep
    what they gained until a job waits; then they shrink again.

    Packing several jobs on a GPU is not implemented, because a GPU has one holder here. Migration
    to a better locality is left to placement, which does it for every scheduler. The paper leaves
    two points open. The order of growth follows the estimates here, while Gandiva grows jobs and
    watches them. A job that takes any type gets the one with most free GPUs, since Gandiva balances
    load and compares no types.
    """

    name: str = "gandiva"
    slice_s: Annotated[
        float | None,
        ParameterRule(
            kind="number",
            low=1.0,
            meaning="Seconds of a job's turn. Default: the time to the next round. inf: no job is suspended.",
            source="Gandiva (OSDI'18); Arena's copy: inf",
        ),
    ] = None

    def choose(self, seen: SchedulerView) -> Ints:
        """Return the column of each job, int64[jobs]; -1 means that it waits."""
        options = options_of(seen)
        packing = OptionPacking(options, seen.capacity)
        wanted = _wanted(options)
        kind = options.gpu_type.tolist()
        for job in self._turns(seen, options).tolist():
            packing.take_first(sorted(wanted[job], key=lambda o: -packing.free[kind[o]]))
        if not any(own and packing.option[job] < 0 for job, own in enumerate(wanted)):
            packing.keep_running()
            rate, gpus = options.rate.tolist(), options.gpus.tolist()
            packing.grow(lambda a, b: (rate[b] / rate[a] - 1) / (gpus[b] - gpus[a]))
        return packing.choice

    def _turns(self, seen: SchedulerView, options: JobOptions) -> Ints:
        """Return the jobs in the order in which they are served."""
        snapshot = seen.draft.snapshot
        slice_s = seen.draft.policy.round_s if self.slice_s is None else self.slice_s
        over = options.runs & (snapshot.now_s - snapshot.jobs.since_s >= slice_s)
        rank = np.where(over, 2, np.where(options.runs, 0, 1))
        within = np.where(
            over, -snapshot.jobs.since_s, np.where(options.runs, 0.0, snapshot.jobs.queued_s)
        )
        return np.lexsort((np.arange(len(rank)), within, rank))


def _wanted(options: JobOptions) -> list[list[int]]:
    """Return the options of each job at the requested count.

    A running job has only those on its present type. If it has no Cell of the requested count
    there, it has the option that it runs on.
    """
    runs, now = options.runs[options.job], options.current[options.job]
    here = options.gpu_type == options.gpu_type[now] if len(options) else runs
    wanted = options.grouped(options.as_requested & np.where(runs, here, options.on_type))
    for job in np.flatnonzero(options.runs).tolist():
        if not wanted[job]:
            wanted[job] = [int(options.current[job])]
    return wanted
