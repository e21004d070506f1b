"""The compiled loops of the bound on completion times: what each job buys at given prices.

Jobs buy seconds on Cells, in slots of time, each of which has prices. The last slot has no end, and
all that is sold in it is free. Jobs that may use the same Cells form a group. The equations are
those of docs/mathematics.md.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.kernels.jit import compile_lazily

PRICE, SAMPLES, SLOT, CORNER, BELOW = range(5)
"""The fields of a purchase: the price of a sample, the samples, their slot, and the two corners of the
slot's hull between which the Cells are mixed. ``BELOW`` is -1 for the origin."""


@compile_lazily
def fill_hulls(
    group_start: Ints,
    gpu_type: Ints,
    gpus: Ints,
    rate: Floats,
    price: Floats,
    hull: Floats,
    column: Ints,
    corners: Ints,
    cheapest: Ints,
) -> None:
    """Fill the lower hull of each group's columns in each slot, as points of rate and price (Eq. 48).

    The columns of a group are adjacent, by rising rates. ``price`` is float64[types, slots]. Filled
    are ``hull``, float64[groups, slots, corners, 2], by rising rates and without the origin;
    ``column``, int64[groups, slots, corners], of each corner; and ``corners``, int64[groups, slots],
    the number of corners. ``cheapest``, int64[groups, slots], is the column whose seconds have the
    lowest price.
    """
    for g in range(group_start.size - 1):
        for k in range(price.shape[1]):
            count, cheap = 0, group_start[g]
            least = np.inf
            for c in range(group_start[g], group_start[g + 1]):
                cost = gpus[c] * price[gpu_type[c], k]
                if cost < least:
                    cheap, least = c, cost
                if count > 0 and rate[c] == hull[g, k, count - 1, 0]:
                    if cost >= hull[g, k, count - 1, 1]:
                        continue
                    count -= 1
                # Drop corners that do not lie below the line from their predecessor to this point.
                while count > 0:
                    x, y = 0.0, 0.0
                    if count > 1:
                        x, y = hull[g, k, count - 2, 0], hull[g, k, count - 2, 1]
                    top_x, top_y = hull[g, k, count - 1, 0], hull[g, k, count - 1, 1]
                    if (top_y - y) * (rate[c] - x) < (cost - y) * (top_x - x):
                        break
                    count -= 1
                hull[g, k, count, 0], hull[g, k, count, 1] = rate[c], cost
                column[g, k, count] = c
                count += 1
            corners[g, k], cheapest[g, k] = count, cheap


@compile_lazily
def buy_in_slot(
    basket: Floats,
    size: int,
    samples: float,
    price: float,
    work: float,
    hull: Floats,
    corners: int,
    slot: int,
    length_s: float,
    second: float,
) -> tuple[int, float, float]:
    """Buy in one more slot what is cheaper than earlier purchases, or still missing (Eq. 47).

    ``basket`` has ``size`` purchases by rising price, with ``samples`` at ``price`` in total. No more
    than ``work`` is bought. A second in this slot costs ``second`` in addition to the Cell. Return
    the new size, samples and price.
    """
    # Seconds that have a price of their own are worth more on faster Cells: find where mixing begins.
    first, best = 0, np.inf
    for v in range(corners):
        each = (second + hull[v, 1]) / hull[v, 0]
        if each <= best:
            first, best = v, each
    for v in range(first, corners):
        width, each, below = hull[v, 0] * length_s, best, -1
        if v > first:
            gain = hull[v, 0] - hull[v - 1, 0]
            width, each, below = gain * length_s, (hull[v, 1] - hull[v - 1, 1]) / gain, v - 1
        if samples >= work and (size == 0 or each >= basket[size - 1, PRICE]):
            break  # further corners cost even more
        at = size
        while at > 0 and basket[at - 1, PRICE] > each:
            basket[at] = basket[at - 1]
            at -= 1
        basket[at, PRICE], basket[at, SAMPLES], basket[at, SLOT] = each, width, slot
        basket[at, CORNER], basket[at, BELOW] = v, below
        size, samples, price = size + 1, samples + width, price + width * each
        # Return the dearest samples beyond the work.
        while samples > work:
            excess, top = samples - work, basket[size - 1, SAMPLES]
            if top <= excess:
                size, samples = size - 1, samples - top
                price -= top * basket[size, PRICE]
            else:
                basket[size - 1, SAMPLES], samples = top - excess, work
                price -= excess * basket[size - 1, PRICE]
    return size, samples, price


