"""Schedules for one job at a time on the resources that the others leave.

This always terminates, and gives the exact search its start. A job's own best schedule on given
free GPUs is found exactly, by a dynamic program over slots and options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tessera.formulation.lookahead import (
    WORK_TOLERANCE,
    Lookahead,
    Picks,
    resource_usage_of,
    trained_samples,
)
from tessera.formulation.tables import Bools, Floats, Ints

_EXACT = 1e-9
"""Share of a job's whole work by which sums of floating-point numbers may be off."""


class SlotSchedules:
    """The free resources of each slot, and the schedules that have been given out so far."""

    def __init__(self, ahead: Lookahead) -> None:
        self.ahead = ahead
        self.gain, self.cost, self.ok = ahead.gain, ahead.cost, ahead.allowed()
        self.gpus: Ints = ahead.cells.gpus[ahead.cell]
        self.kind: Ints = ahead.cells.gpu_type[ahead.cell]
        self.picks: Picks = np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64)
        self.placed: Bools = np.zeros(len(ahead.job), dtype=np.bool_)
        self.free: Ints = ahead.capacity.copy()
        for job in np.flatnonzero(ahead.held >= 0).tolist():
            self.free -= resource_usage_of(ahead, job, self.picks[job])

    def give(self, job: int, pick: Ints) -> bool:
        """Give ``job`` the schedule ``pick`` (int64[slots]) if it fits; return whether it did."""
        idle = resource_usage_of(self.ahead, job, self.picks[job])
        extra = resource_usage_of(self.ahead, job, pick) - idle
        if np.any((extra > 0) & (extra > self.free)):
            return False
        self.free -= extra
        self.picks[job], self.placed[job] = pick, True
        return True

    def take(self, job: int) -> None:
        """Take back the schedule that ``job`` was given."""
        none = np.full(self.ahead.slots, -1, dtype=np.int64)
        self.free += resource_usage_of(self.ahead, job, self.picks[job]) - resource_usage_of(
            self.ahead, job, none
        )
        self.picks[job], self.placed[job] = none, False

    def fits(self, job: int) -> Bools:
        """Return the slots in which each option of ``job`` fits next to all given schedules.

        The shape is bool[options of job, slots].
        """
        span = self._span(job)
        use = self.ahead.use[span]
        if not self.ahead.steady[job]:
            free = np.all(use[:, :, None] <= self.free[None], axis=1)
            return np.asarray(self.ok[span] & free, dtype=np.bool_)
        beyond, own = use.copy(), np.arange(span.stop - span.start)
        held = self.kind[span] == self.ahead.held[job]
        beyond[own, self.kind[span]] -= np.where(held, self.ahead.floor[span], 0)
        free = np.all(beyond[:, :, None] <= self.free[None], axis=1)
        lasting = self.free[self.kind[span]].min(axis=1, initial=2**62) >= self.ahead.floor[span]
        return np.asarray(self.ok[span] & free & (held | lasting)[:, None], dtype=np.bool_)

    def plan(self, job: int) -> Ints | None:
        """Return a schedule for ``job`` on the free resources, or None if these slots have none.

        It is the leanest schedule on one Cell, else the quickest of all. If schedules are not
        binding, the Cell that the job has is preferred to all others.
        """
        self.ahead.check()
        target = self.ahead.work[job] - _EXACT * self.ahead.total_work[job]
        fits = self.fits(job)
        return self._on_one_cell(job, fits, target) if fits.any() else None

    def _span(self, job: int) -> slice:
        options = self.ahead.options_of(job)
        return slice(options.start, options.stop)

    def _on_one_cell(self, job: int, fits: Bools, target: float) -> Ints | None:
        span, length = self._span(job), np.diff(self.ahead.boundary_s)
        count, slots = fits.shape
        trained, on, used = np.zeros(count), np.zeros(count, np.bool_), np.zeros(count)
        stays = self.ahead.stays[span]
        runs = np.zeros((count, slots), dtype=np.bool_)
        for slot in range(slots):
            now = fits[:, slot] & (trained < target)
            if slot:
                now &= on | ~stays
            trained += now * (self.gain[span, slot] - np.where(on, 0.0, self.cost[span]))
            used += now * self.gpus[span] * length[slot]
            runs[:, slot] = on = now
        enough = trained >= target
        if not enough.any():
            return self._quickest(job, fits, target)
        # Schedules that do not bind are made again each round. Otherwise jobs would move each round.
        if not self.ahead.binding:
            used[stays] = 0.0
        best = int(np.argmin(np.where(enough, used, np.inf)))
        return np.where(runs[best], span.start + best, -1)

    def _quickest(self, job: int, fits: Bools, target: float) -> Ints | None:
        """Return the schedule that trains most by the first slot where the job can end, or None."""
        span = self._span(job)
        table, came = forward_table(
            np.where(fits, self.gain[span], -np.inf), self.cost[span], self.ahead.stays[span]
        )
        done = np.flatnonzero(table.max(axis=0) >= target)
        if not len(done):
            return None
        pick = np.full(self.ahead.slots, -1, dtype=np.int64)
        state = int(np.argmax(table[:, done[0]]))
        for slot in range(int(done[0]), -1, -1):
            pick[slot] = span.start + state if state < len(fits) else -1
            state = int(came[state, slot])
        return pick

    def earliest_s(self, job: int) -> float:
        """Return the earliest deadline of ``job`` that could be promised now, seconds since 1970.

        With that deadline, the job could use all slots up to it entirely; after the last slot,
        everything continues as in it. It is inf if the job fits nowhere.
        """
        self.ahead.check()
        ahead, span = self.ahead, self._span(job)
        length = np.diff(ahead.boundary_s)
        rate, cost = ahead.rate[span], self.cost[span]
        seconds = np.tile(length, (len(rate), 1))
        seconds[:, 0] -= ahead.lag_s[span]
        fits = self._whenever(job)
        gain = np.where(fits, rate[:, None] * seconds, -np.inf)
        table, _ = forward_table(gain, cost, ahead.stays[span])
        after = fits[:, -1] & ~ahead.stays[span]
        fits = np.append(fits, after[:, None], axis=1)
        best = math.inf
        for slot in range(ahead.slots + 1):
            before = table[:, slot - 1] if slot else np.append(np.full(len(rate), -np.inf), 0.0)
            switched = np.where(ahead.stays[span] & (slot > 0), -np.inf, before.max() - cost)
            have = np.maximum(before[:-1], switched)
            lag_s = ahead.lag_s[span] if slot == 0 else np.zeros(len(rate))
            with np.errstate(invalid="ignore", divide="ignore"):
                ends_s = ahead.boundary_s[slot] + lag_s + (ahead.work[job] - have) / rate
            within = fits[:, slot] & np.isfinite(have)
            if slot < ahead.slots:
                within &= ends_s <= ahead.boundary_s[slot + 1] + 1e-6
            if within.any():
                best = float(ends_s[within].min())
                break
        return best + 1.0 + WORK_TOLERANCE * 100 * (best - float(ahead.boundary_s[0]))

    def _whenever(self, job: int) -> Bools:
        """Return ``fits`` without the job's own deadline, bool[options of job, slots]."""
        kept = self.ok
        span = self._span(job)
        ahead = self.ahead
        self.ok = kept.copy()
        self.ok[span] = True
        self.ok[span][ahead.restarts_own[span], 0] = False
        fits = self.fits(job)
        self.ok = kept
        fits[ahead.stays[span]] = np.logical_and.accumulate(fits[ahead.stays[span]], axis=1)
        return fits


