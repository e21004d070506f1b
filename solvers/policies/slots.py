"""The best column of each job at each (GPU type, GPU count): what policies that scale jobs look things up in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulation.draft import Draft
from formulation.lifecycle import ACTIVE
from formulation.snapshot import STATE_CODE
from formulation.tables import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Slot k is GPU type ``k // len(sizes)`` with ``sizes[k % len(sizes)]`` GPUs.

    ``column`` is int64[jobs, slots], the job's best column there (-1: none), ``worth`` float64[jobs, slots]
    what it is worth (-inf: none).
    """

    sizes: Ints  # GPU counts that occur, rising
    types: int
    column: Ints
    worth: Floats

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
        """Return the slot of the same type with half as many GPUs, int64[slots]; -1: none."""
        return self._scaled(self.gpus // 2, self.gpus % 2 == 0)

    @cached_property
    def double(self) -> Ints:
        """Return the slot of the same type with twice as many GPUs, int64[slots]; -1: none."""
        return self._scaled(self.gpus * 2, np.ones(len(self.gpus), np.bool_))

    def _scaled(self, gpus: Ints, possible: Bools) -> Ints:
        where = np.searchsorted(self.sizes, gpus)
        found = possible & (where < len(self.sizes))
        found[found] = self.sizes[where[found]] == gpus[found]
        return np.where(found, self.gpu_type * len(self.sizes) + where, -1)

    def of(self, draft: Draft, columns: Ints) -> Ints:
        """Return the slot of each column of ``draft``; -1 stays -1."""
        if not len(draft.cell):
            return columns
        size = np.searchsorted(self.sizes, draft.gpus[columns])
        return np.where(columns >= 0, draft.gpu_type[columns] * len(self.sizes) + size, -1)


def slots_of(draft: Draft, worth: Floats, keep: Bools | None = None) -> Slots:
    """Tabulate the columns ``keep`` (bool[columns]; all where None) of ``draft`` by what they are worth.

    Of equally worthy columns at one (type, count) the first counts.
    """
    jobs, types = len(draft.current), len(draft.snapshot.gpu_types)
    chosen = np.arange(len(draft.cell)) if keep is None else np.flatnonzero(keep)
    sizes = np.unique(draft.gpus)
    slot = draft.gpu_type[chosen] * len(sizes) + np.searchsorted(sizes, draft.gpus[chosen])
    order = np.lexsort((-chosen, worth[chosen]))  # the last one written stays
    column = np.full((jobs, types * len(sizes)), -1, dtype=np.int64)
    column[draft.job[chosen][order], slot[order]] = chosen[order]
    best = np.where(column >= 0, worth[column], -np.inf) if len(worth) else np.zeros(column.shape)
    return Slots(sizes=sizes, types=types, column=column, worth=best)


def keeps(draft: Draft) -> Ints:
    """Return the column that each launched job holds and can go on with, int64[jobs]; -1: none."""
    codes = [STATE_CODE[state] for state in ACTIVE]
    active = np.isin(draft.snapshot.jobs.state, codes)
    return np.where(active, draft.current, -1)


def in_order(draft: Draft) -> Ints:
    """Return the jobs by queue, then arrival (Arena section 3.5), int64[jobs].

    A waiting job counts as one queue higher for each ``promote_after_s`` that it has waited.
    """
    return np.lexsort((draft.snapshot.jobs.submit_s, queue_now(draft))).astype(np.int64)


def queue_now(draft: Draft) -> Ints:
    """Return the queue that each job counts in now, int64[jobs]; 1 is served first."""
    jobs, policy = draft.snapshot.jobs, draft.policy
    waited_s = np.maximum(0.0, draft.snapshot.now_s - jobs.queued_s)
    steps = np.floor(waited_s / policy.promote_after_s).astype(np.int64)
    waiting = keeps(draft) < 0
    return np.maximum(1, np.where(waiting, jobs.queue - steps, jobs.queue))
