"""Schedules for one job at a time on the resources that the others leave.

This always terminates, and gives the search its start. A job's own best schedule on given free GPUs
is found exactly, by a dynamic program over slots and options (``tessera.solvers.kernels.slotfit``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.lookahead import (
    WORK_TOLERANCE,
    Lookahead,
    Picks,
    all_trained_samples,
    are_allowed,
)
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.kernels.slotfit import (
    SlotProblem,
    SlotRoom,
    add_usage,
    fill_fits,
    give_schedules,
    place_jobs,
)
from tessera.solvers.kernels.slotfit import arrange_jobs as arrange_in_slots

_EXACT: Final = 1e-9
"""Share of a job's whole work by which sums of floating-point numbers may be off."""


def slot_problem(ahead: Lookahead) -> SlotProblem:
    """Return the arrays of the compiled loops.

    The price of a resource is that of GPU time: the seconds of the slot for each GPU.
    """
    price = np.zeros(ahead.capacity.shape)
    price[: ahead.types] = np.diff(ahead.boundary_s)
    last = np.searchsorted(ahead.boundary_s[:-1], ahead.deadline_s - SAME_S)
    return SlotProblem(
        option_start=as_fixed_array(ahead.option_start),
        kind=as_fixed_array(ahead.cells.gpu_type[ahead.cell]),
        use=as_fixed_array(ahead.use),
        rate=as_fixed_array(ahead.rate),
        cost=as_fixed_array(ahead.cost),
        stays=as_fixed_array(ahead.stays),
        barred=as_fixed_array(~ahead.now | ahead.restarts_own),
        lag_s=as_fixed_array(ahead.lag_s),
        floor=as_fixed_array(ahead.floor),
        target=as_fixed_array(ahead.work - _EXACT * ahead.total_work),
        deadline_s=as_fixed_array(ahead.deadline_s),
        last=as_fixed_array(last.astype(np.int64)),
        steady=as_fixed_array(ahead.steady),
        held=as_fixed_array(ahead.held),
        boundary_s=as_fixed_array(ahead.boundary_s),
        capacity=as_fixed_array(ahead.capacity),
        price=as_fixed_array(price),
        types=ahead.types,
        binding=ahead.binding,
        delays=False,
    )


class SlotSchedules:
    """The free resources of each slot, and the schedules that have been given out so far."""

    def __init__(self, ahead: Lookahead, problem: SlotProblem | None = None) -> None:
        self.ahead = ahead
        self.problem = slot_problem(ahead) if problem is None else problem
        self.room = SlotRoom(
            free=ahead.capacity.copy(),
            picks=np.full((len(ahead.job), ahead.slots), -1, dtype=np.int64),
            placed=np.zeros(len(ahead.job), dtype=np.bool_),
        )
        for job in np.flatnonzero(ahead.held >= 0).tolist():
            add_usage(self.problem, self.room.free, job, self.room.picks[job], 1)

    @property
    def picks(self) -> Picks:
        """Return the option of each job in each slot."""
        return self.room.picks

    @property
    def placed(self) -> Bools:
        """Return the jobs that have a schedule, bool[jobs]."""
        return self.room.placed

    @property
    def free(self) -> Ints:
        """Return what is free of each resource in each slot, int64[resources, slots]."""
        return self.room.free

    def copy(self) -> SlotSchedules:
        """Return an equal room that can be changed on its own."""
        other = SlotSchedules(self.ahead, self.problem)
        for mine, its in zip(self.room, other.room, strict=True):
            its[:] = mine
        return other

    def weight(self) -> float:
        """Return the weight of the jobs that have a schedule."""
        return float(self.ahead.weight[self.placed].sum())

    def give(self, jobs: Ints, picks: Picks) -> Bools:
        """Give each of ``jobs`` in turn its row of ``picks`` if it fits; return those refused.

        The result is bool[all jobs].
        """
        refused = np.zeros(len(self.ahead.job), dtype=np.bool_)
        give_schedules(
            self.problem, self.room, as_fixed_array(jobs), as_fixed_array(picks), refused
        )
        return refused

    def earliest_s(self, job: int) -> float:
        """Return the earliest deadline of ``job`` that could be promised now, seconds since 1970.

        With that deadline, the job could use all slots up to it entirely; after the last slot,
        everything continues as in it. It is inf if the job fits nowhere.
        """
        self.ahead.check()
        ahead, options = self.ahead, self.ahead.options_of(job)
        span = slice(options.start, options.stop)
        length = np.diff(ahead.boundary_s)
        rate, cost = ahead.rate[span], ahead.cost[span]
        seconds = np.tile(length, (len(rate), 1))
        seconds[:, 0] -= ahead.lag_s[span]
        fits = self._fits_whenever(job)
        gain = np.where(fits, rate[:, None] * seconds, -np.inf)
        table = forward_table(gain, cost, ahead.stays[span])
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

    def _fits_whenever(self, job: int) -> Bools:
        """Return where each option of ``job`` fits, deadline or not, bool[options of job, slots]."""
        ahead, jobs = self.ahead, len(self.ahead.job)
        fits = np.zeros((len(ahead.options_of(job)), ahead.slots), dtype=np.bool_)
        endless = self.problem._replace(
            last=as_fixed_array(np.full(jobs, ahead.slots)),
            barred=as_fixed_array(ahead.restarts_own),
        )
        fill_fits(endless, self.room.free, job, fits)
        return fits


