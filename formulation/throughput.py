"""The throughput objective and the building of its problem.

Arena Eq. 5 maximises the sum of throughputs over jobs; here each is weighted and normalised
(Eq. 5 to 7 of ``formulation/README.md``), since raw samples/s favour small models.
"""

from __future__ import annotations

import numpy as np

from formulation.cells import Cells, build_cells, undominated
from formulation.lifecycle import SCHEDULABLE, JobState
from formulation.policy import Policy
from formulation.problem import VALUE_SCALE, Problem, Row, scaled
from formulation.snapshot import STATE_CODE, Snapshot
from formulation.tables import Bools, Floats, Ints, ranges


def build_problem(snapshot: Snapshot, policy: Policy) -> Problem:
    """State the round: one column for each undominated Cell of each job that may run.

    The Cell that a job runs on stays a column even where another dominates it, because keeping it
    costs no restart. Columns larger than the cluster are absent (see ``formulation.explain``).
    """
    cells = build_cells(snapshot)
    job_start, cell, current = _columns(snapshot, cells)
    jobs = np.repeat(np.arange(len(snapshot.jobs), dtype=np.int64), np.diff(job_start))
    reference = reference_rate(snapshot, cells)
    share = restart_share(snapshot, reference, policy)
    unit_of = np.ones(len(reference)) if policy.raw_throughput else reference
    with np.errstate(invalid="ignore"):
        gross = snapshot.jobs.weight[jobs] * cells.rate[cell] / unit_of[jobs]
    starts = np.ones(len(cell), dtype=np.bool_)
    starts[current[current >= 0]] = False
    price = np.where(starts, gross * share[jobs], 0.0)
    # raw samples/s are a thousand times larger than normalised rates
    scale = VALUE_SCALE / 1000 if policy.raw_throughput else VALUE_SCALE
    whole, taken_off = scaled(gross, scale), scaled(price, scale)
    capacity = snapshot.schedulable_gpus()
    return Problem(
        jobs=snapshot.jobs.name, job_start=job_start, cells=cells, plans=snapshot.plans, cell=cell,
        value=whole - taken_off, restart_price=taken_off, scale=float(scale),
        unit="samples/s" if policy.raw_throughput else "normalised throughput",
        rows=tuple(
            Row(name=f"gpus/{t.name}", capacity=int(n))
            for t, n in zip(snapshot.gpu_types, capacity, strict=True)
        ),
        usage_start=np.arange(len(cell) + 1, dtype=np.int64),
        row=cells.gpu_type[cell], amount=cells.gpus[cell],
        must_run=_promised(snapshot) & (np.diff(job_start) > 0), current=current,
        restart_share=share, weight=snapshot.jobs.weight,
    )  # fmt: skip


def reference_rate(snapshot: Snapshot, cells: Cells) -> Floats:
    """Return what each job's rate is measured against, samples/s, float64[jobs] (Eq. 6).

    The best rate at its requested count on any type; its best of all where no Cell has that count;
    NaN where it has no Cell.
    """
    jobs = snapshot.jobs
    best = np.zeros(len(snapshot.workloads))
    np.maximum.at(best, cells.workload, cells.rate)
    order = np.lexsort((cells.gpus, cells.workload))
    stride = 1 + max(cells.gpus.max(initial=0), jobs.requested_gpus.max(initial=0))
    key = cells.workload[order] * stride + cells.gpus[order]
    unique, first = np.unique(key, return_index=True)
    at_count = np.maximum.reduceat(cells.rate[order], first) if len(first) else np.zeros(0)
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
    batch = np.array([w.global_batch for w in snapshot.workloads], dtype=np.float64)
    remaining_s = jobs.iterations_left * batch[jobs.workload] / reference
    horizon_s = np.minimum(policy.restart_horizon_s, np.nan_to_num(remaining_s, nan=np.inf))
    with np.errstate(divide="ignore"):
        return np.minimum(policy.max_restart_share, jobs.restart_s / np.maximum(horizon_s, 1e-9))


def _columns(snapshot: Snapshot, cells: Cells) -> tuple[Ints, Ints, Ints]:
    """Return (job_start, cell of each column, current column of each job)."""
    jobs = snapshot.jobs
    keep = np.flatnonzero(undominated(cells))
    first = np.searchsorted(cells.workload[keep], jobs.workload)
    count = np.searchsorted(cells.workload[keep], jobs.workload, side="right") - first
    count = np.where(_schedulable(snapshot), count, 0)
    kept = keep[ranges(first, count)] if len(keep) else np.zeros(0, np.int64)
    owner = np.repeat(np.arange(len(jobs), dtype=np.int64), count)
    running = _current_cell(snapshot, cells)
    absent = running >= 0
    absent[owner[kept == running[owner]]] = False
    extra = np.flatnonzero(absent)
    owner, kept = np.concatenate([owner, extra]), np.concatenate([kept, running[extra]])
    order = np.lexsort((kept, owner))
    owner, kept = owner[order], kept[order]
    job_start = np.searchsorted(owner, np.arange(len(jobs) + 1))
    current = np.full(len(jobs), -1, dtype=np.int64)
    is_current = np.flatnonzero(kept == running[owner])
    current[owner[is_current]] = is_current
    return job_start.astype(np.int64), kept, current


def _schedulable(snapshot: Snapshot) -> Bools:
    codes = [STATE_CODE[state] for state in SCHEDULABLE]
    return np.isin(snapshot.jobs.state, codes)


def _promised(snapshot: Snapshot) -> Bools:
    """Return which jobs must run: guaranteed ones that were launched (Morphling section 5.1)."""
    active = [STATE_CODE[JobState.STARTING], STATE_CODE[JobState.RUNNING]]
    return snapshot.jobs.guaranteed & np.isin(snapshot.jobs.state, active)


def _current_cell(snapshot: Snapshot, cells: Cells) -> Ints:
    """Return the Cell that each job can stay on as it is, int64[jobs]; -1: none.

    A job with a GPU on an unschedulable node cannot stay: wherever it goes, it restarts.
    """
    jobs = snapshot.jobs
    found = np.full(len(jobs), -1, dtype=np.int64)
    stays = (jobs.current_gpus > 0) & ~snapshot.disturbed() & _schedulable(snapshot)
    first = np.searchsorted(cells.workload, jobs.workload)
    last = np.searchsorted(cells.workload, jobs.workload, side="right")
    for j in np.flatnonzero(stays).tolist():
        span = slice(int(first[j]), int(last[j]))
        match = np.flatnonzero(
            (cells.gpu_type[span] == jobs.current_type[j])
            & (cells.gpus[span] == jobs.current_gpus[j])
            & (cells.pipeline_degree[span] == jobs.current_degree[j])
            & (cells.plan[span] == jobs.current_plan[j])
        )
        if len(match):
            found[j] = first[j] + match[0]
    return found
