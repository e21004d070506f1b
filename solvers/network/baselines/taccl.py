"""TACCL* (Crux, footnote 3): what TACCL would do for several jobs, without regard to intensity.

Jobs choose the least congested paths as they arrive, and traffic that goes further is served first.
"""

from __future__ import annotations

import numpy as np

from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.base.tables import Floats, Ints
from tessera.solvers.network.baselines.levels import contended_first, equal_blocks
from tessera.solvers.network.paths import select_paths


def bundle_distances(contention: Contention, chosen: Ints) -> tuple[Floats, Floats]:
    """Return the largest and the mean number of links that a job's bundles cross, (J,) each.

    Links that all candidates of a bundle share are not counted; a job without a choice has 0.
    """
    c = contention
    sends = c.bundle_bytes > 0
    path = c.candidate[c.candidate_start[:-1] + chosen]
    hops, job = np.diff(c.path_start)[path][sends].astype(np.float64), c.bundle_job[sends]
    most = np.zeros(len(c.jobs))
    np.maximum.at(most, job, hops)
    count = np.bincount(job, minlength=len(c.jobs))
    mean = np.bincount(job, weights=hops, minlength=len(c.jobs)) / np.maximum(count, 1)
    return most, mean


def plan(contention: Contention, *, levels: int, seed: int = 0) -> NetworkPlan:
    """Return paths chosen in order of arrival (the order of jobs) and priority levels by distance.

    Levels are equal blocks of the order; jobs at equal distances share one.
    """
    jobs = len(contention.jobs)
    chosen = select_paths(contention, np.arange(jobs, dtype=np.int64))
    most, mean = bundle_distances(contention, chosen)
    by_distance = np.lexsort((-mean, -most))
    order, ranked = contended_first(demand_of(contention, chosen), by_distance)
    tied = np.zeros(jobs, dtype=np.bool_)
    tied[1:] = (np.diff(most[order]) == 0) & (np.diff(mean[order]) == 0)
    return NetworkPlan(
        chosen=chosen,
        priority=most + mean / (most.max(initial=0) + 1),
        order=order,
        level=equal_blocks(order, ranked, levels, tied),
        levels=levels,
    )