def forward_table(gain: Floats, cost: Floats, stays: Bools) -> Floats:
    """Return the most samples that can be trained by the end of each slot, by the option in it.

    The array is [options + 1, slots]; the last row is waiting. ``gain`` is -inf if an option does
    not fit. An option that stays can be entered in the first slot only.
    """
    options, slots = gain.shape
    table = np.full((options + 1, slots), -np.inf)
    last = np.append(np.full(options, -np.inf), 0.0)
    for slot in range(slots):
        top = last.max()
        switch = top - cost
        if slot:
            switch = np.where(stays, -np.inf, switch)
        table[:options, slot] = np.maximum(last[:options], switch) + gain[:, slot]
        table[options, slot] = top
        last = table[:, slot]
    return table


def keep_promised_schedules(
    ahead: Lookahead, inherited: Picks, problem: SlotProblem | None = None
) -> SlotSchedules:
    """Return the room after the promises.

    Each promise keeps its schedule if that still holds; otherwise it is scheduled again.
    """
    room = SlotSchedules(ahead, problem)
    if not ahead.promised.any():
        return room
    short = ahead.work - all_trained_samples(ahead, inherited)
    holds = (short <= WORK_TOLERANCE * ahead.total_work) & are_allowed(ahead, inherited)
    room.give(np.flatnonzero(ahead.promised & holds), inherited)
    late = np.flatnonzero(ahead.promised & ~room.placed)
    fit_in(room, late[np.lexsort((late, ahead.deadline_s[late], -ahead.weight[late]))])
    return room


def arrange_jobs(
    ahead: Lookahead, size: Floats, problem: SlotProblem | None = None
) -> SlotSchedules | None:
    """Return the room in which all jobs, including promised ones, are scheduled again by deadline.

    If a promise finds no room, new jobs placed before it give way, the largest ``size``
    (float64[jobs]) first. If a new job finds none, the largest new one before it gives way, if that
    makes room and it is larger. (This is Moore and Hodgson's rule, which is optimal for one machine
    and equal weights.) Return None if the promises do not all fit in this order.
    """
    ahead.check()
    room = SlotSchedules(ahead, problem)
    order = np.lexsort((size, ahead.deadline_s))
    kept = arrange_in_slots(
        room.problem,
        room.room,
        as_fixed_array(order),
        as_fixed_array(size),
        as_fixed_array(np.argsort(-size, kind="stable")),
        as_fixed_array(ahead.promised),
    )
    return room if kept else None


def fit_in(room: SlotSchedules, jobs: Sequence[int] | Ints) -> None:
    """Give each of ``jobs`` in turn a schedule on the free resources, if there is one."""
    room.ahead.check()
    place_jobs(room.problem, room.room, as_fixed_array(np.asarray(jobs, dtype=np.int64)))
