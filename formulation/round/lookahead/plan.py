"""Jobs with deadlines in slots: their options, and their schedules as slots or as segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges
from tessera.formulation.round.draft import do_not_check
from tessera.formulation.state.cells import Cells
from tessera.formulation.state.last_round import ScheduleSegments

WORK_UNITS: Final = 10**8
"""A job's remaining work in integers. Rounding loses less than a millionth of it."""
WORK_TOLERANCE: Final = 1e-6
"""Share of a job's whole work by which a schedule may fall short, to allow for rounding."""


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
    types: int  # number of GPU types, which are the first resources
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

        It may be on another shape. Segments name Cells and not shapes, so a segment that began with
        such an option would look like one that stays.
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

    def seconds_in(self, slot: int, job: Ints) -> Floats:
        """Return the seconds of ``slot`` before the deadline of each of ``job`` (int64[any])."""
        start_s, end_s = self.boundary_s[slot], self.boundary_s[slot + 1]
        seconds: Floats = np.maximum(np.minimum(end_s, self.deadline_s[job]) - start_s, 0.0)
        return seconds

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


def resource_usage(ahead: Lookahead, picks: Picks) -> Ints:
    """Return the resources used by the schedules, int64[resources, slots].

    This includes what steady jobs keep (Eq. 27).
    """
    used, kind = np.zeros_like(ahead.capacity), ahead.cells.gpu_type[ahead.cell]
    kept = _kept_gpus(ahead, picks)
    used[: ahead.types] += kept.sum(axis=0)[:, None]
    for slot in range(ahead.slots):
        job = np.flatnonzero(picks[:, slot] >= 0)
        option = picks[job, slot]
        more = ahead.use[option]
        more[np.arange(len(job)), kind[option]] -= np.minimum(
            kept[job, kind[option]], ahead.use[option, kind[option]]
        )
        used[:, slot] += more.sum(axis=0)
    return used


def _kept_gpus(ahead: Lookahead, picks: Picks) -> Ints:
    """Return the GPUs of each type that each steady job keeps in all slots, int64[jobs, types]."""
    kept = np.zeros((len(ahead.job), ahead.types), dtype=np.int64)
    if ahead.steady.any():
        kind = ahead.cells.gpu_type[ahead.cell]
        option = np.unique(picks[ahead.steady])
        option = option[option >= 0]
        held = np.flatnonzero(kind == ahead.held[ahead.owner])
        for own in (option, held):
            kept[ahead.owner[own], kind[own]] = ahead.floor[own]
    return kept


def all_trained_samples(ahead: Lookahead, picks: Picks, first: int = 0) -> Floats:
    """Return the samples that each job trains by its deadline with its picks, float64[jobs].

    Slots before ``first`` are not counted, but a segment that began there continues.
    """
    total = np.zeros(len(ahead.job))
    for slot in range(first, ahead.slots):
        job = np.flatnonzero(picks[:, slot] >= 0)
        option = picks[job, slot]
        begins = (picks[job, slot - 1] != option) if slot else np.ones(len(job), np.bool_)
        seconds = ahead.seconds_in(slot, job)
        if slot == 0:
            seconds -= ahead.lag_s[option]
        total[job] += ahead.rate[option] * seconds - np.where(begins, ahead.cost[option], 0.0)
    return total


def are_allowed(ahead: Lookahead, picks: Picks) -> Bools:
    """Return whether each job has only allowed options in its slots, bool[jobs] (``allowed``)."""
    fine = np.ones(len(ahead.job), dtype=np.bool_)
    broken = np.zeros(len(ahead.cell), dtype=np.bool_)  # options that stay, after a break
    staying = np.flatnonzero(ahead.stays)
    broken[staying] = ~ahead.now[staying]
    for slot in range(ahead.slots):
        full = (ahead.use[staying] > ahead.capacity[:, slot]).any(axis=1)
        broken[staying[full]] = True
        job = np.flatnonzero(picks[:, slot] >= 0)
        option = picks[job, slot]
        good = ahead.boundary_s[slot] < ahead.deadline_s[job] - SAME_S
        good &= (ahead.use[option] <= ahead.capacity[:, slot]).all(axis=1) & ~broken[option]
        good &= ahead.owner[option] == job
        if slot == 0:
            good &= ahead.now[option] & ~ahead.restarts_own[option]
        else:
            good &= ~ahead.stays[option] | (picks[job, slot - 1] == option)
        fine[job[~good]] = False
    return fine


def segments_of(ahead: Lookahead, picks: Picks) -> ScheduleSegments:
    """Return the schedules as segments, one for each run of slots with the same option."""
    same = picks[:, 1:] == picks[:, :-1]
    edge = np.ones((len(ahead.job), 1), dtype=np.bool_)
    runs = picks >= 0
    job, first = np.nonzero(runs & np.hstack([edge, ~same]))
    _, last = np.nonzero(runs & np.hstack([~same, edge]))
    cell = ahead.cell[picks[job, first]]
    return ScheduleSegments(
        job=ahead.job[job],
        start_s=ahead.boundary_s[first],
        end_s=ahead.boundary_s[last + 1],
        **{name: getattr(ahead.cells, name)[cell] for name in ScheduleSegments.CELL},
    )


def picks_of(ahead: Lookahead, segments: ScheduleSegments) -> Picks:
    """Return the segments as slots of this grid.

    Parts that are past are left out, and so are those that begin after the deadline (one slot of an
    earlier grid may be two now) and those without an option.
    """
    picks = np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64)
    index_of = np.full(
        max(int(ahead.job.max(initial=-1)), int(segments.job.max(initial=-1))) + 1, -1
    )
    index_of[ahead.job] = np.arange(len(ahead.job))
    which = np.flatnonzero(index_of[segments.job] >= 0)
    if not len(which):
        return picks
    job = index_of[segments.job[which]]
    start, end = ahead.boundary_s[:-1], ahead.boundary_s[1:]
    begin_s, end_s = segments.start_s[which][:, None], segments.end_s[which][:, None]
    covers = (start >= begin_s - SAME_S) | (start == ahead.boundary_s[0])
    covers &= start < ahead.deadline_s[job][:, None] - SAME_S
    covers &= (end > begin_s) & (end <= end_s + SAME_S)
    option = _options_of_segments(ahead, segments, which, job, covers[:, 0])
    segment, slot = np.nonzero(covers & (option >= 0)[:, None])
    picks[job[segment], slot] = option[segment]
    return picks


def _options_of_segments(
    ahead: Lookahead, segments: ScheduleSegments, which: Ints, job: Ints, from_now: Bools
) -> Ints:
    """Return the option of its ``job`` that each of the segments ``which`` is of, or -1.

    All are arrays over the chosen segments. It is the option that stays if the segment is ``from_now`` on
    the Cell of that option.
    """
    first = ahead.option_start[job]
    count = ahead.option_start[job + 1] - first
    option, segment = concatenate_ranges(first, count), np.repeat(np.arange(len(which)), count)
    same = np.ones(len(option), dtype=np.bool_)
    for name in ScheduleSegments.CELL:
        same &= (
            getattr(ahead.cells, name)[ahead.cell[option]]
            == getattr(segments, name)[which[segment]]
        )
    result = np.full(len(which), -1, dtype=np.int64)
    for chosen in (same & ~ahead.stays[option], same & ahead.stays[option] & from_now[segment]):
        result[segment[chosen]] = option[chosen]
    return result
