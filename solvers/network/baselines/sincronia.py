"""Sincronia (SIGCOMM'18): an order of coflows by bottleneck, select, scale, iterate (BSSI).

A job's coflow is the traffic of one iteration, and a port is a link. Paths are those of ECMP, since
Sincronia chooses none.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.baselines.levels import alone_then_rest, contended_first

_LEAST_S: Final = float(np.finfo(np.float64).tiny)
"""The least load of a link with unplaced jobs, so that it is busier than one without."""


def bssi_order(demand: LinkDemand, weight: Floats | None = None) -> Ints:
    """Return the jobs in the order of BSSI, the first to be served first, (J,).

    Places are filled from the last to the first. The job with the least weight for its time on the
    busiest link takes the place, and the weights of the others there shrink by its share. In this
    order, weighted completion times add up to at most 4 times the minimum (their theorem). Ties go
    to the lower link; of equal jobs, the one of higher index is served later. Jobs without traffic
    come last. ``weight`` is (J,), or 1 for all if None.
    """
    by_link = np.argsort(demand.link, kind="stable")
    job, busy_s = demand.job[by_link], demand.busy_s[by_link]
    first = np.searchsorted(demand.link[by_link], np.arange(demand.links + 1))
    waiting = np.diff(first)  # the number of unplaced jobs of each link
    load_s = np.bincount(demand.link, demand.busy_s, demand.links).astype(np.float64)
    left = np.ones(demand.jobs) if weight is None else weight.astype(np.float64)
    sends = np.diff(demand.link_start) > 0
    order = np.concatenate([np.zeros(sends.sum(), dtype=np.int64), np.flatnonzero(~sends)])
    unplaced = sends.copy()
    for place in range(int(sends.sum()) - 1, -1, -1):
        busiest = int(load_s.argmax())
        on_link = slice(first[busiest], first[busiest + 1])
        still = unplaced[job[on_link]]
        there, time_s = job[on_link][still], busy_s[on_link][still]
        weight_per_s = left[there] / time_s
        at = len(weight_per_s) - 1 - int(weight_per_s[::-1].argmin())
        last = int(there[at])
        left[there] = np.maximum(left[there] - weight_per_s[at] * time_s, 0)
        order[place], unplaced[last] = last, False
        gone = slice(*demand.link_start[last : last + 2])
        links = demand.link[gone]
        waiting[links] -= 1
        rest_s = np.maximum(load_s[links] - demand.busy_s[gone], _LEAST_S)
        # The load is exactly 0 without unplaced jobs, despite rounding.
        load_s[links] = np.where(waiting[links] > 0, rest_s, 0.0)
    return order


def plan(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return ECMP's paths and priority levels by BSSI.

    The first jobs have a level each, and the rest share the last one.
    """
    chosen = hash_bundles(contention, seed)
    demand = demand_of(contention, chosen)
    order, ranked = contended_first(demand, bssi_order(demand))
    priority = np.empty(len(order))
    priority[order] = np.arange(len(order), 0, -1)
    return NetworkPlan(
        chosen=chosen,
        priority=priority,
        order=order,
        level=alone_then_rest(order, ranked, levels),
        levels=levels,
    )
