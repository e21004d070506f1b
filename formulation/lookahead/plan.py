"""Jobs with deadlines in slots: their options, and their schedules as slots or as legs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tessera.formulation.cells import Cells
from tessera.formulation.draft import do_not_check
from tessera.formulation.lookahead.grid import SAME_S
from tessera.formulation.snapshot import Legs
from tessera.formulation.tables import Bools, Floats, Ints

WORK_UNITS: Final = 10**8
"""A job's remaining work in integers. Rounding loses less than a millionth of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookahead:
    """Jobs with deadlines, their options, and the free resources in each slot.

    A job's options are ``option_start[j] : option_start[j + 1]``. An option that ``stays`` is the
    Cell that the job runs on, on its own GPUs. It has no restart to pay except the rest of the last
    one (``lag_s``). It continues from now without a break, or is not used at all.

    A steady job (guaranteed, or jobs run to completion) keeps ``floor`` GPUs of each type that it
    ever given, up to the horizon. ``held`` is the type of which it has some already, or -1 if
    it has none. Resources are the GPU types, then those rows of the round that only columns use.
    columns.
    """

    boundary_s: Floats  # float64[slots + 1]; the first is now
    names: tuple[str, ...]
    job: Ints  # int64[jobs], index into Snapshot.jobs
    work: Floats  # samples left
    total_work: Floats  # samples of the whole job
    deadline_s: Floats
    restart_s: Floats  # with the reserve
    reserve_s: Floats  # the part of restart_s that is kept for being moved
    weight: Floats
    promised: Bools
    steady: Bools
    held: Ints
    option_start: Ints  # int64[jobs + 1]
    cells: Cells
    cell: Ints  # int64[options], index into cells
    rate: Floats  # float64[options], samples/s
    stays: Bools
    now: Bools  # bool[options], False if a rule of this round excludes it from the first slot
    lag_s: Floats  # float64[options]
    floor: Ints  # int64[options], GPUs of its type that a steady job keeps
    use: Ints  # int64[options, resources]
    capacity: Ints  # int64[resources, slots], less promises to jobs without deadlines
    binding: bool = True  # schedules are promises, not only for this round
    check: Callable[[], None] = (
        do_not_check  # raises an error once nobody waits for the answer any more
    )

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return len(self.boundary_s) - 1

    @cached_property
    def owner(self) -> Ints:
        """Return the job of each option, int64[options]."""
        return np.repeat(np.arange(len(self.job), dtype=np.int64), np.diff(self.option_start))

    @cached_property
    def restarts_own(self) -> Bools:
        """Return whether each option starts again the Cell that its job runs on, bool[options].

        It may be on another shape. Legs name Cells and not shapes, so a leg that began with such an
        option would look like one that stays.
        """
        running = np.full(len(self.job), -1, dtype=np.int64)
        running[self.owner[self.stays]] = self.cell[self.stays]
        now = running[self.owner]
        again: Bools = (now >= 0) & ~self.stays
        again[again] = self.cells.have_same_cell(self.cell[again], now[again])
        return again

    def options_of(self, job: int) -> range:
        """Return the options of ``job``."""
        return range(int(self.option_start[job]), int(self.option_start[job + 1]))

    @cached_property
    def gain(self) -> Floats:
        """Return the samples that each option trains in each slot before the deadline (Eq. 25).

        The shape is float64[options, slots]. For options that stay, the rest of an earlier restart
        is subtracted from the first slot, which may make it negative.
        """
        start, end = self.boundary_s[:-1], self.boundary_s[1:]
        last = self.deadline_s[self.owner][:, None]
        seconds = np.maximum(np.minimum(end, last) - start, 0.0)
        seconds[:, 0] -= self.lag_s
        return self.rate[:, None] * seconds

    @cached_property
    def cost(self) -> Floats:
        """Return the samples that a start of each option costs, float64[options]; 0 if it stays."""
        return np.where(self.stays, 0.0, self.rate * self.restart_s[self.owner])

    def allowed(self) -> Bools:
        """Return whether each option may be used in each slot, bool[options, slots].

        It may not be used after the deadline, or where it does not fit alone. A Cell that a job
        already runs on is not started again in the first slot.
        """
        before = self.boundary_s[:-1] < self.deadline_s[self.owner][:, None] - SAME_S
        fits = np.all(self.use[:, :, None] <= self.capacity[None], axis=1)
        ok = before & fits
        ok[~self.now, 0] = False
        ok[self.restarts_own, 0] = False
        ok[self.stays] = np.logical_and.accumulate(ok[self.stays], axis=1)
        return np.asarray(ok, dtype=np.bool_)


