"""First fits at the prices of slots, and the bound that these prices prove."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.lookahead import Lookahead, all_trained_samples
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.lookahead.firstfit import SlotSchedules, fit_in
from tessera.solvers.lookahead.market import (
    SlotPrices,
    open_market,
    price_slots,
    weight_unit,
    work_to_train,
)

SURE_SHARES: Final = (0.5, 0.7, 0.9)
"""Prices of a schedule, as shares of the job's weight, up to which a job is sure to be admitted.

Sure jobs are fitted in by deadline, and the others by price. Each share is tried."""
MANY_JOBS: Final = 1000
"""Number of new jobs from which schedules are the cheapest at prices, and may start later.

With fewer, they are the leanest and start at once: such schedules leave more for later rounds."""
GPU_TIME_PRICE: Final = 1e-6
"""Price of GPU time where it would be free, as a share of the highest price.

Among schedules at one price, the leanest is then taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedRoom:
    """The best room, the prices, and an upper bound on the weight of new jobs in any room.

    The bound is for rooms that keep the promises that this one keeps.
    """

    room: SlotSchedules
    prices: SlotPrices
    bound: float


def fit_at_prices(ahead: Lookahead, room: SlotSchedules) -> PricedRoom:
    """Return ``room``, or one of more weight in which jobs bought their schedules at prices.

    The promises that ``room`` keeps have the same schedules. Moving them at prices admits more in
    one round and meets fewer deadlines over time (docs/decisions), so it is left to CP-SAT.
    """
    kept = room.placed & ahead.promised
    new = ~ahead.promised & (ahead.weight > 0)
    work = work_to_train(ahead)
    if kept.any():
        trained = all_trained_samples(ahead, np.where(kept[:, None], room.picks, -1))
        work = np.where(kept, np.minimum(work, trained), work)
    market = open_market(ahead, kept | new, kept, np.maximum(work, 0.0), whole=True)
    aim = weight_of_new(room)
    prices = price_slots(ahead, market, room.free, aim)
    bound = round_down(max(prices.bound, aim), ahead.weight[new])
    best = room
    if int(new.sum() - room.placed[new].sum()) == 0 or bound <= aim * (1 + 1e-12):
        return PricedRoom(room=room, prices=prices, bound=bound)
    for candidate in _rooms(ahead, room, kept, prices):
        if candidate.placed[kept].all() and weight_of_new(candidate) > weight_of_new(best):
            best = candidate
    return PricedRoom(room=best, prices=prices, bound=bound)


def _rooms(
    ahead: Lookahead, room: SlotSchedules, kept: Bools, prices: SlotPrices
) -> Iterator[SlotSchedules]:
    """Yield rooms in which jobs took schedules that the others left, in orders by price."""
    problem = room.problem
    if int((~ahead.promised).sum()) >= MANY_JOBS:
        least = GPU_TIME_PRICE * float(prices.price.max(initial=0.0)) or 1.0
        each = prices.price + problem.price * (least / float(problem.price.max(initial=1.0)))
        problem = problem._replace(price=as_fixed_array(each), delays=True)
    dear = prices.cost / np.maximum(ahead.weight, 1e-300)
    start = SlotSchedules(ahead, problem)
    start.give(np.flatnonzero(kept), room.picks)
    for share in SURE_SHARES:
        candidate = start.copy()
        fit_in(candidate, _sure_first(ahead, dear, share))
        fit_in(candidate, np.flatnonzero(~ahead.promised & (ahead.weight <= 0)))
        yield candidate


def _sure_first(ahead: Lookahead, dear: Floats, share: float) -> Ints:
    """Return the new jobs with weight: those below ``share`` by deadline, the others by ``dear``."""
    new = np.flatnonzero(~ahead.promised & (ahead.weight > 0))
    cost, deadline_s = dear[new], ahead.deadline_s[new]
    sure = cost <= share
    order: Ints = new[np.lexsort((np.where(sure, deadline_s, cost), ~sure))]
    return order


def by_deadline(ahead: Lookahead, jobs: Bools) -> Ints:
    """Return the ``jobs`` (bool[jobs]) by deadline."""
    chosen = np.flatnonzero(jobs)
    order: Ints = chosen[np.argsort(ahead.deadline_s[chosen], kind="stable")]
    return order


def latest_start(ahead: Lookahead) -> Floats:
    """Return when each job must start on its fastest Cell at the latest, float64[jobs]."""
    fastest = np.full(len(ahead.job), 1e-300)
    np.maximum.at(fastest, ahead.owner, ahead.rate)
    latest_s: Floats = ahead.deadline_s - ahead.restart_s - ahead.work / fastest
    return latest_s


def weight_of_new(room: SlotSchedules) -> float:
    """Return the weight of the admitted jobs without a promise."""
    return float(room.ahead.weight[room.placed & ~room.ahead.promised].sum())


def round_down(bound: float, weight: Floats) -> float:
    """Return the greatest sum of some of ``weight`` (float64[jobs]) that may be at most ``bound``.

    Sums are multiples of ``weight_unit``. If that is not known, it is the bound itself.
    """
    unit = weight_unit(weight)
    return math.floor(bound / unit) * unit if unit > 0 else bound
