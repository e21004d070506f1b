"""The loops that follow a list of jobs with deadlines to its end, and try other lists."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

ROUNDING = 1e-12
"""An upper bound on the rounding of a time, as a share of it."""
OPEN, MET, LOST = 0, 1, 2
"""The fates of a job."""
DRAWS_PER_CHANGE = 6
"""The number of random numbers that one change of a list uses."""


class RolloutProblem(NamedTuple):
    """Jobs with deadlines, their options, and the free resources.

    All times are seconds from now.
    """

    option_start: Ints  # int64[jobs + 1]
    kind: Ints  # int64[options], GPU type; of the types, an option uses only this one
    types: int  # number of GPU types, which are the first resources
    quickest: Floats  # float64[jobs], the rate of the fastest option that can be started
    smallest: Ints  # int64[jobs], the GPUs of the smallest option that can be started
    lists: Ints  # int64[tastes, options], each job's options in the order of each taste
    use: Ints  # int64[options, resources]
    rate: Floats  # float64[options], samples/s, above 0
    stays: Bools  # bool[options], whether its job runs on it now
    now: Bools  # bool[options]; False if the option is not possible at the first moment
    lag_s: Floats  # float64[options], the rest of the last restart if the job stays
    work: Floats  # float64[jobs], remaining samples
    deadline_s: Floats
    restart_s: Floats
    weight: Floats
    step_s: Floats  # float64[steps], the times at which the free resources change; the first is 0
    free: Ints  # int64[steps, resources]
    round_s: float  # the least time between two moments
    most: int  # number of moments after which no job is moved any more
    visits: int  # number of visits of an open job at a moment after which none is moved


class LegLog(NamedTuple):
    """A log of the options that jobs ran on, as far as it has room."""

    job: Ints
    option: Ints
    span_s: Floats  # float64[segments, 2]


@compile_lazily
def follow_jobs(
    world: RolloutProblem, order: Ints, tastes: Ints, fate: Ints, log: LegLog
) -> tuple[int, int]:
    """Follow the jobs from moment to moment; return the number of segments and of visits.

    At each moment the jobs are served in ``order``. A job continues as it is if it then ends in
    time and has room. Otherwise it takes the first of its options in ``lists[tastes[job]]`` that
    does, restart included. Otherwise it waits; it has lost once no option would do even alone.

    The next moment is when the first job ends, or when the free resources change. ``fate``
    (int64[jobs]) and ``log`` are filled. A visit is that of a job whose fate is open at a moment.
    """
    option_start, lists, use, rate = world.option_start, world.lists, world.use, world.rate
    stays, now, lag_s, kind, types = world.stays, world.now, world.lag_s, world.kind, world.types
    deadline_s, restart_s, step_s, free = (
        world.deadline_s,
        world.restart_s,
        world.step_s,
        world.free,
    )
    quickest, smallest = world.quickest, world.smallest
    jobs, resources = len(order), free.shape[1]
    left, ready_s, began_s = world.work.copy(), np.zeros(jobs), np.zeros(jobs)
    on, room = np.full(jobs, -1), np.zeros(resources, np.int64)
    fate[:] = OPEN
    for j in range(jobs):
        for o in range(option_start[j], option_start[j + 1]):
            if stays[o]:
                on[j], ready_s[j] = o, lag_s[o]
    at_s, segments, step, visits = 0.0, 0, 0, 0
    open_jobs, count = order.copy(), jobs
    for moment in range(world.most):
        # Find what is free at this moment.
        while step + 1 < len(step_s) and step_s[step + 1] <= at_s * (1 + ROUNDING):
            step += 1
        room[:] = free[step]
        widest = 0
        for r in range(types):
            widest = max(widest, room[r])
        first_s, visits = np.inf, visits + count
        for i in range(count):
            j = open_jobs[i]
            # This is not a separate function. It would take the world at each visit, which made
            # this loop 2.5 times slower.
            pick, end_s, could = -1, 0.0, False
            starts_s, latest_s = at_s + restart_s[j], deadline_s[j] * (1 + ROUNDING)
            o = on[j]
            if o >= 0 and (moment > 0 or now[o]):
                end_s = max(at_s, ready_s[j]) + left[j] / rate[o]
                if end_s <= latest_s:
                    could, fits = True, use[o, kind[o]] <= room[kind[o]]
                    for r in range(types, resources):
                        fits = fits and use[o, r] <= room[r]
                    if fits:
                        pick = o
            if pick < 0 and starts_s + left[j] / quickest[j] <= latest_s:
                could = could or moment > 0
                if smallest[j] <= widest or moment == 0:
                    for q in range(option_start[j], option_start[j + 1]):
                        o = lists[tastes[j], q]
                        if stays[o] or (moment == 0 and not now[o]):
                            continue
                        fits = use[o, kind[o]] <= room[kind[o]]
                        if not fits and could:
                            continue
                        end_s = starts_s + left[j] / rate[o]
                        if end_s > latest_s:
                            continue
                        could = True
                        for r in range(types, resources):
                            fits = fits and use[o, r] <= room[r]
                        if fits:
                            pick = o
                            break
            # Switch the job, and log the segment that ends here.
            if pick != on[j]:
                if on[j] >= 0 and at_s > began_s[j]:
                    segments = log_segment(log, segments, j, on[j], began_s[j], at_s)
                on[j], began_s[j], ready_s[j] = pick, at_s, starts_s
            if pick >= 0:
                room[kind[pick]] -= use[pick, kind[pick]]
                for r in range(types, resources):
                    room[r] -= use[pick, r]
                widest = 0
                for r in range(types):
                    widest = max(widest, room[r])
                first_s = min(first_s, end_s)
            elif not could:
                fate[j] = LOST
        # Find the next moment.
        next_s = max(first_s, at_s + world.round_s)
        if step + 1 < len(step_s):
            next_s = min(next_s, step_s[step + 1])
        if next_s == np.inf:
            break
        # Let the running jobs train until then, and finish those that end.
        last = moment == world.most - 1 or visits + count > world.visits
        still = 0
        for i in range(count):
            j = open_jobs[i]
            if fate[j] != OPEN:
                continue
            if on[j] >= 0:
                end_s = max(at_s, ready_s[j]) + left[j] / rate[on[j]]
                if last or end_s <= next_s * (1 + ROUNDING):
                    fate[j] = MET
                    segments = log_segment(log, segments, j, on[j], began_s[j], end_s)
                    on[j] = -1
                    continue
                left[j] -= rate[on[j]] * max(0.0, next_s - max(at_s, ready_s[j]))
            open_jobs[still] = j
            still += 1
        if last:
            break
        at_s, count = next_s, still
    return segments, visits


@compile_lazily
def log_segment(
    log: LegLog, segments: int, job: int, option: int, began_s: float, end_s: float
) -> int:
    """Record a segment, if there is room for it, and return the number of segments."""
    if segments == len(log.job):
        return segments
    log.job[segments], log.option[segments] = job, option
    log.span_s[segments, 0], log.span_s[segments, 1] = began_s, end_s
    return segments + 1


@compile_lazily
def change_list(order: Ints, tastes: Ints, fate: Ints, draws: Floats, kinds: int) -> None:
    """Change a list in place, as determined by ``draws`` (float64[DRAWS], from 0 to 1).

    A lost job moves forward, any job moves back, or a job gets another of ``kinds`` tastes.
    """
    jobs = len(order)
    if draws[0] < 0.4:
        lost = np.flatnonzero(fate[order] == LOST)
        if len(lost) == 0:
            return
        i = lost[int(draws[1] * len(lost))]
        to = int(draws[2] * i)
        job = order[i]
        for x in range(i, to, -1):
            order[x] = order[x - 1]
        order[to] = job
    elif draws[0] < 0.7:
        i = int(draws[1] * jobs)
        to = jobs - 1 if draws[2] < 0.5 else i + int(draws[3] * (jobs - i))
        job = order[i]
        for x in range(i, to):
            order[x] = order[x + 1]
        order[to] = job
    else:
        tastes[int(draws[4] * jobs)] = int(draws[5] * kinds)


@compile_lazily
def improve_list(
    world: RolloutProblem, order: Ints, tastes: Ints, draws: Floats, none: LegLog
) -> tuple[float, Ints, Ints]:
    """Return the greatest weight of met jobs that was found, and its list.

    The search starts at ``order``. Each row of ``draws`` (float64[tries, 1 + 2 * DRAWS]) is a try.
    It makes one or two changes to the last list that was no worse than its predecessor. ``none`` is
    a log without room.
    """
    jobs, kinds = len(order), len(world.lists)
    fate, tried = np.zeros(jobs, np.int64), np.zeros(jobs, np.int64)
    follow_jobs(world, order, tastes, fate, none)
    value = best = world.weight[fate == MET].sum()
    most, least = world.weight.sum() * (1 - ROUNDING), world.weight.sum() * ROUNDING
    best_order, best_tastes = order.copy(), tastes.copy()
    last_order, last_tastes = order.copy(), tastes.copy()
    for k in range(len(draws)):
        if best >= most:
            break
        new_order, new_tastes = last_order.copy(), last_tastes.copy()
        for c in range(1 if draws[k, 0] < 0.5 else 2):
            change_list(new_order, new_tastes, fate, draws[k, 1 + c * DRAWS_PER_CHANGE :], kinds)
        follow_jobs(world, new_order, new_tastes, tried, none)
        new_value = world.weight[tried == MET].sum()
        if new_value < value - least:
            continue
        value, last_order, last_tastes = new_value, new_order, new_tastes
        fate[:] = tried
        if value > best + least:
            best, best_order, best_tastes = value, new_order.copy(), new_tastes.copy()
    return best, best_order, best_tastes
