"""Priorities P_j = k_j I_j (Crux eq. 3), and stable orders by them."""

from __future__ import annotations

import heapq
import math

import numpy as np

from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats, Ints

MARGIN = 0.1
"""The amount by which P must differ for two jobs to change places, as a share of the lower P."""


def assign_priorities(demand: LinkDemand, factors: Floats) -> Floats:
    """Return P = k I, flop/s, (J,); it is infinite for jobs without traffic.

    Raises:
        InvalidInput: k or I of a job is NaN.
    """
    priority: Floats = np.where(demand.comm_s > 0, factors * demand.intensity, np.inf)
    _refuse_nan(priority)
    return priority


def order_of(priority: Floats) -> Ints:
    """Return the jobs by falling P, ties by index, the most urgent first, (J,).

    Jobs without traffic come first.

    Raises:
        InvalidInput: a priority is NaN.
    """
    _refuse_nan(priority)
    return np.argsort(-priority, kind="stable")


def stable_order(priority: Floats, earlier: Ints, *, margin: float = MARGIN) -> Ints:
    """Return an order, (J,), that keeps ``earlier`` where priorities have hardly changed.

    Jobs whose P differs by more than ``margin`` are in the order of P. All others keep their
    earlier order, unless a third job forces them apart. ``earlier`` names jobs, the most urgent
    first. A job that it does not name comes just before the next job of lower P that it does name.

    The relation P_a > (1 + margin) P_b is a partial order, so jobs can be taken in any order that
    respects it. Of the jobs that no remaining job must precede, the one that was earliest is taken.

    Raises:
        InvalidInput: a priority is NaN, the margin is below 0, or a job is named twice or does not
            exist.
    """
    jobs = len(priority)
    if not 0 <= margin < math.inf:
        raise InvalidInput("margin", f"is {margin}; it must be at least 0")
    if len(np.unique(earlier)) != len(earlier) or ((earlier < 0) | (earlier >= jobs)).any():
        raise InvalidInput("earlier", f"must name jobs from 0 to {jobs - 1}, each at most once")
    by_priority = order_of(priority)
    key = _places(by_priority, earlier)
    falling = priority[by_priority]
    # Jobs that must come first are a prefix of the order by P. It grows as P falls.
    before = np.searchsorted(-falling, -(1 + margin) * falling, side="left")
    before[np.isinf(falling)] = 0
    ready: list[tuple[float, int]] = []
    taken = np.zeros(jobs + 1, dtype=np.bool_)
    done, opened = 0, 0
    order = np.empty(jobs, dtype=np.int64)
    for place in range(jobs):
        while taken[done]:
            done += 1
        while opened < jobs and before[opened] <= done:
            heapq.heappush(ready, (float(key[by_priority[opened]]), opened))
            opened += 1
        at = heapq.heappop(ready)[1]
        taken[at] = True
        order[place] = by_priority[at]
    return order


def _places(by_priority: Ints, earlier: Ints) -> Floats:
    """Return the earlier place of each job, (J,).

    A new job is half a place before the next job of lower P that had a place.
    """
    place = np.full(len(by_priority), np.nan)
    place[earlier] = np.arange(len(earlier))
    following = float(len(earlier))
    for job in by_priority[::-1].tolist():
        if np.isnan(place[job]):
            place[job] = following - 0.5
        else:
            following = float(place[job])
    return place


def _refuse_nan(priority: Floats) -> None:
    if wrong := np.flatnonzero(np.isnan(priority)).tolist():
        raise InvalidInput("priority", f"of job {wrong[0]} is NaN; measure its work and traffic")
