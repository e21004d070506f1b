"""The compiled loops of prices on slots: what each job's cheapest schedule costs at least.

Jobs with the same options form a group. For each group and slot, the options are a set of points of
rate and price. A job pays at least what mixtures of these points cost, because a schedule that runs
one option in each slot is such a mixture. The equations are those of docs/mathematics.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily


class SlotMarket(NamedTuple):
    """Groups of jobs, with the options of each group by rising rate, and the slots.

    Jobs are ordered by group: those of group g are ``job_start[g] : job_start[g + 1]``.
    """

    option_start: Ints  # int64[groups + 1]
    kind: Ints  # int64[options], GPU type
    use: Ints  # int64[options, resources]
    rate: Floats  # float64[options], samples/s, above 0
    job_start: Ints  # int64[groups + 1]
    work: Floats  # float64[jobs], samples that a schedule trains at least
    restart_s: Floats  # float64[jobs], seconds of a start that the schedule pays at least
    deadline_s: Floats  # float64[jobs]
    last: Ints  # int64[jobs], the number of slots that begin before the deadline
    weight: Floats  # float64[jobs]
    must: Bools  # bool[jobs], whether the job buys at any price
    boundary_s: Floats  # float64[slots + 1]
    capacity: Ints  # int64[resources, slots]
    types: int
    whole: bool  # whether schedules take whole slots


class GroupTables(NamedTuple):
    """The options of a group at given prices, in each slot; room for the largest group."""

    suffix: Floats  # float64[slots, options + 1], least price of the options from each on
    suffix_at: Ints  # int64[slots, options + 1], the option that has it
    hull_rate: Floats  # float64[slots, options], corners of the lower hull, from the origin
    hull_price: Floats
    hull_at: Ints
    corners: Ints  # int64[slots]


class Segments(NamedTuple):
    """The parts of the hulls of all slots that a job may buy."""

    each: Floats  # price of a sample
    samples: Floats
    slot: Ints
    corner: Ints


@compile_lazily
def fill_tables(m: SlotMarket, g: int, slots: int, price: Floats, t: GroupTables) -> None:
    """Fill the tables of group ``g`` for the first ``slots`` slots (Eq. 28c)."""
    start = m.option_start[g]
    count = m.option_start[g + 1] - start
    for k in range(slots):
        t.suffix[k, count], t.suffix_at[k, count] = np.inf, -1
        for i in range(count - 1, -1, -1):
            o = start + i
            kind = m.kind[o]
            fits, paid = m.use[o, kind] <= m.capacity[kind, k], m.use[o, kind] * price[kind, k]
            for r in range(m.types, m.capacity.shape[0]):
                fits = fits and m.use[o, r] <= m.capacity[r, k]
                paid += m.use[o, r] * price[r, k]
            t.suffix[k, i], t.suffix_at[k, i] = t.suffix[k, i + 1], t.suffix_at[k, i + 1]
            # Until the hull is built, its price is that of option i.
            t.hull_price[k, i] = np.inf
            if fits:
                t.hull_price[k, i] = paid
                if paid < t.suffix[k, i]:
                    t.suffix[k, i], t.suffix_at[k, i] = paid, o
        size = 0
        for i in range(count):
            x, y = m.rate[start + i], t.hull_price[k, i]
            if y == np.inf:
                continue
            if size > 0 and x == t.hull_rate[k, size - 1]:
                if y >= t.hull_price[k, size - 1]:
                    continue
                size -= 1
            while size > 0:
                left, low = 0.0, 0.0
                if size > 1:
                    left, low = t.hull_rate[k, size - 2], t.hull_price[k, size - 2]
                top, high = t.hull_rate[k, size - 1], t.hull_price[k, size - 1]
                if (high - low) * (x - left) < (y - low) * (top - left):
                    break
                size -= 1
            t.hull_rate[k, size], t.hull_price[k, size] = x, y
            t.hull_at[k, size] = start + i
            size += 1
        t.corners[k] = size


@compile_lazily
def seconds_before(m: SlotMarket, job: int, slot: int) -> float:
    """Return the seconds of ``slot`` before the deadline of ``job``."""
    return float(min(m.boundary_s[slot + 1], m.deadline_s[job]) - m.boundary_s[slot])


@compile_lazily
def cheapest_single_slot(m: SlotMarket, g: int, job: int, t: GroupTables) -> tuple[float, int, int]:
    """Return the least price of a schedule in one slot, its slot, and its option."""
    start = m.option_start[g]
    count = m.option_start[g + 1] - start
    best, at, which = np.inf, -1, -1
    for k in range(m.last[job]):
        seconds = seconds_before(m, job, k) - m.restart_s[job]
        if t.suffix[k, 0] >= best or m.rate[start + count - 1] * seconds < m.work[job]:
            continue
        low, high = 0, count - 1
        while low < high:
            middle = (low + high) // 2
            if m.rate[start + middle] * seconds >= m.work[job]:
                high = middle
            else:
                low = middle + 1
        if t.suffix[k, low] < best:
            best, at, which = t.suffix[k, low], k, t.suffix_at[k, low]
    return best, at, which


@compile_lazily
def list_segments(m: SlotMarket, job: int, t: GroupTables, s: Segments) -> tuple[int, float]:
    """Fill the segments that ``job`` may buy; return their number and samples."""
    count, total = 0, 0.0
    for k in range(m.last[job]):
        seconds, left, low = seconds_before(m, job, k), 0.0, 0.0
        for c in range(t.corners[k]):
            width = (t.hull_rate[k, c] - left) * seconds
            if width > 0.0:
                s.each[count], s.samples[count] = (t.hull_price[k, c] - low) / width, width
                s.slot[count], s.corner[count] = k, c
                total += width
                count += 1
            left, low = t.hull_rate[k, c], t.hull_price[k, c]
    return count, total


@compile_lazily
def swap_segments(s: Segments, i: int, j: int) -> None:
    """Swap two segments."""
    s.each[i], s.each[j] = s.each[j], s.each[i]
    s.samples[i], s.samples[j] = s.samples[j], s.samples[i]
    s.slot[i], s.slot[j] = s.slot[j], s.slot[i]
    s.corner[i], s.corner[j] = s.corner[j], s.corner[i]


@compile_lazily
def select_cheapest(s: Segments, count: int, work: float) -> int:
    """Move the cheapest segments that hold ``work`` samples to the front; return their number.

    The last of them is the dearest. The segments hold at least ``work`` in total.
    """
    begin, end, missing = 0, count, work
    while end - begin > 1:
        middle = (begin + end) // 2
        pivot = s.each[middle]
        swap_segments(s, middle, end - 1)
        low, samples = begin, 0.0
        for i in range(begin, end - 1):
            if s.each[i] < pivot:
                samples += s.samples[i]
                swap_segments(s, i, low)
                low += 1
        swap_segments(s, low, end - 1)
        if samples >= missing and low > begin:
            end = low
        elif samples + s.samples[low] >= missing or low + 1 == end:
            return low + 1
        else:
            missing -= samples + s.samples[low]
            begin = low + 1
    return begin + 1


@compile_lazily
def cheapest_start(m: SlotMarket, job: int, t: GroupTables) -> tuple[float, int, float, int, int]:
    """Return the least price of a second with its slot, and the two cheapest slots.

    The third value is the price of the two cheapest slots together.
    """
    second, at = np.inf, -1
    first, next_ = np.inf, np.inf
    first_at, next_at = -1, -1
    for k in range(m.last[job]):
        paid = t.suffix[k, 0]
        each = paid / (m.boundary_s[k + 1] - m.boundary_s[k])
        if each < second:
            second, at = each, k
        if paid < first:
            next_, next_at = first, first_at
            first, first_at = paid, k
        elif paid < next_:
            next_, next_at = paid, k
    return second, at, first + next_, first_at, next_at


@compile_lazily
def count_use(m: SlotMarket, option: int, slot: int, share: float, usage: Floats) -> None:
    """Add ``share`` of what ``option`` uses to ``usage`` in ``slot``."""
    kind = m.kind[option]
    usage[kind, slot] += share * m.use[option, kind]
    for r in range(m.types, usage.shape[0]):
        usage[r, slot] += share * m.use[option, r]


@compile_lazily
def count_mixture(
    m: SlotMarket, job: int, t: GroupTables, s: Segments, bought: int, usage: Floats
) -> None:
    """Add what the first ``bought`` segments use to ``usage``; the last is bought in part."""
    missing = m.work[job]
    for i in range(bought):
        k, c = s.slot[i], s.corner[i]
        share = 1.0
        if i == bought - 1:
            share = max(0.0, min(1.0, missing / s.samples[i]))
        missing -= s.samples[i]
        count_use(m, t.hull_at[k, c], k, share, usage)
        if c > 0:
            count_use(m, t.hull_at[k, c - 1], k, -share, usage)


@compile_lazily
def make_room(m: SlotMarket) -> tuple[GroupTables, Segments]:
    """Return room for the tables of the largest group and for the segments of a job."""
    slots, most = m.capacity.shape[1], 1
    for g in range(len(m.job_start) - 1):
        most = max(most, m.option_start[g + 1] - m.option_start[g])
    tables = GroupTables(
        np.empty((slots, most + 1)),
        np.empty((slots, most + 1), np.int64),
        np.empty((slots, most)),
        np.empty((slots, most)),
        np.empty((slots, most), np.int64),
        np.empty(slots, np.int64),
    )
    room = slots * most
    segments = Segments(
        np.empty(room), np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64)
    )
    return tables, segments


@compile_lazily
def price_group(
    m: SlotMarket, g: int, price: Floats, t: GroupTables, s: Segments, cost: Floats, usage: Floats
) -> float:
    """Do as ``price_schedules`` for the jobs of group ``g``, and add to ``usage``."""
    longest, gain = 0, 0.0
    for j in range(m.job_start[g], m.job_start[g + 1]):
        longest = max(longest, m.last[j])
    fill_tables(m, g, longest, price, t)
    for j in range(m.job_start[g], m.job_start[g + 1]):
        # Find the least price of a schedule in one slot, and of a mixture over several.
        one, one_at, option = np.inf, -1, -1
        if m.whole:
            one, one_at, option = cheapest_single_slot(m, g, j, t)
        count, samples = list_segments(m, j, t, s)
        bought, several, two = 0, np.inf, False
        second, start_at, pair, first_at, next_at = cheapest_start(m, j, t)
        if samples >= m.work[j] and count > 0:
            bought, several, missing = select_cheapest(s, count, m.work[j]), 0.0, m.work[j]
            for i in range(bought):
                several += s.each[i] * min(s.samples[i], max(missing, 0.0))
                missing -= s.samples[i]
            several += m.restart_s[j] * second
            two = m.whole and pair > several
            if two:
                several = pair
        cost[j] = min(one, several)
        profit = -cost[j]
        if not m.must[j]:
            profit += m.weight[j]
        # A promise for which no schedule is known is not counted.
        if cost[j] == np.inf or (profit <= 0.0 and not m.must[j]):
            continue
        gain += profit
        # Count what the job buys.
        if one <= several:
            count_use(m, option, one_at, 1.0, usage)
        elif two:
            count_use(m, t.suffix_at[first_at, 0], first_at, 1.0, usage)
            count_use(m, t.suffix_at[next_at, 0], next_at, 1.0, usage)
        else:
            count_mixture(m, j, t, s, bought, usage)
            share = m.restart_s[j] / (m.boundary_s[start_at + 1] - m.boundary_s[start_at])
            count_use(m, t.suffix_at[start_at, 0], start_at, share, usage)
    return gain


@compile_lazily
def price_schedules(m: SlotMarket, price: Floats, cost: Floats, usage: Floats) -> float:
    """Fill the least price of each job's schedules, and return the sum of what the jobs gain.

    A job gains its weight less this price if that is positive, and buys nothing otherwise; a job
    that must buy gains the negative price. ``cost`` is float64[jobs], and inf if no schedule
    exists. ``usage`` (float64[resources, slots]) is filled with what the jobs buy (Eqs. 28b, 28c).
    """
    t, s = make_room(m)
    gain = 0.0
    usage[:] = 0.0
    for g in range(len(m.job_start) - 1):
        gain += price_group(m, g, price, t, s, cost, usage)
    return gain


@compile_lazily
def trade_by_group(
    m: SlotMarket, order: Ints, share: Floats, step: Floats, price: Floats, total: Floats
) -> None:
    """Change ``price`` after each group of ``order`` by what its jobs buy, and add it to ``total``.

    A group is offered ``share`` (float64[groups]) of the capacity. ``step`` is float64[resources,
    slots], the change of the price for each unit that is bought beyond the offer. This is an
    incremental subgradient method (Nedic and Bertsekas 2001).
    """
    t, s = make_room(m)
    cost, usage = np.empty(len(m.work)), np.zeros(price.shape)
    for g in order:
        usage[:] = 0.0
        price_group(m, g, price, t, s, cost, usage)
        for r in range(price.shape[0]):
            for k in range(price.shape[1]):
                change = usage[r, k] - share[g] * m.capacity[r, k]
                price[r, k] = max(0.0, price[r, k] + step[r, k] * change)
                total[r, k] += price[r, k]
