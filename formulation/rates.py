"""What jobs are measured against: reference rates, restart shares, weights. All float64[jobs]."""

from __future__ import annotations

import numpy as np

from formulation.cells import Cells
from formulation.errors import ProblemTooLarge
from formulation.policy import Policy
from formulation.snapshot import Snapshot
from formulation.tables import Floats


def work_left(snapshot: Snapshot) -> Floats:
    """Return the samples that each job still has to train."""
    return snapshot.jobs.iterations_left * snapshot.global_batch


def effective_weight(snapshot: Snapshot, policy: Policy) -> Floats:
    """Return each job's weight times its tenant's and its queue's (Eq. 9).

    Raises:
        ProblemTooLarge: a product is not finite.
    """
    jobs, tenants = snapshot.jobs, snapshot.tenants
    weight = np.array(jobs.weight)
    with np.errstate(over="ignore"):
        if len(tenants):
            by_name = dict(zip(tenants.name, tenants.weight.tolist(), strict=True))
            weight *= np.array([by_name.get(name, 1.0) for name in jobs.tenant])
        for queue, factor in policy.weight_of_queue.items():
            weight[jobs.queue == queue] *= factor
    if not np.isfinite(weight).all():
        raise ProblemTooLarge(
            "weight", "a job's, its tenant's and its queue's multiply to infinity"
        )
    return weight


def reference_rate(snapshot: Snapshot, cells: Cells) -> Floats:
    """Return what each job's rate is measured against, samples/s, float64[jobs] (Eq. 6).

    The best rate at its requested count on any type; its best of all where no Cell has that count;
    NaN where it has no Cell.
    """
    jobs = snapshot.jobs
    stride = 1 + max(cells.gpus.max(initial=0), jobs.requested_gpus.max(initial=0))
    key = cells.workload * stride + cells.gpus
    fastest = np.ones(len(cells), dtype=np.bool_)  # of its workload, type and count: the first is
    fastest[1:] = (key[1:] != key[:-1]) | (cells.gpu_type[1:] != cells.gpu_type[:-1])
    key, workload, rate = key[fastest], cells.workload[fastest], cells.rate[fastest]
    best = np.zeros(len(snapshot.workloads))
    np.maximum.at(best, workload, rate)
    order = np.argsort(key, kind="stable")
    unique, first = np.unique(key[order], return_index=True)
    at_count = np.maximum.reduceat(rate[order], first) if len(first) else np.zeros(0)
    wanted = jobs.workload * stride + jobs.requested_gpus
    where = np.searchsorted(unique, wanted)
    hit = where < len(unique)
    hit[hit] = unique[where[hit]] == wanted[hit]
    found = best[jobs.workload] if len(jobs) else np.zeros(0)
    found[hit] = at_count[where[hit]]
    return np.where(found > 0, found, np.nan)


def restart_share(snapshot: Snapshot, reference: Floats, policy: Policy) -> Floats:
    """Return the share of a Cell's value that a start, move or resize costs, float64[jobs] (Eq. 7).

    Restart seconds over the horizon: the lesser of the policy's and the job's remaining time at its
    reference rate. One horizon a job, so that a faster Cell is never worth less for finishing sooner.
    """
    jobs = snapshot.jobs
    remaining_s = work_left(snapshot) / reference
    horizon_s = np.minimum(policy.restart_horizon_s, np.nan_to_num(remaining_s, nan=np.inf))
    with np.errstate(divide="ignore"):
        return np.minimum(policy.max_restart_share, jobs.restart_s / np.maximum(horizon_s, 1e-9))