Picks = Ints
"""int64[jobs, slots]: the option of each job in each slot. It is -1 if the job waits."""


def trained_samples(ahead: Lookahead, job: int, pick: Ints, first: int = 0) -> float:
    """Return the samples that ``job`` trains by its deadline with ``pick`` (int64[slots]).

    ``pick`` has an option for each slot. Slots before ``first`` are not counted, but a leg that
    began there continues.
    """
    gain, cost = ahead.gain, ahead.cost
    total = 0.0
    for slot in range(first, ahead.slots):
        option = int(pick[slot])
        if option >= 0:
            begins = slot == 0 or int(pick[slot - 1]) != option
            total += float(gain[option, slot]) - (float(cost[option]) if begins else 0.0)
    return total


def resource_usage(ahead: Lookahead, picks: Picks) -> Ints:
    """Return the resources used by the schedules, int64[resources, slots].

    This includes what steady jobs keep (Eq. 27).
    """
    used = np.zeros_like(ahead.capacity)
    for job in range(len(ahead.job)):
        used += resource_usage_of(ahead, job, picks[job])
    return used


def resource_usage_of(ahead: Lookahead, job: int, pick: Ints) -> Ints:
    """Return the use of resources by ``job`` with ``pick`` (int64[slots]).

    The shape is int64[resources, slots].
    """
    used = np.zeros_like(ahead.capacity)
    runs = np.flatnonzero(pick >= 0)
    used[:, runs] = ahead.use[pick[runs]].T
    if ahead.steady[job]:
        kept = {int(ahead.cells.gpu_type[ahead.cell[o]]): int(ahead.floor[o]) for o in pick[runs]}
        for option in ahead.options_of(job):
            kind = int(ahead.cells.gpu_type[ahead.cell[option]])
            if kind == ahead.held[job]:
                kept[kind] = int(ahead.floor[option])
        for kind, gpus in kept.items():
            used[kind] = np.maximum(used[kind], gpus)
    return used


def legs_of(ahead: Lookahead, picks: Picks) -> Legs:
    """Return the schedules as legs, one for each run of slots with the same option."""
    rows = []
    for job in range(len(ahead.job)):
        edges = np.flatnonzero(np.diff(picks[job], prepend=-2, append=-2))
        for first, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            option = int(picks[job, first])
            if option >= 0:
                cell = int(ahead.cell[option])
                rows.append(
                    {
                        "job": int(ahead.job[job]),
                        "start_s": float(ahead.boundary_s[first]),
                        "end_s": float(ahead.boundary_s[after]),
                        **ahead.cells.key_at(cell)._asdict(),
                    }
                )
    return Legs.from_rows(rows)


def picks_of(ahead: Lookahead, legs: Legs) -> Picks:
    """Return the legs as slots of this grid.

    Parts that are past are left out, and so are those that begin after the deadline (one slot of an
    earlier grid may be two now) and those without an option.
    """
    picks = np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64)
    index_of = {int(job): index for index, job in enumerate(ahead.job.tolist())}
    start, end = ahead.boundary_s[:-1], ahead.boundary_s[1:]
    for leg in range(len(legs)):
        job = index_of.get(int(legs.job[leg]))
        if job is None:
            continue
        inside = (start >= legs.start_s[leg] - SAME_S) | (start == ahead.boundary_s[0])
        inside &= start < ahead.deadline_s[job] - SAME_S
        covers = inside & (end > legs.start_s[leg]) & (end <= legs.end_s[leg] + SAME_S)
        wanted = legs.key_at(leg)
        for option in ahead.options_of(job):
            has = ahead.cells.key_at(int(ahead.cell[option]))
            if has == wanted and bool(ahead.stays[option]) <= bool(covers[0]):
                picks[job, covers] = option
                if ahead.stays[option]:
                    break
    return picks
