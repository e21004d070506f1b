"""The loop that rotates the jobs on the circle of one link (CASSINI)."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

SLACK = 1e-12
"""An excess that is no larger than this comes from rounding."""


@compile_lazily
def turn_job(load: Floats, period: int, begin: int, length: int, share: float, sign: float) -> None:
    """Add (``sign`` 1) or remove (-1) a job that sends at ``share`` for ``length`` steps."""
    for lap in range(len(load) // period):
        for step in range(length):
            load[lap * period + (begin + step) % period] += sign * share


@compile_lazily
def total_excess(load: Floats) -> float:
    """Return the overload of the circle, summed over its steps."""
    total = 0.0
    for step in range(len(load)):
        total += max(0.0, load[step] - 1.0)
    return total


@compile_lazily
def best_turn(
    load: Floats, period: int, begin: int, length: int, share: float, more: Floats
) -> int:
    """Return the rotation, in [0, period), at which the job adds the least excess.

    Ties go to the smallest. ``more`` has room for a period. The cost of all rotations is computed
    with one sliding window.
    """
    more[:period] = 0.0
    for lap in range(len(load) // period):
        for step in range(period):
            now = load[lap * period + step]
            more[step] += max(0.0, now + share - 1.0) - max(0.0, now - 1.0)
    window = 0.0
    for step in range(length):
        window += more[(begin + step) % period]
    best, least = 0, window
    for at in range(1, period):
        window += more[(begin + at + length - 1) % period] - more[(begin + at - 1) % period]
        if window < least - SLACK:
            best, least = at, window
    return best


@compile_lazily
def find_rotations(
    around: int, period: Ints, begin: Ints, length: Ints, share: Floats, starts: int, sweeps: int
) -> tuple[Ints, float]:
    """Return a rotation of each job of a link, int64[n] in steps, and the circle's mean excess.

    Jobs are added one by one where they add least. Then each is removed and put back until that
    gains nothing. If ``starts`` > 1, this is done from that many rotations of the second job, and
    the best result is kept. With two jobs the result is exact.
    """
    # Try each start: place the jobs one by one, then improve them until nothing is gained.
    jobs = len(period)
    best, least = np.zeros(jobs, np.int64), np.inf
    load, more = np.zeros(around), np.zeros(around)
    for start in range(starts):
        load[:] = 0.0
        turned = np.zeros(jobs, np.int64)
        for j in range(jobs):
            if j == 1 and starts > 1:
                turned[j] = start * period[j] // starts
            elif j > 0:
                turned[j] = best_turn(load, period[j], begin[j], length[j], share[j], more)
            turn_job(load, period[j], begin[j] + turned[j], length[j], share[j], 1.0)
        now = total_excess(load)
        for _ in range(sweeps):
            before = now
            for j in range(jobs):
                turn_job(load, period[j], begin[j] + turned[j], length[j], share[j], -1.0)
                turned[j] = best_turn(load, period[j], begin[j], length[j], share[j], more)
                turn_job(load, period[j], begin[j] + turned[j], length[j], share[j], 1.0)
            now = total_excess(load)
            if now >= before - SLACK * around:
                break
        if now < least - SLACK * around:
            best, least = turned, now
        if least <= SLACK * around:
            break
    return best, least / around