@compile_lazily
def price_jobs(
    group: Ints,
    arrival_s: Floats,
    start_s: Floats,
    work: Floats,
    edge_s: Floats,
    hull: Floats,
    column: Ints,
    corners: Ints,
    cheapest: Ints,
    gpu_type: Ints,
    gpus: Ints,
    price: Floats,
    cost_s: Floats,
    usage: Floats,
) -> None:
    """Fill the least cost of each job (Eq. 46), and the GPU-seconds that all jobs then use.

    ``group``, ``arrival_s``, ``start_s`` and ``work`` (samples) are by job, as is ``cost_s``. A job
    whose group is -1 cannot run, and costs inf. Slot k begins at ``edge_s[k]``, and the last has no
    end. ``usage`` is float64[types, slots], to which is added.
    """
    slots, most = edge_s.size, hull.shape[2]
    basket, trial = np.empty((slots * most + 1, 5)), np.empty((slots * most + 1, 5))
    for j in range(group.size):
        cost_s[j] = np.inf
        g, ready_s = group[j], arrival_s[j] + start_s[j]
        if g < 0:
            continue
        begin = np.searchsorted(edge_s, arrival_s[j], side="right") - 1
        ready = np.searchsorted(edge_s, ready_s, side="right") - 1
        fastest = hull[g, slots - 1, corners[g, slots - 1] - 1, 0]
        end, started, cheap, least = -1, begin, begin, np.inf
        for k in range(begin, ready):
            c = cheapest[g, k]
            if gpus[c] * price[gpu_type[c], k] < least:
                cheap, least = k, gpus[c] * price[gpu_type[c], k]
        # Let the job end in each slot in turn. Earlier slots are bought without a price of time.
        size, samples, paid = 0, 0.0, 0.0
        for k in range(ready, slots):
            from_s = max(edge_s[k], ready_s)
            if from_s - arrival_s[j] >= cost_s[j]:
                break
            c = cheapest[g, k]
            if gpus[c] * price[gpu_type[c], k] < least:
                cheap, least = k, gpus[c] * price[gpu_type[c], k]
            length_s = work[j] / fastest
            if k + 1 < slots:
                length_s = edge_s[k + 1] - from_s
            trial[:size] = basket[:size]
            _, enough, whole = buy_in_slot(
                trial, size, samples, paid, work[j], hull[g, k], corners[g, k], k, length_s, 1.0
            )
            if k + 1 == slots or enough >= work[j]:
                cost = from_s - arrival_s[j] + start_s[j] * least + whole
                if cost < cost_s[j]:
                    cost_s[j], end, started = cost, k, cheap
            size, samples, paid = buy_in_slot(
                basket, size, samples, paid, work[j], hull[g, k], corners[g, k], k, length_s, 0.0
            )
        # Buy once more for the best end, and count the GPU-seconds.
        size, samples, paid = 0, 0.0, 0.0
        for k in range(ready, end + 1):
            from_s, second, length_s = max(edge_s[k], ready_s), 0.0, work[j] / fastest
            if k + 1 < slots:
                length_s = edge_s[k + 1] - from_s
            if k == end:
                second = 1.0
            size, samples, paid = buy_in_slot(
                basket, size, samples, paid, work[j], hull[g, k], corners[g, k], k, length_s, second
            )
        c = cheapest[g, started]
        usage[gpu_type[c], started] += start_s[j] * gpus[c]
        for e in range(size):
            k, v, b = int(basket[e, SLOT]), int(basket[e, CORNER]), int(basket[e, BELOW])
            c, below = column[g, k, v], 0.0
            if b >= 0:
                below = hull[g, k, b, 0]
            seconds = basket[e, SAMPLES] / (hull[g, k, v, 0] - below)
            usage[gpu_type[c], k] += seconds * gpus[c]
            if b >= 0:
                c = column[g, k, b]
                usage[gpu_type[c], k] -= seconds * gpus[c]
