"""Deadline schedules without promises: earliest deadline first, or a list that meets more weight.

A list states the order in which jobs are served and how each chooses among its Cells. It is
followed to its end (``tessera.solvers.kernels.rollout``) as if no other job came, which shows the
deadlines that it would meet. The best of several lists is kept, and changed while that helps
(rollout; Bertsekas, Tsitsiklis and Wu 1997, J. Heuristics 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.round.lookahead import Lookahead
from tessera.formulation.state.last_round import ScheduleSegments
from tessera.formulation.state.snapshot import Jobs
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.kernels.rollout import (
    DRAWS_PER_CHANGE,
    MET,
    LegLog,
    RolloutProblem,
    follow_jobs,
    improve_list,
)
from tessera.solvers.lookahead.market import SlotPrices, open_market, price_slots, work_to_train
from tessera.solvers.lookahead.pricefit import latest_start, round_down

TRIES: Final = 200
"""Changes of the list that are tried."""
MOST_VISITS: Final = 8_000_000
"""Maximum number of visits of an open job at a moment, for first lists and again for their changes.

It takes about 0.3 s."""
LISTS_AT_LEAST: Final = 8
"""Number of lists that are followed to their end, whatever the number of jobs."""
LEAST_TRIES: Final = 10
"""Number of changes below which none is tried, because so few find nothing in a long list."""
SURE_SHARES: Final = (0.5, 0.7, 0.3)
"""Prices of a schedule, as shares of the job's weight, below which jobs are served by latest start.

