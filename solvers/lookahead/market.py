"""The market of slots: groups of jobs with the same options, and the prices of resources in slots.

Lagrangian relaxation of (27): every job alone buys the cheapest schedule at the prices, so the
dual value is above the weight of every answer (Eq. 28b). The prices are first changed after each
group of jobs (Nedic and Bertsekas 2001, SIAM J. Optim. 12), and then follow subgradients of all
jobs with Polyak's step (1969).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges, run_starts
from tessera.formulation.round.lookahead import WORK_TOLERANCE, Lookahead
from tessera.solvers.kernels.jit import as_fixed_array
from tessera.solvers.kernels.slotprices import SlotMarket, price_schedules, trade_by_group

MOST_VISITS: Final = 1_000_000
"""Maximum number of visits of a job in a slot for each of the two kinds of passes.

A visit takes about 0.1 us."""
TRADES: Final = 20
"""Number of passes in which prices change after each group. More jobs than ``MOST_VISITS`` allows
are sampled."""
TRADES_OF_ALL: Final = 2
"""Number of such passes over all jobs after those over a sample."""
MOST_STEPS: Final = 20
"""Maximum number of subgradient steps."""
FIRST_STEP: Final = 0.3
"""Change of a price after one pass that sold twice the capacity, as a share of a typical price."""
LAST_STEP: Final = 0.01
"""The step of the last pass, as a share of the first."""
BUSY_SHARE: Final = 0.9
"""Share of a slot's resources above which a known answer makes the slot count as busy."""
MEMORY: Final = 0.6
"""Share of the last direction in the next one."""
PATIENCE: Final = 4
"""Number of subgradient steps without a lower bound after which steps are halved."""
Digits = npt.NDArray[np.uint64]
"""Numbers whose sums and products wrap around."""
ROUNDING: Final = 1e-9
"""An upper bound on the rounding of the dual value, as a share of what is added up."""
ENOUGH: Final = 0.999
"""Share of the unit of weights by which a bound may be above an answer that it proves best."""
BINARY_DIGITS: Final = 20
"""Number of binary digits after the point that a weight may have to count as exact."""
MAX_SCALED_WEIGHT: Final = 2.0**60
"""Weight in the last of these digits up to which integers hold it."""
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPrices:
    """Prices of resources in slots, with the bound that they prove.

    ``price`` is float64[resources, slots], in weight for a unit in the slot. ``cost`` is
    float64[jobs of the look-ahead], the least price of a schedule of each job, or inf. ``bound`` is
    an upper bound on the weight of the new jobs that any schedule admits with the kept promises.
    """

    price: Floats
    cost: Floats
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Market:
    """A market, and the job of the look-ahead that each of its jobs is."""

    slots: SlotMarket
    job: Ints  # int64[jobs of the market]

    def sample(self, every: int) -> Market:
        """Return the market of every ``every``-th job, on the same share of the resources."""
        m, jobs = self.slots, np.arange(0, len(self.job), every)
        group = np.searchsorted(m.job_start, jobs, side="right") - 1
        return Market(
            slots=m._replace(
                job_start=np.searchsorted(group, np.arange(len(m.job_start))),
                work=m.work[jobs],
                restart_s=m.restart_s[jobs],
                deadline_s=m.deadline_s[jobs],
                last=m.last[jobs],
                weight=m.weight[jobs],
                must=m.must[jobs],
            ),
            job=self.job[jobs],
        )


