"""Restrictions on what a job may run on: its GPU types, its bounds on GPUs, and its shape."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.tables import Bools
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft, find_losers
from tessera.formulation.state.runnable_plans import restriction_in_words
from tessera.formulation.state.snapshot import Snapshot


def pinned_gpu_type(draft: Draft) -> Draft:
    """Keep only columns on the requested type for a pinned job (Eq. 31).

    A pinned job that requests no type may run on any.
    """
    jobs = draft.snapshot.jobs
    pinned = jobs.pinned_gpu_type & (jobs.requested_gpu_type >= 0)
    if not pinned.any():
        return draft
    keep = ~pinned[draft.job] | (draft.gpu_type == jobs.requested_gpu_type[draft.job])
    lost = find_losers(draft, keep)
    return draft.only(keep, {job: _no_cell_on_pin(draft.snapshot, job) for job in lost})


def allowed_gpu_types(draft: Draft) -> Draft:
    """Keep only columns on the GPU types that the job may run on (Eq. 31f).

        x_c = 0  where t_c is not in A_j

    A running job whose type is not allowed any more moves or is stopped.
    """
    types, sets = draft.snapshot.type_choices()
    if sets.all():
        return draft
    keep = sets[types[draft.job], draft.gpu_type]
    lost = find_losers(draft, keep)
    return draft.only(
        keep, {job: _no_cell_on_allowed(draft, sets[types[job]], job) for job in lost}
    )


def bounded_gpus(draft: Draft) -> Draft:
    """Keep only columns with a GPU count within the job's bounds (Eq. 31b).

        x_c = 0  where n_c < min_j, or max_j > 0 and n_c > max_j

    A running job whose count is outside its bounds, because they changed, restarts wherever it
    goes.
    """
    jobs = draft.snapshot.jobs
    if not ((jobs.min_gpus > 1).any() or (jobs.max_gpus > 0).any()):
        return draft
    least, most = jobs.min_gpus[draft.job], jobs.max_gpus[draft.job]
    keep = (draft.gpus >= least) & ((most == 0) | (draft.gpus <= most))
    if keep.all():
        return draft
    why = {job: _no_cell_within_bounds(draft, job) for job in find_losers(draft, keep)}
    return draft.only(keep, why)


def unmovable_jobs_keep_their_shape(draft: Draft) -> Draft:
    """Drop the other shapes of the Cell that a job runs on, if the job may not be moved (Eq. 31c).

    x_c = 0  where c has the Cell of the current column of j, but not its shape
    """
    fixed = draft.snapshot.jobs.pinned & (draft.current >= 0)
    if not fixed.any():
        return draft
    column = np.flatnonzero(fixed[draft.job] & draft.starts)
    cell, own = draft.cell[column], draft.cell[draft.current[draft.job[column]]]
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    keep[column[draft.cells.have_same_cell(cell, own)]] = False
    return draft.only(keep)


def _no_cell_on_pin(snapshot: Snapshot, job: int) -> Reason:
    """Explain a job without a column on its pinned type: nodes are away, or no Cell ever fits."""
    e, jobs = snapshot.estimates, snapshot.jobs
    pin = int(jobs.requested_gpu_type[job])
    name, workload = snapshot.gpu_types[pin].name, int(jobs.workload[job])
    own = (e.workload == workload) & (e.gpu_type == pin) & np.isfinite(e.iter_time_s)
    whole = int(snapshot.nodes.gpus[snapshot.nodes.gpu_type == pin].sum())
    now, key = int(snapshot.schedulable_gpus()[pin]), snapshot.workloads[workload].key
    evidence = (("pinned type", name), ("workload", key), (f"schedulable {name}", str(now)))
    if np.any(e.gpus[own] <= whole):
        return Reason(
            code=ReasonCode.NODES_AWAY,
            message=f"the job is pinned to {name}, but too few of these GPUs are schedulable:"
            f" {now} of {whole}",
            next_step=f"start the agents of the {name} nodes, undrain the nodes, or unpin the job",
            evidence=evidence,
        )
    if own.any():
        least = int(e.gpus[own].min())
        lack = f"{key} needs at least {least} of these GPUs and the cluster has {whole}"
    else:
        lack = f"{key} has no Cell{restriction_in_words(snapshot, job)} on this type"
    return Reason(
        code=ReasonCode.PINS_CONTRADICT,
        message=f"the job is pinned to {name}, but {lack}",
        next_step=f"unpin the job, or add Cells of {key} on {name}",
        evidence=evidence,
    )


def _no_cell_on_allowed(draft: Draft, allowed: Bools, job: int) -> Reason:
    """Explain a job without a column on its types: nodes are away, or there is no Cell that fits.

    ``allowed`` is bool[types].
    """
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    names = " or ".join(snapshot.gpu_types[t].name for t in np.flatnonzero(allowed).tolist())
    e, workload = snapshot.estimates, int(jobs.workload[job])
    own = (e.workload == workload) & allowed[e.gpu_type] & np.isfinite(e.iter_time_s)
    whole = np.bincount(
        snapshot.nodes.gpu_type, weights=snapshot.nodes.gpus, minlength=len(allowed)
    )
    now, there = int(snapshot.schedulable_gpus()[allowed].sum()), int(whole[allowed].sum())
    others = ", ".join(
        snapshot.gpu_types[t].name
        for t in np.unique(draft.gpu_type[draft.columns_of(job)]).tolist()
    )
    key = snapshot.workloads[workload].key
    if np.any(e.gpus[own] <= whole[e.gpu_type[own]]):
        code, away = ReasonCode.NODES_AWAY, True
        problem = f"too few of these GPUs are schedulable: {now} of {there}"
    else:
        code, away = ReasonCode.PINS_CONTRADICT, False
        lack = (
            f"needs at least {int(e.gpus[own].min())} of one type"
            if own.any()
            else "has no Cell there"
        )
        problem = f"{key} {lack}, and the cluster has {there} of these GPUs"
    first = f"start the agents of the {names} nodes, undrain the nodes, or " if away else ""
    return Reason(
        code=code,
        message=f"the job may run on {names} only, but {problem}",
        next_step=f"{first}allow another GPU type on which it has Cells: {others}",
        evidence=(("allowed types", names), ("workload", key), ("schedulable", str(now))),
    )


def _no_cell_within_bounds(draft: Draft, job: int) -> Reason:
    """Explain a job that has Cells, but none within its bounds on GPUs."""
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    columns = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    counts = ", ".join(map(str, sorted(set(draft.gpus[columns].tolist()))))
    least, most = int(jobs.min_gpus[job]), int(jobs.max_gpus[job])
    bounds = f"at least {max(least, 1)}" + (f" and at most {most}" if most else "") + " GPUs"
    key = snapshot.workloads[int(jobs.workload[job])].key
    return Reason(
        code=ReasonCode.PINS_CONTRADICT,
        message=f"the job may run on {bounds}, but {key} has Cells only on {counts} GPUs",
        next_step=f"change the job's min_gpus or max_gpus, or add Cells of {key} within the bounds",
        evidence=(("bounds", bounds), ("workload", key), ("GPU counts of its Cells", counts)),
    )
