"""Options as a table, job by (GPU type, count), for schedulers that scale many jobs.

It also has the order of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.schedulers.base import SchedulerView
from tessera.solvers.schedulers.packing import JobOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """A table of options by job and slot.

    Slot k is GPU type ``k // len(sizes)`` with ``sizes[k % len(sizes)]`` GPUs. ``column`` is
    int64[jobs, slots], the job's column there, or -1 if it has none. ``worth`` is float64[jobs,
    slots], its value, or -inf if it has none. ``current`` is int64[jobs], the slot that each job
    runs on, or -1 if it does not run.
    """

    sizes: Ints  # the GPU counts that occur, rising
    types: int
    column: Ints
    worth: Floats
    current: Ints

    @cached_property
    def gpus(self) -> Ints:
        """Return the GPUs of each slot, int64[slots]."""
        return np.tile(self.sizes, self.types)

    @cached_property
    def gpu_type(self) -> Ints:
        """Return the GPU type of each slot, int64[slots]."""
        return np.repeat(np.arange(self.types, dtype=np.int64), len(self.sizes))

    @cached_property
    def half(self) -> Ints:
        """Return the slot of the same type with half as many GPUs, int64[slots]; -1 if none."""
        return self._at(self.gpus // 2, self.gpus % 2 == 0)

    @cached_property
    def double(self) -> Ints:
        """Return the slot of the same type with twice as many GPUs, int64[slots]; -1 if none."""
        return self._at(self.gpus * 2, np.ones(len(self.gpus), np.bool_))

    def _at(self, gpus: Ints, possible: Bools) -> Ints:
        where = np.searchsorted(self.sizes, gpus)
        exists = possible & (where < len(self.sizes))
        exists[exists] = self.sizes[where[exists]] == gpus[exists]
        slots: Ints = np.where(exists, self.gpu_type * len(self.sizes) + where, -1)
        return slots


def slots_of(options: JobOptions, worth: Floats, types: int) -> Slots:
    """Return ``options`` as a table; ``worth`` is float64[columns]."""
    sizes = np.unique(options.gpus)
    slot = options.gpu_type * len(sizes) + np.searchsorted(sizes, options.gpus)
    shape = (len(options.current), types * len(sizes))
    column, value = np.full(shape, -1, dtype=np.int64), np.full(shape, -np.inf)
    column[options.job, slot] = options.column
    value[options.job, slot] = worth[options.column]
    current = np.full(len(options.current), -1, dtype=np.int64)
    current[options.runs] = slot[options.current[options.runs]]
    return Slots(sizes=sizes, types=types, column=column, worth=value, current=current)


def jobs_in_order(seen: SchedulerView) -> Ints:
    """Return the jobs by queue, then arrival, int64[jobs]."""
    jobs = seen.draft.snapshot.jobs
    return np.lexsort((jobs.submit_s, jobs.priority)).astype(np.int64)