def open_market(
    ahead: Lookahead, among: Bools, must: Bools, least_work: Floats, *, whole: bool
) -> Market:
    """Return the market in which the jobs ``among`` (bool[jobs]) buy, those of ``must`` at any price.

    ``least_work`` is float64[jobs], samples that any schedule of a job trains. If ``whole``,
    schedules take whole slots. What steady jobs keep of the type that they hold is not for sale.
    """
    use, capacity = _beyond_floors(ahead)
    option = np.flatnonzero(among[ahead.owner] & (ahead.rate > 0) & ~_dispensable(ahead, use))
    option = option[np.lexsort((ahead.rate[option], ahead.owner[option]))]
    jobs = np.flatnonzero(among)
    start = np.searchsorted(ahead.owner[option], jobs)
    count = np.searchsorted(ahead.owner[option], jobs, side="right") - start
    jobs, start, count = jobs[count > 0], start[count > 0], count[count > 0]
    group = _groups(ahead, use, option, start, count)
    order = np.argsort(group, kind="stable")
    jobs, group = jobs[order], group[order]
    firsts = order[np.searchsorted(group, np.arange(int(group.max(initial=-1)) + 1))]
    chosen = option[concatenate_ranges(start[firsts], count[firsts])]
    stays = np.zeros(len(ahead.job), dtype=np.bool_)
    stays[ahead.owner[ahead.stays]] = True
    boundary_s = ahead.boundary_s.copy()
    last = np.searchsorted(boundary_s[:-1], ahead.deadline_s[jobs] - (SAME_S if whole else 0.0))
    if not whole:  # what is free in the last slot is free forever
        boundary_s[-1] = max(boundary_s[-1], ahead.deadline_s[jobs].max(initial=0.0))
    slots = SlotMarket(
        option_start=run_starts(count[firsts]),
        kind=ahead.cells.gpu_type[ahead.cell[chosen]],
        use=use[chosen],
        rate=ahead.rate[chosen],
        job_start=np.searchsorted(group, np.arange(len(firsts) + 1)),
        work=least_work[jobs],
        restart_s=np.where(stays, 0.0, ahead.restart_s)[jobs],
        deadline_s=ahead.deadline_s[jobs],
        last=last.astype(np.int64),
        weight=ahead.weight[jobs],
        must=must[jobs],
        boundary_s=boundary_s,
        capacity=capacity,
        types=ahead.types,
        whole=whole,
    )
    return Market(slots=slots, job=jobs)


def work_to_train(ahead: Lookahead) -> Floats:
    """Return the samples that every schedule that counts as in time trains, float64[jobs]."""
    return np.maximum(ahead.work - 2 * WORK_TOLERANCE * ahead.total_work, 0.0)


