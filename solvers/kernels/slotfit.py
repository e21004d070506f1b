"""The compiled loops of first fits: one job's schedule at a time on the slots that others leave.

The rules are those of ``tessera.formulation.round.lookahead``: an option trains ``rate`` times the
seconds of a slot before the deadline, each start costs samples, and an option that stays goes on
from now without a break. Usage is counted for each resource and slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily


class SlotProblem(NamedTuple):
    """Jobs with deadlines, their options, and the slots.

    A job's options are ``option_start[j] : option_start[j + 1]``. The first ``types`` resources are
    GPU types, and an option uses only its own of them.
    """

    option_start: Ints  # int64[jobs + 1]
    kind: Ints  # int64[options], GPU type
    use: Ints  # int64[options, resources]
    rate: Floats  # float64[options], samples/s
    cost: Floats  # float64[options], samples that a start costs
    stays: Bools  # bool[options]
    barred: Bools  # bool[options], True if it may not be used in the first slot
    lag_s: Floats  # float64[options]
    floor: Ints  # int64[options], GPUs of its type that a steady job keeps
    target: Floats  # float64[jobs], samples that a schedule must train
    deadline_s: Floats  # float64[jobs]
    last: Ints  # int64[jobs], the number of slots that begin before the deadline
    steady: Bools  # bool[jobs]
    held: Ints  # int64[jobs], GPU type of which a steady job has some, or -1
    boundary_s: Floats  # float64[slots + 1]
    capacity: Ints  # int64[resources, slots]
    price: (
        Floats  # float64[resources, slots], of a unit for the slot; the cheapest schedule is taken
    )
    types: int
    binding: bool
    delays: bool  # whether a schedule on one Cell may begin after the first slot in which it fits


class SlotRoom(NamedTuple):
    """The free resources of each slot, and the schedules that have been given out so far."""

    free: Ints  # int64[resources, slots]
    picks: Ints  # int64[jobs, slots], the option or -1
    placed: Bools  # bool[jobs]


@compile_lazily
def samples_in(p: SlotProblem, job: int, option: int, slot: int) -> float:
    """Return the samples that ``option`` trains in ``slot`` before the deadline of ``job``."""
    end_s = min(p.boundary_s[slot + 1], p.deadline_s[job])
    seconds = max(end_s - p.boundary_s[slot], 0.0)
    if slot == 0:
        seconds -= p.lag_s[option]
    return float(p.rate[option] * seconds)


@compile_lazily
def fill_fits(p: SlotProblem, free: Ints, job: int, fits: Bools) -> bool:
    """Fill where each option of ``job`` fits next to all given schedules; return whether any does.

    ``fits`` is bool[options of job, slots]. It is filled up to the last slot before the deadline.
    """
    start, last, resources = p.option_start[job], p.last[job], free.shape[0]
    any_fits = False
    for i in range(p.option_start[job + 1] - start):
        o = start + i
        kind = p.kind[o]
        gpus = p.use[o, kind]
        beyond, lasting = gpus, True
        if p.steady[job]:
            # It keeps its floor of a type to the end, of which it may hold some already.
            if kind == p.held[job]:
                beyond = gpus - p.floor[o]
            else:
                for k in range(free.shape[1]):
                    lasting = lasting and p.floor[o] <= free[kind, k]
        fine = lasting
        for k in range(last):
            fit = gpus <= p.capacity[kind, k] and (beyond <= 0 or beyond <= free[kind, k])
            for r in range(p.types, resources):
                need = p.use[o, r]
                fit = fit and (need <= 0 or (need <= free[r, k] and need <= p.capacity[r, k]))
            if k == 0 and p.barred[o]:
                fit = False
            fit = fit and fine
            if p.stays[o]:
                fine = fit
            fits[i, k] = fit
            any_fits = any_fits or fit
    return any_fits


@compile_lazily
def price_in(p: SlotProblem, option: int, slot: int) -> float:
    """Return the price of ``option`` for ``slot``."""
    kind = p.kind[option]
    total = p.use[option, kind] * p.price[kind, slot]
    for r in range(p.types, p.price.shape[0]):
        total += p.use[option, r] * p.price[r, slot]
    return float(total)


@compile_lazily
def plan_on_one_cell(p: SlotProblem, job: int, fits: Bools, pick: Ints) -> bool:
    """Fill ``pick`` with the cheapest schedule of ``job`` on one option; return whether one exists.

    The option runs wherever it fits until the work is done. If schedules do not bind, the option
    that stays is preferred to all others. With ``delays``, each first slot is tried.
    """
    start, last, target = p.option_start[job], p.last[job], p.target[job]
    best, best_begin, least = -1, 0, np.inf
    tried = np.empty_like(pick)
    for i in range(p.option_start[job + 1] - start):
        o, begins = start + i, 1
        if p.delays and not p.stays[o]:
            begins = last
        for begin in range(begins):
            if begin > 0 and not fits[i, begin]:
                continue
            trained, paid = follow_option(p, job, fits, i, begin, least, tried)
            if p.stays[o] and not p.binding:
                paid = 0.0
            if trained >= target and paid < least:
                best, best_begin, least = i, begin, paid
    if best < 0:
        return False
    follow_option(p, job, fits, best, best_begin, np.inf, pick)
    return True


@compile_lazily
def follow_option(
    p: SlotProblem, job: int, fits: Bools, option: int, begin: int, most: float, pick: Ints
) -> tuple[float, float]:
    """Run ``job`` on one option from slot ``begin`` on, wherever it fits, until its work is done.

    ``option`` counts the job's options. Return the samples and the price; it ends early at the price
    ``most``. ``pick`` has the option in the slots in which it runs.
    """
    trained, paid, on, o = 0.0, 0.0, False, p.option_start[job] + option
    for k in range(begin, p.last[job]):
        if trained >= p.target[job] or paid >= most:
            break
        if not fits[option, k] or (k > 0 and p.stays[o] and not on):
            on = False
            continue
        more = samples_in(p, job, o, k)
        if not on:
            more -= p.cost[o]
        trained += more
        paid += price_in(p, o, k)
        pick[k], on = o, True
    return trained, paid


@compile_lazily
def plan_quickest(p: SlotProblem, job: int, fits: Bools, came: Ints, pick: Ints) -> bool:
    """Fill ``pick`` with the schedule that trains most by the first slot where the job can end.

    It is found by a dynamic program over slots and options. Return whether there is one. ``came``
    is room for int64[options + 1, slots].
    """
    start, last, target = p.option_start[job], p.last[job], p.target[job]
    count = p.option_start[job + 1] - start
    most = 0.0
    for k in range(last):
        best = 0.0
        for i in range(count):
            if fits[i, k]:
                best = max(best, samples_in(p, job, start + i, k))
        most += best
    if most < target:
        return False
    before, after = np.full(count + 1, -np.inf), np.empty(count + 1)
    before[count] = 0.0
    for k in range(last):
        source = 0
        for i in range(1, count + 1):
            if before[i] > before[source]:
                source = i
        top = 0
        for i in range(count):
            o, switch = start + i, -np.inf
            if k == 0 or not p.stays[o]:
                switch = before[source] - p.cost[o]
            came[i, k] = source
            if before[i] >= switch:
                came[i, k], switch = i, before[i]
            after[i] = -np.inf
            if fits[i, k]:
                after[i] = switch + samples_in(p, job, o, k)
            if after[i] > after[top]:
                top = i
        after[count], came[count, k] = before[source], source
        if after[count] > after[top]:
            top = count
        if after[top] >= target:
            for back in range(k, -1, -1):
                if top < count:
                    pick[back] = start + top
                top = came[top, back]
            return True
        before, after = after, before
    return False


@compile_lazily
def plan_schedule(
    p: SlotProblem, free: Ints, job: int, fits: Bools, came: Ints, pick: Ints
) -> bool:
    """Fill ``pick`` (int64[slots]) with a schedule of ``job`` on the free resources, if one exists.

    It is the cheapest schedule on one Cell, else the quickest of all.
    """
    pick[:] = -1
    if not fill_fits(p, free, job, fits):
        return False
    return plan_on_one_cell(p, job, fits, pick) or plan_quickest(p, job, fits, came, pick)


@compile_lazily
def add_usage(p: SlotProblem, free: Ints, job: int, pick: Ints, sign: int) -> None:
    """Subtract ``sign`` times what ``job`` uses with ``pick`` from ``free``.

    A steady job also uses what it keeps.
    """
    resources, slots = free.shape
    if not p.steady[job]:
        for k in range(slots):
            if pick[k] >= 0:
                free[p.kind[pick[k]], k] -= sign * p.use[pick[k], p.kind[pick[k]]]
                for r in range(p.types, resources):
                    free[r, k] -= sign * p.use[pick[k], r]
        return
    kept = np.full(p.types, -1)
    for k in range(slots):
        if pick[k] >= 0:
            kept[p.kind[pick[k]]] = p.floor[pick[k]]
    for o in range(p.option_start[job], p.option_start[job + 1]):
        if p.kind[o] == p.held[job]:
            kept[p.kind[o]] = p.floor[o]
    for k in range(slots):
        for r in range(resources):
            need = 0
            if pick[k] >= 0:
                need = p.use[pick[k], r]
            if r < p.types:
                need = max(need, kept[r])
            free[r, k] -= sign * max(need, 0)


@compile_lazily
def give_schedule(p: SlotProblem, room: SlotRoom, job: int, pick: Ints) -> bool:
    """Give ``job`` the schedule ``pick`` if it fits; return whether it did."""
    free = room.free
    before = free.copy()
    add_usage(p, free, job, room.picks[job], -1)
    add_usage(p, free, job, pick, 1)
    for r in range(free.shape[0]):
        for k in range(free.shape[1]):
            if free[r, k] < 0 and free[r, k] < before[r, k]:
                free[:] = before
                return False
    room.picks[job], room.placed[job] = pick, True
    return True


@compile_lazily
def take_schedule(p: SlotProblem, room: SlotRoom, job: int) -> None:
    """Take back the schedule that ``job`` was given."""
    add_usage(p, room.free, job, room.picks[job], -1)
    room.picks[job] = -1
    room.placed[job] = False
    add_usage(p, room.free, job, room.picks[job], 1)


@compile_lazily
def place_job(
    p: SlotProblem, room: SlotRoom, job: int, fits: Bools, came: Ints, pick: Ints
) -> bool:
    """Give ``job`` a schedule on the free resources, if there is one; return whether it did."""
    return plan_schedule(p, room.free, job, fits, came, pick) and give_schedule(p, room, job, pick)


@compile_lazily
def most_options(p: SlotProblem) -> int:
    """Return the largest number of options of a job."""
    most = 1
    for j in range(len(p.target)):
        most = max(most, p.option_start[j + 1] - p.option_start[j])
    return most


@compile_lazily
def place_jobs(p: SlotProblem, room: SlotRoom, order: Ints) -> None:
    """Give each job of ``order`` in turn a schedule on the free resources, if there is one."""
    most, slots = most_options(p), room.free.shape[1]
    fits, came = np.zeros((most, slots), np.bool_), np.zeros((most + 1, slots), np.int64)
    pick = np.full(slots, -1)
    for job in order:
        place_job(p, room, job, fits, came, pick)


@compile_lazily
def give_schedules(
    p: SlotProblem, room: SlotRoom, order: Ints, picks: Ints, refused: Bools
) -> None:
    """Give each job of ``order`` in turn its row of ``picks``, and mark those that do not fit."""
    for job in order:
        refused[job] = not give_schedule(p, room, job, picks[job])


@compile_lazily
def arrange_jobs(
    p: SlotProblem, room: SlotRoom, order: Ints, size: Floats, by_size: Ints, promised: Bools
) -> bool:
    """Schedule the jobs in ``order``. Where one finds no room, others before it give way.

    For a promise, new jobs give way, the largest ``size`` (float64[jobs]) first; ``by_size`` has
    the jobs in this order. For a new job, the largest new one does, if that makes room and it is
    larger. Return False if a promise still finds no room.
    """
    most, slots = most_options(p), room.free.shape[1]
    fits, came = np.zeros((most, slots), np.bool_), np.zeros((most + 1, slots), np.int64)
    pick, old = np.full(slots, -1), np.full(slots, -1)
    rank = np.empty(len(by_size), np.int64)
    for i in range(len(by_size)):
        rank[by_size[i]] = i
    top = len(by_size)  # no job before it in by_size is placed
    for job in order:
        if place_job(p, room, job, fits, came, pick):
            if not promised[job]:
                top = min(top, rank[job])
            continue
        made_room = False
        for i in range(top, len(by_size)):
            other = by_size[i]
            if not room.placed[other] or promised[other]:
                continue
            if not promised[job] and size[other] <= size[job]:
                break
            old[:] = room.picks[other]
            take_schedule(p, room, other)
            made_room = place_job(p, room, job, fits, came, pick)
            if made_room:
                if not promised[job]:
                    top = min(top, rank[job])
                break
            if not promised[job]:
                give_schedule(p, room, other, old)
                break
        if promised[job] and not made_room:
            return False
    return True
