"""Restrictions on where a job may run: its pinned type, its bounds on GPUs, and avoided nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tessera.formulation.draft import Draft, find_losers
from tessera.formulation.reasons import Reason, ReasonCode
from tessera.formulation.runnable_plans import restriction_in_words
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.tables import Bools, Ints
from tessera.formulation.values import Hold


def pinned_type(draft: Draft) -> Draft:
    """Keep only columns on the requested type for a pinned job (Eq. 31).

    A pinned job that requests no type may run on any.
    """
    jobs = draft.snapshot.jobs
    pinned = jobs.pinned_type & (jobs.requested_type >= 0)
    if not pinned.any():
        return draft
    keep = ~pinned[draft.job] | (draft.gpu_type == jobs.requested_type[draft.job])
    lost = find_losers(draft, keep)
    return draft.only(keep, {job: _no_cell_on_pin(draft.snapshot, job) for job in lost})


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


def avoided_nodes(draft: Draft) -> Draft:
    """Keep only columns that fit on the schedulable nodes that the job does not avoid (Eq. 31).

    Nodes are counted by type. A job that owns GPUs of a node which it now avoids cannot stay
    unchanged: wherever it goes, it restarts.
    """
    snapshot = draft.snapshot
    if not len(snapshot.avoids):
        return draft
    room = _room(snapshot)
    keep = draft.gpus <= room[draft.job, draft.gpu_type]
    why = {job: _contradiction(draft, room, job) for job in find_losers(draft, keep)}
    draft = draft.only(keep, why)
    leaves = _sits_on_avoided(snapshot)
    return replace(draft, current=np.where(leaves, -1, draft.current))


def unmovable_jobs_keep_their_shape(draft: Draft) -> Draft:
    """Drop the other shapes of the Cell that a job runs on, if the job may not be moved (Eq. 31c).

    x_c = 0  where c has the Cell of the current column of j, but not its shape
    """
    fixed = ~draft.snapshot.jobs.movable & (draft.current >= 0)
    if not fixed.any():
        return draft
    column = np.flatnonzero(fixed[draft.job] & draft.starts)
    cell, own = draft.cell[column], draft.cell[draft.current[draft.job[column]]]
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    keep[column[draft.cells.have_same_cell(cell, own)]] = False
    return draft.only(keep)


def _room(snapshot: Snapshot) -> Ints:
    """Return the number of schedulable GPUs that each job does not avoid, int64[jobs, types]."""
    nodes, avoids = snapshot.nodes, snapshot.avoids
    room = np.tile(snapshot.schedulable_gpus(), (len(snapshot.jobs), 1))
    pairs = np.unique(np.stack([avoids.job, avoids.node]), axis=1)
    job, node = pairs[:, nodes.schedulable[pairs[1]]]
    np.subtract.at(room, (job, nodes.gpu_type[node]), nodes.gpus[node])
    return room


def _sits_on_avoided(snapshot: Snapshot) -> Bools:
    """Return whether each job owns a GPU, held or reserved, of an avoided node, bool[jobs]."""
    a, nodes = snapshot.allocations, len(snapshot.nodes)
    own = (a.hold != Hold.RELEASING) & (a.job >= 0)
    avoided = snapshot.avoids.job * nodes + snapshot.avoids.node
    out = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    out[a.job[own][np.isin(a.job[own] * nodes + a.node[own], avoided)]] = True
    return out


def _no_cell_on_pin(snapshot: Snapshot, job: int) -> Reason:
    """Explain a job without a column on its pinned type: nodes are away, or no Cell ever fits."""
    e, jobs = snapshot.estimates, snapshot.jobs
    pin = int(jobs.requested_type[job])
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


def _contradiction(draft: Draft, room: Ints, job: int) -> Reason:
    """Explain a job whose Cells all need more GPUs than the nodes that it does not avoid have."""
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    own = slice(int(draft.job_start[job]), int(draft.job_start[job + 1]))
    kinds, gpus = draft.gpu_type[own], draft.gpus[own]
    whole = snapshot.schedulable_gpus()
    left = "; ".join(
        f"it needs {int(gpus[kinds == t].min())} x {snapshot.gpu_types[t].name}, but may use only"
        f" {int(room[job, t])} of {int(whole[t])}"
        for t in sorted(set(kinds.tolist()))
    )
    nodes = sorted(
        {snapshot.nodes.name[n] for n in snapshot.avoids.node[snapshot.avoids.job == job].tolist()}
    )
    more = len(nodes) - 4
    others = f" and {more} more node{'s' if more > 1 else ''}" if more > 0 else ""
    pin = int(jobs.requested_type[job]) if jobs.pinned_type[job] else -1
    pinned = f"is pinned to {snapshot.gpu_types[pin].name} and " if pin >= 0 else ""
    return Reason(
        code=ReasonCode.PINS_CONTRADICT,
        message=f"the job {pinned}avoids {', '.join(nodes[:4])}{others}, which leaves too few GPUs: {left}",
        next_step="let the job run on more nodes" + (", or unpin its type" if pinned else ""),
        evidence=(("avoided nodes", " ".join(nodes[:16])), ("needs", left)),
    )
