"""Fairness objectives as levels: finish-time fairness (Themis), least attained service (Gavel)."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Floats, Ints, begins_group
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.goals import Levels
from tessera.formulation.round.objectives.completion import restart_loss_s, time_to_finish_s
from tessera.formulation.round.objectives.values import make_levels
from tessera.formulation.round.promises.stated_plans import bound_plans
from tessera.formulation.state.dominance import find_fastest


def finish_time_fairness(draft: Draft) -> Levels:
    """Return rho: a job's finish time when it shares, over that on its fair share alone (Eq. 16).

    Source: Themis (NSDI'20), section 3. A waiting job is assumed to get its fair share from the
    next round on.
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    fair = fair_rate(draft)
    level, waiting = time_to_finish_s(draft, fair)
    age_s = np.maximum(0.0, snapshot.now_s - jobs.submit_s)
    alone_s = np.maximum(draft.policy.round_s, jobs.iterations * snapshot.global_batch / fair)
    return make_levels(
        draft,
        name="finish-time-fairness",
        unit="rho",
        level=(age_s[draft.job] + level) / alone_s[draft.job],
        waiting=(age_s + waiting) / alone_s,
    )


def max_min(draft: Draft) -> Levels:
    """Return minus each job's service, including this round, over its weight (Eq. 17).

    Source: Gavel (OSDI'20), section 4.1. Service is in GPU-seconds. A round on a column counts as
    the seconds that one effective GPU would need for the same work.
    """
    jobs, job = draft.snapshot.jobs, draft.job
    runs_s = np.maximum(0.0, draft.policy.round_s - restart_loss_s(draft))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        served = draft.rate / draft.unit_rate[job] * runs_s
        level = -(jobs.service_gpu_s[job] + served) / draft.weight[job]
        waiting = -jobs.service_gpu_s / draft.weight
    return make_levels(
        draft, name="max-min", unit="GPU-seconds", level=level, waiting=waiting, sign=-1
    )


def fair_share(draft: Draft) -> Floats:
    """Return each job's share of every type's GPUs, float64[jobs].

    It is the job's weight relative to the total of the jobs that may run.
    """
    shares = draft.snapshot.jobs.may_run() & ~np.isnan(draft.unit_rate)
    weight = np.where(shares, draft.weight, 0.0)
    weight /= max(weight.max(initial=0.0), np.finfo(np.float64).tiny)  # the sum stays finite
    weight /= max(weight.sum(), 1.0)
    return weight


def fair_rate(draft: Draft, share: Floats | None = None) -> Floats:
    """Return f_j, samples/s of each job alone on its fair share, float64[jobs] (Eq. 14).

    ``share`` is the fair share, float64[jobs]. If it is None, ``fair_share`` is used.

    Only Cells of the job's stated plan, on its types and within its bounds on GPUs, count. Jobs with the
    same choice of Cells share one function of the share, which is computed at its corners. If
    nothing can be had (no Cell, or no share), the rate is the least positive number that is safe to
    divide by. Such jobs have no columns, or are not counted.
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    share = fair_share(draft) if share is None else share
    capacity = snapshot.schedulable_gpus()
    pin = np.where(jobs.pinned_gpu_type, jobs.requested_gpu_type, -1)
    fair = np.zeros(len(jobs))
    # Group jobs by the Cells that they may choose from.
    types, sets = snapshot.type_choices()
    bounds_of = (jobs.min_gpus, jobs.max_gpus, bound_plans(snapshot))
    choices = np.stack([jobs.workload, pin, types, *bounds_of])
    distinct, which = np.unique(choices, axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    bounds = np.searchsorted(which.ravel()[order], np.arange(distinct.shape[1] + 1))
    for k, (workload, pinned, allowed, *limits) in enumerate(distinct.T.tolist()):
        members = order[bounds[k] : bounds[k + 1]]
        draft.check()
        shares, where = np.unique(share[members], return_inverse=True)
        cells = _cells_of(draft, workload, *limits)
        kinds = draft.cells.gpu_type[cells]
        cells = cells[sets[allowed][kinds] & ((pinned < 0) | (kinds == pinned))]
        at, slope = _corners(draft, cells, capacity)
        best = np.full(len(shares), np.inf)
        for level, rise in zip(at.tolist(), slope.tolist(), strict=True):
            np.minimum(best, level + shares * rise, out=best)
        fair[members] = best[where]
    return np.maximum(fair, 1e-100)


def _cells_of(draft: Draft, workload: int, min_gpus: int, max_gpus: int, plan: int) -> Ints:
    """Return the fastest Cells of ``workload`` within its bounds, one for each type and count.

    ``plan`` is a stated plan, or -1 for any plan.
    """
    table = draft.cells
    if plan >= 0:
        own = np.flatnonzero((table.workload == workload) & (table.plan == plan))
        _, first = np.unique(table.gpu_type[own], return_index=True)  # the fastest comes first
        cells = own[first]
    else:
        cells = find_fastest(table, workload, min_gpus)
        # Of the Cells of a type and count, which may differ in CPUs, the fastest comes first.
        cells = cells[begins_group(table.gpu_type[cells], table.gpus[cells])]
    return cells[table.gpus[cells] <= max_gpus] if max_gpus else cells


def _corners(draft: Draft, cells: Ints, capacity: Ints) -> tuple[Floats, Floats]:
    """Return the points at which the dual of (14) bends, and the factor of the share at each.

    The factor is a sum over types. For each type, it is the upper envelope of the lines (r_c - l) /
    n_c and of 0, times the type's GPUs.
    """
    rate, gpus = draft.cells.rate[cells], draft.cells.gpus[cells]
    kind = draft.cells.gpu_type[cells]
    some = np.unique(kind)
    groups = [(rate[kind == t], gpus[kind == t], float(capacity[t])) for t in some.tolist()]
    # The corners are 0, where a line reaches 0, and where two lines of a type cross.
    points = [np.zeros(1), rate]
    for r, n, _ in groups:
        first, second = np.triu_indices(len(r), 1)  # by rising gpus, each count once
        points.append((r[first] * n[second] - r[second] * n[first]) / (n[second] - n[first]))
    at = np.concatenate(points)
    at = np.unique(at[(at >= 0) & (at <= rate.max(initial=0.0))])
    slope = np.zeros(len(at))
    for r, n, all_gpus in groups:
        height = ((r - at[:, np.newaxis]) / n).max(axis=1)
        slope += all_gpus * np.maximum(0.0, height)
    return at, slope
