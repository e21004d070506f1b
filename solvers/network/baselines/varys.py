"""Varys (SIGCOMM'14): the coflow with the smallest effective bottleneck first (SEBF).

Paths are those of ECMP.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.network.contention import Contention, LinkDemand, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Ints
from tessera.solvers.network.baselines.ecmp import hash_bundles
from tessera.solvers.network.baselines.levels import contended_first, equal_blocks


def sebf_order(demand: LinkDemand) -> Ints:
    """Return the jobs by rising bottleneck, ties by index, (J,); jobs without traffic come last."""
    slowest_s = demand.send_s
    return np.argsort(np.where(slowest_s > 0, slowest_s, np.inf), kind="stable")


def plan(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return ECMP's paths, and priority levels by SEBF in equal blocks."""
    chosen = hash_bundles(contention, seed)
    demand = demand_of(contention, chosen)
    order, ranked = contended_first(demand, sebf_order(demand))
    slowest_s = demand.send_s
    priority = np.full(demand.jobs, np.inf)
    np.divide(1.0, slowest_s, out=priority, where=slowest_s > 0)
    return NetworkPlan(
        chosen=chosen,
        priority=priority,
        order=order,
        level=equal_blocks(order, ranked, levels),
        levels=levels,
    )