def price_slots(ahead: Lookahead, market: Market, free: Ints, aim: float) -> SlotPrices:
    """Return the prices of the lowest dual value that is found.

    ``free`` (int64[resources, slots]) is what an answer of weight ``aim`` leaves. Slots that it
    fills have a price to begin with. If a pass over all jobs is long, most passes are over a
    sample. No more passes are made once the value proves that the answer is best.
    """
    m, slots = market.slots, max(1, market.slots.capacity.shape[1])
    enough = aim + ENOUGH * weight_unit(m.weight[~m.must])
    every = -(-len(market.job) * TRADES * slots // MOST_VISITS)
    step, price = FIRST_STEP * _typical_price(m, free), np.zeros(m.capacity.shape)
    descent = _Descent(ahead, m, enough)
    descent.evaluate(price)  # this bound is without jobs that cannot be in time even alone
    if every > 1 and not descent.ended:
        part = market.sample(every)
        share = len(part.job) / len(market.job)
        price = _Descent(ahead, part.slots, -np.inf, share).trade(price, step, TRADES)
        descent.trade(price, step * LAST_STEP, TRADES_OF_ALL)
    else:
        descent.trade(price, step, TRADES)
    descent.follow(aim, int(np.clip(MOST_VISITS // max(1, len(market.job) * slots), 1, MOST_STEPS)))
    cost = np.full(len(ahead.job), np.inf)
    cost[market.job] = descent.cost
    return SlotPrices(price=descent.price, cost=cost, bound=descent.bound)


def weight_unit(weight: Floats) -> float:
    """Return the greatest common divisor of ``weight`` (float64[jobs]).

    It is 0 if they are not short binary fractions, such as whole numbers and halves.
    """
    scaled = np.ldexp(weight, BINARY_DIGITS)
    if not len(weight) or (scaled != np.rint(scaled)).any() or scaled.max() > MAX_SCALED_WEIGHT:
        return 0.0
    return math.ldexp(float(np.gcd.reduce(scaled.astype(np.int64))), -BINARY_DIGITS)


def _typical_price(m: SlotMarket, free: Ints) -> float:
    """Return the weight of all jobs for each GPU-second of the slots that are busy."""
    capacity, length_s = m.capacity[: m.types], np.diff(m.boundary_s)
    total = np.maximum(capacity.sum(axis=0), 1)
    busy = free[: m.types].sum(axis=0) <= (1 - BUSY_SHARE) * total
    sold = capacity.sum(axis=0) * length_s
    return float(m.weight.sum()) / max(float(sold[busy].sum() or sold.sum()), 1e-9)


class _Descent:
    """The prices of the lowest dual value so far, with what each job pays at them.

    The market's jobs share ``share`` of the capacity. A price changes in proportion to the length
    of its slot and to the share of the capacity that is sold in excess.
    """

    def __init__(self, ahead: Lookahead, m: SlotMarket, enough: float, share: float = 1.0) -> None:
        self._check, self._capacity, self._enough = ahead.check, share * m.capacity, enough
        m = SlotMarket._make(as_fixed_array(x) if isinstance(x, np.ndarray) else x for x in m)
        self._market, self.bound = m, np.inf
        self.price, self.cost = np.zeros(m.capacity.shape), np.zeros(len(m.work))
        length_s = np.diff(m.boundary_s)
        self._scale = np.where(m.capacity > 0, length_s / np.maximum(self._capacity, 1e-9), 0.0)

    @property
    def ended(self) -> bool:
        """Return whether no lower value is needed."""
        return self.bound <= self._enough

    def evaluate(self, price: Floats) -> tuple[float, Floats]:
        """Return the dual value at ``price``, and the use of each resource in each slot."""
        self._check()
        cost, usage = np.empty(len(self.cost)), np.empty(price.shape)
        gain = price_schedules(self._market, as_fixed_array(price), cost, usage)
        sold = float((price * self._capacity).sum())
        # Rounding is in proportion to the sums, of which prices times use are a part.
        value = gain + sold + ROUNDING * (float(self._market.weight.sum()) + sold + abs(gain))
        if value < self.bound:
            self.bound, self.price, self.cost = value, price, cost
        return value, usage

    def trade(self, price: Floats, step: float, passes: int) -> Floats:
        """Change ``price`` after each group of jobs; return the mean prices of the last pass.

        The dual value is taken at the mean prices of passes in the second half.
        """
        m, price = self._market, price.copy()
        groups, rng = len(m.job_start) - 1, np.random.default_rng(SEED)
        share = np.diff(m.job_start) / max(1, len(m.work))
        offers = as_fixed_array(share * (self._capacity.sum() / max(1, m.capacity.sum())))
        mean = price
        for i in range(passes):
            self._check()
            if self.ended:
                break
            total = np.zeros(price.shape)
            pace = step * LAST_STEP ** (i / passes)
            order = as_fixed_array(rng.permutation(groups))
            trade_by_group(m, order, offers, as_fixed_array(pace * self._scale), price, total)
            mean = total / groups
            if 2 * i >= passes - 1:
                self.evaluate(mean)
        return mean

    def follow(self, aim: float, steps: int) -> None:
        """Take ``steps`` subgradient steps from the best prices towards the value ``aim``."""
        price, scale = self.price, self._scale
        direction, factor, stale = np.zeros(price.shape), 1.0, 0
        for _ in range(steps):
            before = self.bound
            value, usage = self.evaluate(price)
            stale = 0 if self.bound < before else stale + 1
            if self.ended:
                return
            if stale and stale % PATIENCE == 0:
                factor, price, direction = factor / 2, self.price, np.zeros(price.shape)
                continue
            slope = usage - self._capacity
            slope = np.where((price <= 0) & (slope < 0), 0.0, slope)
            direction = slope + MEMORY * direction
            if float((slope * direction * scale).sum()) <= 0:
                direction = slope
            norm = float((direction * direction * scale).sum())
            if norm <= 0:
                return
            step = factor * max(value - aim, 0.0) / norm
            price = np.maximum(price + step * scale * direction, 0.0)


def _beyond_floors(ahead: Lookahead) -> tuple[Ints, Ints]:
    """Return the use of options and the capacity, less what steady jobs hold already.

    They are int64[options, resources] and int64[resources, slots].
    """
    if not (ahead.held >= 0).any():
        return ahead.use, ahead.capacity
    use, capacity = ahead.use.copy(), ahead.capacity.copy()
    kind = ahead.cells.gpu_type[ahead.cell]
    own = np.flatnonzero(kind == ahead.held[ahead.owner])
    use[own, kind[own]] = np.maximum(use[own, kind[own]] - ahead.floor[own], 0)
    job, first = np.unique(ahead.owner[own], return_index=True)
    np.subtract.at(capacity, ahead.held[job], ahead.floor[own[first]][:, None])
    return use, np.maximum(capacity, 0)


def _dispensable(ahead: Lookahead, use: Ints) -> Bools:
    """Return the options that stay and that the job could also start again, at no lower rate.

    The market charges such a job no start, so its options are those of jobs that do not run.
    """
    again = np.flatnonzero(ahead.restarts_own)
    out = np.zeros(len(ahead.cell), dtype=np.bool_)
    running = np.full(len(ahead.job), -1, dtype=np.int64)
    running[ahead.owner[ahead.stays]] = np.flatnonzero(ahead.stays)
    stay = running[ahead.owner[again]]
    good = (ahead.rate[again] >= ahead.rate[stay]) & (use[again] == use[stay]).all(axis=1)
    out[stay[good]] = True
    return out


def _groups(ahead: Lookahead, use: Ints, option: Ints, start: Ints, count: Ints) -> Ints:
    """Return a group for each job, int64[jobs]; jobs of a group have equal options.

    The options of job j are ``option[start[j] : start[j] + count[j]]``.
    """
    kind = ahead.cells.gpu_type[ahead.cell[option]]
    text = np.column_stack(
        [kind.astype(np.uint64), ahead.rate[option].view(np.uint64), use[option].astype(np.uint64)]
    )
    total = _digests(text, start, count)
    _, first, group = np.unique(total, return_index=True, return_inverse=True)
    # Equal digests are not trusted: a job that differs from the first of its group is alone.
    alike = count == count[first[group]]
    same = np.flatnonzero(alike)
    mine = concatenate_ranges(start[same], count[same])
    other = concatenate_ranges(start[first[group[same]]], count[same])
    differs = np.zeros(len(start), dtype=np.bool_)
    wrong = (text[mine] != text[other]).any(axis=1)
    differs[np.repeat(same, count[same])[wrong]] = True
    alone = np.flatnonzero(differs | ~alike)
    result = group.astype(np.int64)
    result[alone] = len(first) + np.arange(len(alone))
    return np.unique(result, return_inverse=True)[1].astype(np.int64)


def _digests(text: Digits, start: Ints, count: Ints) -> Digits:
    """Return a digest of each job's rows of ``text`` (uint64[options, any]), uint64[jobs]."""
    if not len(start):
        return np.zeros(0, np.uint64)
    mix = np.random.default_rng(SEED).integers(1, 2**63, text.shape[1], dtype=np.uint64)
    digest = (text * mix).sum(axis=1, dtype=np.uint64)
    digest ^= digest >> np.uint64(29)
    place = np.arange(len(text)) - np.repeat(start, count)
    total: Digits = np.add.reduceat(digest * (2 * place + 1).astype(np.uint64), start)
    return total + count.astype(np.uint64)