def forward_table(gain: Floats, cost: Floats, stays: Bools) -> tuple[Floats, Ints]:
    """Return the most samples that can be trained by the end of each slot, by the option in it.

    Also return, for the same entries, the row of the slot before. Both arrays are [options + 1,
    slots]; the last row is waiting. ``gain`` is -inf if an option does not fit. An option that
    stays can be entered in the first slot only.
    """
    options, slots = gain.shape
    table = np.full((options + 1, slots), -np.inf)
    came = np.full((options + 1, slots), options, dtype=np.int64)
    last = np.append(np.full(options, -np.inf), 0.0)
    for slot in range(slots):
        source = int(np.argmax(last))
        switch = last[source] - cost
        if slot:
            switch = np.where(stays, -np.inf, switch)
        goes_on = last[:options] >= switch
        table[:options, slot] = np.where(goes_on, last[:options], switch) + gain[:, slot]
        came[:options, slot] = np.where(goes_on, np.arange(options), source)
        table[options, slot], came[options, slot] = last[source], source
        last = table[:, slot]
    return table, came


def keep_promised_schedules(ahead: Lookahead, inherited: Picks) -> SlotSchedules:
    """Return the room after the promises.

    Each promise keeps its schedule if that still holds; otherwise it is scheduled again.
    """
    room = SlotSchedules(ahead)
    late = []
    for job in np.flatnonzero(ahead.promised).tolist():
        short = ahead.work[job] - trained_samples(ahead, job, inherited[job])
        holds = short <= WORK_TOLERANCE * ahead.total_work[job] and _in_place(room, inherited[job])
        if not (holds and room.give(job, inherited[job])):
            late.append(job)
    fit_in(room, sorted(late, key=lambda j: (-ahead.weight[j], ahead.deadline_s[j], j)))
    return room


def _in_place(room: SlotSchedules, pick: Ints) -> bool:
    slots = np.flatnonzero(pick >= 0)
    return bool(room.ok[pick[slots], slots].all())


def arrange_jobs(ahead: Lookahead, size: Floats) -> SlotSchedules | None:
    """Return the room in which all jobs, including promised ones, are scheduled again by deadline.

    If a promise finds no room, new jobs placed before it give way, the largest ``size``
    (float64[jobs]) first. If a new job finds none, the largest new one before it gives way, if that
    makes room and it is larger. (This is Moore and Hodgson's rule, which is optimal for one machine
    and equal weights.) Return None if the promises do not all fit in this order.
    """
    room = SlotSchedules(ahead)
    for job in np.lexsort((size, ahead.deadline_s)).tolist():
        if _placed(room, job):
            continue
        others = np.flatnonzero(room.placed & ~ahead.promised)
        others = others[np.argsort(-size[others], kind="stable")]
        if not ahead.promised[job]:
            others = others[:1][size[others[:1]] > size[job]]
        before = [(other, room.picks[other].copy()) for other in others.tolist()]
        if any(_placed_without(room, job, other) for other, _ in before):
            continue
        if ahead.promised[job]:
            return None
        for other, pick in before:
            room.give(other, pick)
    return room


def _placed(room: SlotSchedules, job: int) -> bool:
    pick = room.plan(job)
    return pick is not None and room.give(job, pick)


def _placed_without(room: SlotSchedules, job: int, other: int) -> bool:
    room.take(other)
    return _placed(room, job)


def fit_in(room: SlotSchedules, jobs: Sequence[int]) -> None:
    """Give each of ``jobs`` in turn a schedule on the free resources, if there is one."""
    for job in jobs:
        pick = room.plan(job)
        if pick is not None:
            room.give(job, pick)
