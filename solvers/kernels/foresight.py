"""The loops that follow an answer of a round to the end of its jobs, under a greedy policy."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from tessera.formulation.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

ROUNDING = 1e-12
"""An upper bound on the rounding of a time, as a share of it."""
LEAST_SIZE = 1e-9
"""A step that takes less than this share of the cluster counts as taking this."""


class ForesightProblem(NamedTuple):
    """Jobs with their columns, and the rows that hold at all times to come.

    All times are seconds from now. Columns are grouped by job, as in a round's problem.
    """

    job_start: Ints  # int64[jobs + 1]
    rate: Floats  # float64[columns], samples/s
    usage_start: Ints  # int64[columns + 1]
    row: Ints  # int64[nonzeros]
    amount: Ints  # int64[nonzeros]
    size: Floats  # float64[columns], the sum over rows of the share of the capacity
    capacity: Ints  # int64[rows]
    current: Ints  # int64[jobs], the column that runs now, or -1
    lag_s: Floats  # float64[jobs], the rest of the last restart if the job stays
    work: Floats  # float64[jobs], remaining samples
    unit_rate: Floats  # float64[jobs], samples/s of one effective GPU
    expected_rate: Floats  # float64[jobs], samples/s of an equal share
    restart_s: Floats  # float64[jobs]
    weight: Floats  # float64[jobs]
    stays: Bools  # bool[jobs], whether the job keeps running once it runs
    counts: Bools  # bool[jobs]; a job that does not count holds its GPUs and never ends
    round_s: float  # the least time between two decisions
    horizon_s: float  # over which a restart is charged
    restart_share: float  # the largest share of a value that a restart costs
    most: int  # the number of decisions after which no job is moved any more


@compile_lazily
def fits_free(world: ForesightProblem, column: int, now: int, free: Ints) -> bool:
    """Return whether ``column`` fits into ``free`` once its job gives up column ``now``, or -1."""
    give_back(world, now, free)
    fits = True
    for k in range(world.usage_start[column], world.usage_start[column + 1]):
        fits = fits and world.amount[k] <= free[world.row[k]]
    take_usage(world, now, free)
    return fits


@compile_lazily
def give_back(world: ForesightProblem, column: int, free: Ints) -> None:
    """Return to ``free`` what ``column`` uses; -1 uses nothing."""
    if column >= 0:
        for k in range(world.usage_start[column], world.usage_start[column + 1]):
            free[world.row[k]] += world.amount[k]


@compile_lazily
def take_usage(world: ForesightProblem, column: int, free: Ints) -> None:
    """Take from ``free`` what ``column`` uses; -1 uses nothing."""
    if column >= 0:
        for k in range(world.usage_start[column], world.usage_start[column + 1]):
            free[world.row[k]] -= world.amount[k]


@compile_lazily
def find_step(
    world: ForesightProblem, value: Floats, job: int, now: int, free: Ints
) -> tuple[float, int]:
    """Return the largest gain in value per size of a step of ``job``, and its column or -1."""
    own, takes = 0.0, 0.0
    if now >= 0:
        own, takes = value[now], world.size[now]
    best, column = 0.0, -1
    give_back(world, now, free)
    for c in range(world.job_start[job], world.job_start[job + 1]):
        if value[c] > own:
            ratio = (value[c] - own) / max(world.size[c] - takes, LEAST_SIZE)
            if ratio > best:
                fits = True
                for k in range(world.usage_start[c], world.usage_start[c + 1]):
                    fits = fits and world.amount[k] <= free[world.row[k]]
                if fits:
                    best, column = ratio, c
    take_usage(world, now, free)
    return best, column


@compile_lazily
def climb(world: ForesightProblem, value: Floats, alive: Bools, on: Ints, free: Ints) -> float:
    """Take the step with the largest gain per size until none is left, and return the value.

    ``on`` (int64[jobs]) and ``free`` are changed in place. Ties go to the lower job.
    """
    jobs = len(on)
    for _sweep in range(3):
        heap = [(0.0, -1, -1) for _ in range(0)]
        for j in range(jobs):
            if alive[j]:
                gain, column = find_step(world, value, j, on[j], free)
                if column >= 0:
                    heap.append((-gain, j, column))
        if len(heap) == 0:
            break
        heapq.heapify(heap)
        while len(heap) > 0:
            _, j, column = heapq.heappop(heap)
            if fits_free(world, column, on[j], free):
                give_back(world, on[j], free)
                on[j] = column
                take_usage(world, column, free)
            gain, column = find_step(world, value, j, on[j], free)
            if column >= 0:
                heapq.heappush(heap, (-gain, j, column))
    total = 0.0
    for j in range(jobs):
        if alive[j] and on[j] >= 0:
            total += value[on[j]]
    return total


@compile_lazily
def fill_values(
    world: ForesightProblem, power: float, alive: Bools, left: Floats, on: Ints, value: Floats
) -> None:
    """Fill the value of each column: its share of throughput and of completion, less a restart.

    It is that of the objective ``balanced:power`` (Eq. 10a) at the samples that are ``left``.
    """
    for j in range(len(on)):
        if not alive[j]:
            continue
        remaining_s = max(left[j] / world.unit_rate[j], world.round_s)
        factor = world.weight[j] / world.unit_rate[j] * (world.horizon_s / remaining_s) ** power
        horizon_s = max(min(world.horizon_s, left[j] / world.expected_rate[j]), 1e-9)
        share = min(world.restart_share, world.restart_s[j] / horizon_s)
        for c in range(world.job_start[j], world.job_start[j + 1]):
            value[c] = factor * world.rate[c] * (1.0 if c == on[j] else 1.0 - share)


@compile_lazily
def decide_again(
    world: ForesightProblem, power: float, alive: Bools, left: Floats, on: Ints, value: Floats
) -> Ints:
    """Return the columns of the jobs after one greedy round, int64[jobs].

    Greedy starts from what runs, and from the jobs that must stay alone; the better one counts.
    """
    fill_values(world, power, alive, left, on, value)
    kept, fresh = on.copy(), on.copy()
    free, room = world.capacity.copy(), world.capacity.copy()
    for j in range(len(on)):
        take_usage(world, on[j], free)
        if alive[j] and not world.stays[j]:
            fresh[j] = -1
        take_usage(world, fresh[j], room)
    if climb(world, value, alive, kept, free) >= climb(world, value, alive, fresh, room):
        return kept
    return fresh


@compile_lazily
def follow_answer(world: ForesightProblem, choice: Ints, power: float) -> float:
    """Return the weighted sum of completion times from now if a round takes ``choice``.

    Jobs run on their columns until the first of them ends, but for a round at least. Then a greedy
    round by ``balanced:power`` decides again. After ``world.most`` rounds, each job ends at its
    expected rate. ``choice`` is int64[jobs], a column or -1.
    """
    jobs = len(choice)
    left, alive, on = world.work.copy(), world.counts.copy(), choice.copy()
    ready_s, value = np.zeros(jobs), np.zeros(len(world.rate))
    for j in range(jobs):
        if on[j] >= 0:
            ready_s[j] = world.lag_s[j] if on[j] == world.current[j] else world.restart_s[j]
    at_s, total = 0.0, 0.0
    for moment in range(world.most):
        first_s = np.inf
        for j in range(jobs):
            if alive[j] and on[j] >= 0:
                first_s = min(first_s, max(at_s, ready_s[j]) + left[j] / world.rate[on[j]])
        if first_s == np.inf and moment > 0:
            break  # the last round found nothing that can run
        next_s = at_s + world.round_s
        if first_s < np.inf:
            next_s = max(next_s, first_s)
        open_jobs = 0
        for j in range(jobs):
            if not alive[j]:
                continue
            if on[j] >= 0:
                begins_s = max(at_s, ready_s[j])
                end_s = begins_s + left[j] / world.rate[on[j]]
                if end_s <= next_s * (1 + ROUNDING):
                    total += world.weight[j] * end_s
                    alive[j], on[j] = False, -1
                    continue
                left[j] -= world.rate[on[j]] * max(0.0, next_s - begins_s)
            open_jobs += 1
        at_s = next_s
        if open_jobs == 0:
            return total
        decided = decide_again(world, power, alive, left, on, value)
        for j in range(jobs):
            if alive[j] and decided[j] != on[j]:
                on[j] = decided[j]
                if on[j] >= 0:
                    ready_s[j] = at_s + world.restart_s[j]
    for j in range(jobs):
        if alive[j]:
            rate = world.expected_rate[j] if on[j] < 0 else world.rate[on[j]]
            begins_s = max(at_s, ready_s[j]) if on[j] >= 0 else at_s + world.restart_s[j]
            total += world.weight[j] * (begins_s + left[j] / rate)
    return total


@compile_lazily
def change_answer(
    world: ForesightProblem, value: Floats, choice: Ints, job: int, column: int, others: bool
) -> bool:
    """Put ``job`` on ``column`` (-1 for waiting), and let the others make room for it.

    They keep their columns in order of value per size as far as these fit. If ``others``, they then
    take what is left by greedy steps. ``choice`` (int64[jobs]) is changed in place. Return False if
    a job that must run finds no room.
    """
    jobs, free, before = len(choice), world.capacity.copy(), choice.copy()
    density, alive = np.zeros(jobs), world.counts.copy()
    if column < 0 and world.stays[job]:
        return False
    for j in range(jobs):
        if before[j] >= 0:
            density[j] = value[before[j]] / max(world.size[before[j]], LEAST_SIZE)
            if world.stays[j] or not world.counts[j]:
                density[j] = np.inf
        choice[j] = -1
    if column >= 0:
        if not fits_free(world, column, -1, free):
            return False
        choice[job] = column
        take_usage(world, column, free)
    for j in np.argsort(-density, kind="mergesort"):
        if j != job and before[j] >= 0:
            if fits_free(world, before[j], -1, free):
                choice[j] = before[j]
                take_usage(world, before[j], free)
            elif world.stays[j]:
                return False
    if others:
        alive[job] = False
        climb(world, value, alive, choice, free)
    return True
