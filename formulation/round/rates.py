"""Measures of jobs: effective GPUs, expected and requested rates, restart shares, weights."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.errors import ProblemTooLarge
from tessera.formulation.base.tables import Floats, begins_group
from tessera.formulation.round.fair_share import fair_share_factors
from tessera.formulation.round.policy import Policy
from tessera.formulation.state.cells import Cells, find_most_compact
from tessera.formulation.state.hierarchy import weights_of_tenants
from tessera.formulation.state.snapshot import Snapshot


def work_left(snapshot: Snapshot) -> Floats:
    """Return the samples that each job still has to train."""
    return snapshot.jobs.iterations_left * snapshot.global_batch


def effective_weight(snapshot: Snapshot, policy: Policy) -> Floats:
    """Return each job's weight times its tenant's and its priority's (Eq. 9).

    A tenant's weight counts together with those of all tenants above it. Under ``fair_share``, it is
    replaced by the factor of the tenant's fair share (Eq. 9f).

    Raises:
        ProblemTooLarge: a product is not finite.
        InvalidInput: the policy needs use that the snapshot does not have.
    """
    jobs, tenants = snapshot.jobs, snapshot.tenants
    weight = np.array(jobs.weight)
    with np.errstate(over="ignore"):
        if policy.fair_share:
            weight *= fair_share_factors(snapshot, policy)
        elif len(tenants):
            by_name = weights_of_tenants(snapshot)
            weight *= np.array([by_name.get(name, 1.0) for name in jobs.tenant])
        for priority, factor in policy.weight_of_priority.items():
            weight[jobs.priority == priority] *= factor
    if not np.isfinite(weight).all():
        raise ProblemTooLarge(
            "weight",
            "a job's weight times its tenant's and its priority's is not finite; lower one of them",
        )
    return weight


def unit_rate(snapshot: Snapshot, cells: Cells) -> Floats:
    """Return the rate of one effective GPU of each job, samples/s, float64[jobs] (Eq. 6).

        u_j = max { r_c / n_c : c a Cell of j's workload }

    ``n`` GPUs at the workload's most efficient Cell give a rate of ``n * u_j``. It depends on the
    workload alone, never on the job's request. It is NaN for a job without Cells. Sia (SOSP'23,
    section 3.4) normalizes rates by the GPU for the same reason.

    A job of unknown rate has one Cell and is assumed to reach its efficiency there (Eq. 6e).
    """
    best = np.zeros(len(snapshot.workloads))
    np.maximum.at(best, cells.workload, cells.rate / cells.gpus)
    efficiency = snapshot.jobs.assumed_efficiency
    return _by_job(snapshot, best) / np.where(np.isnan(efficiency), 1.0, efficiency)


def expected_rate(snapshot: Snapshot, cells: Cells, weight: Floats) -> Floats:
    """Return the rate that each job may expect, samples/s, float64[jobs] (Eq. 6b).

        g_j = max { r_c : c a Cell of j's workload, n_c <= max(1, G / J) }

    ``G`` is the number of schedulable GPUs and ``J`` the number of jobs that may run and have a
    ``weight`` (float64[jobs], Eq. 9). A workload without a Cell that small has the best rate of its
    smallest GPU count. It is NaN for a job without Cells.
    """
    may_run = snapshot.jobs.may_run() & ~snapshot.profiling() & (weight > 0)
    share = max(1, int(snapshot.schedulable_gpus().sum()) // max(1, int(may_run.sum())))
    smallest = np.full(len(snapshot.workloads), np.iinfo(np.int64).max)
    np.minimum.at(smallest, cells.workload, cells.gpus)
    fits = cells.gpus <= np.maximum(share, smallest)[cells.workload]
    best = np.zeros(len(snapshot.workloads))
    np.maximum.at(best, cells.workload[fits], cells.rate[fits])
    return _by_job(snapshot, best)


def _by_job(snapshot: Snapshot, of_workload: Floats) -> Floats:
    """Return the workload's number for each job, NaN where it is 0."""
    rate = of_workload[snapshot.jobs.workload] if len(snapshot.jobs) else np.zeros(0)
    return np.where(rate > 0, rate, np.nan)


def requested_rate(snapshot: Snapshot, cells: Cells) -> Floats:
    """Return the best rate that each job's request allows, samples/s, float64[jobs] (Eq. 6c).

    It is the best rate at the requested GPU count on any type, or the best rate of all if no Cell
    has that count. Only Cells on the fewest nodes count, as in Eq. 32. It is NaN for a job without
    Cells. Published schedulers and metrics measure against it. A job's value never depends on it,
    because asking for less would then make a job worth more.
    """
    jobs = snapshot.jobs
    stride = 1 + max(cells.gpus.max(initial=0), jobs.requested_gpus.max(initial=0))
    compact = np.flatnonzero(find_most_compact(cells))
    key, gpu_type = cells.workload[compact] * stride + cells.gpus[compact], cells.gpu_type[compact]
    # Cells are sorted, so the first of each workload, type and count is the fastest.
    fastest = begins_group(key, gpu_type)
    key, compact = key[fastest], compact[fastest]
    workload, rate = cells.workload[compact], cells.rate[compact]
    # The best rates of each workload, and of each workload and count, over all types.
    best = np.zeros(len(snapshot.workloads))
    np.maximum.at(best, workload, rate)
    order = np.argsort(key, kind="stable")
    unique, first = np.unique(key[order], return_index=True)
    at_count = np.maximum.reduceat(rate[order], first) if len(first) else np.zeros(0)
    # A job whose count has no Cell keeps the best rate of its workload.
    wanted = jobs.workload * stride + jobs.requested_gpus
    where = np.searchsorted(unique, wanted)
    hit = where < len(unique)
    hit[hit] = unique[where[hit]] == wanted[hit]
    requested = best[jobs.workload] if len(jobs) else np.zeros(0)
    requested[hit] = at_count[where[hit]]
    return np.where(requested > 0, requested, np.nan)


def restart_share(snapshot: Snapshot, expected: Floats, policy: Policy) -> Floats:
    """Return the share of a Cell's value that a start, move or resize costs, float64[jobs] (Eq. 7).

    The share is the restart seconds divided by a horizon: the policy's, or the job's remaining time
    at the rate ``expected`` (float64[jobs], samples/s) if that is shorter. Each job has one
    horizon, so that a faster Cell is never worth less because it finishes sooner.
    """
    jobs = snapshot.jobs
    remaining_s = work_left(snapshot) / expected
    horizon_s = np.minimum(policy.restart_horizon_s, np.nan_to_num(remaining_s, nan=np.inf))
    with np.errstate(divide="ignore"):
        return np.minimum(policy.max_restart_share, jobs.restart_s / np.maximum(horizon_s, 1e-9))