The others are served after them, by price. Each share is tried."""
AS_REQUESTED, LEANEST, FASTEST, AT_PRICES = range(4)
"""The tastes, as rows of ``RolloutProblem.lists``."""
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """The jobs whose deadlines a list meets, and their segments.

    Segments are those of met jobs only, and follow one another. Times are seconds from now.
    """

    met: Bools  # bool[jobs]
    job: Ints  # int64[segments]
    option: Ints  # int64[segments]
    span_s: Floats  # float64[segments, 2]
    bound: float  # no schedule of these jobs in time meets more weight

    def schedule_segments(self, ahead: Lookahead) -> ScheduleSegments:
        """Return the segments in absolute time."""
        cell, now_s = ahead.cell[self.option], float(ahead.boundary_s[0])
        return ScheduleSegments(
            job=ahead.job[self.job],
            start_s=now_s + self.span_s[:, 0],
            end_s=now_s + self.span_s[:, 1],
            gpu_type=ahead.cells.gpu_type[cell],
            gpus=ahead.cells.gpus[cell],
            pipeline_degree=ahead.cells.pipeline_degree[cell],
            plan=ahead.cells.plan[cell],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _JobList:
    """A list, the weight that it meets, and the visits that following it took."""

    order: Ints
    tastes: Ints  # int64[jobs], a row of ``RolloutProblem.lists``
    met: float
    visits: int


def roll_out(ahead: Lookahead, jobs: Jobs, free: Ints, among: Bools, round_s: float) -> Rollout:
    """Return the best list found for the jobs ``among``, followed to its end.

    ``among`` is bool[jobs of ``ahead``]; ``free`` is int64[resources, slots]. The first list is EDF
    as in ``tessera.solvers.schedulers.edf``: by deadline, each job on what it runs on, else as
    requested, else on its fastest Cell. Another list takes its place only if it meets more weight.
    So if no other job comes, no deadline is lost that EDF would meet. If EDF does not meet all
    deadlines, the prices of slots give a bound and more lists.
    """
    if not among.any():
        none = np.zeros(0, np.int64)
        return Rollout(met=among, job=none, option=none, span_s=np.zeros((0, 2)), bound=0.0)
    world = _rollout_problem(ahead, jobs, free, among, round_s)
    orders = _orders(ahead, among)
    lists = [(order, taste) for order in orders for taste in (AS_REQUESTED, LEANEST, FASTEST)]
    best = _follow_list(world, *lists[0])
    bound = float(ahead.weight[among].sum())
    # If there is time for few lists, those that prices suggest come first.
    few = len(lists) * best.visits > MOST_VISITS
    if not few:
        best = _best_list(world, lists[1:], best)
    if best.met < bound * (1 - 1e-12):
        prices = _slot_prices(ahead, free, among, best.met)
        world = world._replace(lists=as_fixed_array(_with_prices(ahead, world.lists, prices)))
        more = _priced_lists(ahead, among, prices)
        best = _best_list(world, [*more, *lists[1:]] if few else more, best)
        bound = max(min(bound, round_down(prices.bound, ahead.weight[among])), best.met)
    if best.met < bound * (1 - 1e-12):
        best = _improved(world, best)
    return replace(_followed(world, best.order, best.tastes), bound=bound)


def _follow_list(world: RolloutProblem, order: Ints, taste: int) -> _JobList:
    tastes, fate = np.full(len(order), taste), np.zeros(len(order), np.int64)
    _, visits = follow_jobs(world, order, tastes, fate, _no_log())
    met = float(world.weight[fate == MET].sum())
    return _JobList(order=order, tastes=tastes, met=met, visits=visits)


def _no_log() -> LegLog:
    return LegLog(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2)))


def _best_list(
    world: RolloutProblem, lists: Iterable[tuple[Ints, int]], best: _JobList
) -> _JobList:
    """Return ``best`` or the first of ``lists`` that meets more, as far as visits allow."""
    spent = best.visits
    for number, (order, taste) in enumerate(lists):
        if number >= LISTS_AT_LEAST and spent > MOST_VISITS:
            break
        tried = _follow_list(world, order, taste)
        spent += tried.visits
        if tried.met > best.met * (1 + 1e-9):
            best = tried
    return best


def _improved(world: RolloutProblem, best: _JobList) -> _JobList:
    """Return the best list after changes of ``best``."""
    tries = min(TRIES, MOST_VISITS // max(1, best.visits))
    if tries < LEAST_TRIES:
        return best
    draws = np.random.default_rng(SEED).random((tries, 1 + 2 * DRAWS_PER_CHANGE))
    met, order, tastes = improve_list(world, best.order, best.tastes, draws, _no_log())
    return _JobList(order=order, tastes=tastes, met=met, visits=best.visits)


def _slot_prices(ahead: Lookahead, free: Ints, among: Bools, aim: float) -> SlotPrices:
    """Return the prices of what is ``free``, at which the jobs ``among`` buy parts of slots."""
    none = np.full(len(ahead.job), -1, dtype=np.int64)
    rest = replace(ahead, capacity=np.maximum(free, 0), held=none)
    nobody = np.zeros(len(among), dtype=np.bool_)
    buyers = among & (ahead.weight > 0)
    market = open_market(rest, buyers, nobody, work_to_train(ahead), whole=False)
    return price_slots(ahead, market, np.zeros_like(free), aim)


def _priced_lists(ahead: Lookahead, among: Bools, prices: SlotPrices) -> list[tuple[Ints, int]]:
    """Return orders and tastes in which jobs that pay little for their weight come first."""
    latest_s = latest_start(ahead)
    dear = np.where(among, prices.cost, np.inf) / np.maximum(ahead.weight, 1e-300)
    return [
        (np.lexsort((np.where(dear > share, dear, latest_s), dear > share)), taste)
        for share in SURE_SHARES
        for taste in (AT_PRICES, AS_REQUESTED)
    ]


def _with_prices(ahead: Lookahead, lists: Ints, prices: SlotPrices) -> Ints:
    """Return ``lists`` with one more taste: the least price of a sample, on average to the deadline."""
    owner, gpus = ahead.owner, ahead.cells.gpus[ahead.cell]
    total = np.cumsum(prices.price, axis=1)
    last = np.searchsorted(ahead.boundary_s[:-1], ahead.deadline_s)[owner]
    each = (ahead.use * total[:, np.maximum(last, 1) - 1].T).sum(axis=1)
    rate = np.maximum(ahead.rate, 1e-300)
    return np.vstack([lists, np.lexsort((gpus / rate, each / rate, owner))])


def _rollout_problem(
    ahead: Lookahead, jobs: Jobs, free: Ints, among: Bools, round_s: float
) -> RolloutProblem:
    now_s, owner = ahead.boundary_s[0], ahead.owner
    changes = np.flatnonzero(np.append(True, (free[:, 1:] != free[:, :-1]).any(axis=0)))
    trains = ahead.rate > 0
    startable = np.flatnonzero(trains & ~ahead.stays)
    quickest, smallest = np.full(len(among), 1e-300), np.full(len(among), 2**62)
    np.maximum.at(quickest, owner[startable], ahead.rate[startable])
    np.minimum.at(smallest, owner[startable], ahead.cells.gpus[ahead.cell[startable]])
    # Jobs that do not take part count as lost.
    deadline_s = np.where(among, ahead.deadline_s - now_s, -1.0)
    return RolloutProblem(
        option_start=as_fixed_array(ahead.option_start),
        kind=as_fixed_array(ahead.cells.gpu_type[ahead.cell]),
        types=ahead.types,
        quickest=as_fixed_array(quickest),
        smallest=as_fixed_array(smallest),
        lists=as_fixed_array(_lists(ahead, jobs)),
        use=as_fixed_array(ahead.use),
        rate=as_fixed_array(np.where(trains, ahead.rate, 1e-300)),
        stays=as_fixed_array(ahead.stays & among[owner]),
        now=as_fixed_array(ahead.now),
        lag_s=as_fixed_array(ahead.lag_s),
        work=as_fixed_array(ahead.work),
        deadline_s=as_fixed_array(deadline_s),
        restart_s=as_fixed_array(ahead.restart_s),
        weight=as_fixed_array(np.where(among, ahead.weight, 0.0)),
        step_s=as_fixed_array(ahead.boundary_s[changes] - now_s),
        free=as_fixed_array(free[:, changes].T),
        round_s=float(round_s),
        most=2 * len(among) + len(changes),
        visits=MOST_VISITS // 4,
    )


def _lists(ahead: Lookahead, jobs: Jobs) -> Ints:
    """Return each job's options in the order of each taste.

    The tastes are: as requested and then the fastest; the leanest; the fastest.
    """
    owner, kind = ahead.owner, ahead.cells.gpu_type[ahead.cell]
    gpus, wanted = ahead.cells.gpus[ahead.cell], jobs.requested_gpu_type[ahead.job][owner]
    requested = (gpus == jobs.requested_gpus[ahead.job][owner]) & ((wanted < 0) | (kind == wanted))
    per_rate = gpus / np.maximum(ahead.rate, 1e-300)
    return np.stack(
        [
            np.lexsort((-ahead.rate, ~requested, owner)),
            np.lexsort((per_rate, owner)),
            np.lexsort((-ahead.rate, owner)),
        ]
    )


def _orders(ahead: Lookahead, among: Bools) -> list[Ints]:
    """Return three orders of the jobs, in which jobs that do not count come last.

    They are by deadline, by latest start on the fastest Cell, and by GPU time per weight.
    """
    lean = np.full(len(ahead.job), np.inf)
    gpus = ahead.cells.gpus[ahead.cell]
    np.minimum.at(lean, ahead.owner, gpus / np.maximum(ahead.rate, 1e-300))
    dear = lean * ahead.work / np.maximum(ahead.weight, 1e-12)
    last = ~among | (ahead.weight <= 0)
    return [np.lexsort((key, last)) for key in (ahead.deadline_s, latest_start(ahead), dear)]


def _followed(world: RolloutProblem, order: Ints, tastes: Ints) -> Rollout:
    fate, room = np.zeros(len(order), np.int64), 4 * len(order) + 16
    while True:
        log = LegLog(np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros((room, 2)))
        count, _ = follow_jobs(world, order, tastes, fate, log)
        if count < room:
            break
        room *= 4
    is_met = fate[log.job[:count]] == MET
    return Rollout(
        met=fate == MET,
        job=log.job[:count][is_met],
        option=log.option[:count][is_met],
        span_s=log.span_s[:count][is_met],
        bound=math.inf,
    )
