"""The geometry of CASSINI: iterations rolled up on a circle and rotated until they fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.network.kernels.circles import find_rotations

STEPS_OF_SHORTEST: Final = 72
"""Steps of the shortest iteration: 5 degrees."""

MAX_PARTS: Final = 20
"""Finest division of the shortest iteration that lengths are rounded to.

A part is 5 % of the iteration, which is as much as it may drift."""

MAX_LAPS: Final = 24
"""Maximum number of shortest iterations on a circle."""

MAX_SWEEPS: Final = 8
MAX_JOBS_WITH_STARTS: Final = 4
"""Maximum number of jobs of a link for which several starts are tried."""

START_COUNT: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circle:
    """The iterations of one link's jobs on a common grid.

    Job j's iteration fits ``around / counts[j]`` times.
    """

    counts: Ints  # (n,) length of each iteration, in parts
    parts: int  # parts in the shortest iteration
    around: int  # the least common multiple of counts
    error: float  # the largest relative change of a length by rounding


def common_grid(period_s: Floats) -> Circle:
    """Return the grid on which the iterations' lengths have a common multiple of few laps.

    The shortest iteration has 1 to FINEST parts. Of these grids, the one that rounds best is taken,
    and of equal ones the coarsest. If no grid has a common multiple within LAPS, lengths are
    rounded to powers of two, at most 2^7 (a large ``error``).
    """
    shortest_s = float(period_s.min())
    best: Circle | None = None
    for parts in range(1, MAX_PARTS + 1):
        longest = MAX_LAPS * parts + 1  # longer iterations have no place, either
        counts = np.clip(np.rint(period_s * parts / shortest_s), 1, longest).astype(np.int64)
        around = math.lcm(*set(counts.tolist()))
        if around > MAX_LAPS * parts:
            continue
        error = float(np.abs(counts * shortest_s / (parts * period_s) - 1).max())
        if best is None or error < best.error - 1e-9:
            best = Circle(counts=counts, parts=parts, around=around, error=error)
    if best is not None:
        return best
    counts = 2 ** np.minimum(np.rint(np.log2(period_s / shortest_s)), 7).astype(np.int64)
    error = float(np.abs(counts * shortest_s / period_s - 1).max())
    return Circle(counts=counts, parts=1, around=int(counts.max()), error=error)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CircleFit:
    """The rotations of a link's jobs."""

    shift_s: Floats  # (n,) each in [0, the job's iteration)
    score: float  # 1 less the mean excess; 1 means that the link always has what is demanded
    error: float  # of the grid, relative


def fit_circles(period_s: Floats, begin_s: Floats, sends_s: Floats, share: Floats) -> CircleFit:
    """Rotate the jobs of a link for the best score (CASSINI, 1 - mean excess / capacity).

    Job j needs ``share[j]`` of the link from ``begin_s[j]`` into its iteration on, for
    ``sends_s[j]``.
    """
    grid = common_grid(period_s)
    fine = -(-STEPS_OF_SHORTEST // grid.parts)
    steps = grid.counts * fine
    begin = np.rint(begin_s / period_s * steps).astype(np.int64)
    length = np.clip(np.rint(sends_s / period_s * steps).astype(np.int64), 1, steps)
    first = np.argsort(-share * sends_s / period_s, kind="stable")
    starts = START_COUNT if 2 < len(first) <= MAX_JOBS_WITH_STARTS else 1
    turned, excess = find_rotations(
        grid.around * fine,
        as_fixed_array(steps[first]),
        as_fixed_array(begin[first]),
        as_fixed_array(length[first]),
        as_fixed_array(share[first]),
        starts,
        MAX_SWEEPS,
    )
    shift_s = np.empty(len(first))
    shift_s[first] = turned / steps[first] * period_s[first]
    return CircleFit(shift_s=shift_s, score=1.0 - excess, error=grid.error)
