"""The nodes that a job may run on: those that its selector matches and that it does not avoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.base.values import Hold
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft, RowUse, find_losers
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.state.snapshot import Snapshot

MAX_SELECTOR_ROWS: Final = 16
"""Largest number of rows of selectors. Solvers are slower with each, and placement keeps to all."""

MAX_NAMED_NODES: Final = 4


def permitted_nodes(draft: Draft) -> Draft:
    """Keep only columns that fit on the schedulable nodes that the job may run on (Eq. 31).

    Nodes are counted by type. A job that owns GPUs of a node which it may not run on any more
    cannot stay unchanged: wherever it goes, it restarts.
    """
    snapshot = draft.snapshot
    if not (len(snapshot.avoided_nodes) or len(snapshot.unmatched_nodes)):
        return draft
    room = _room(snapshot)
    keep = draft.gpus <= room[draft.job, draft.gpu_type]
    why = {job: _contradiction(draft, room, job) for job in find_losers(draft, keep)}
    draft = draft.only(keep, why)
    leaves = sits_elsewhere(snapshot)
    return replace(draft, current=np.where(leaves, -1, draft.current))


def selected_nodes_have_enough(draft: Draft) -> Draft:
    """Add rows for the GPUs that jobs with selectors share (Eq. 3c).

        sum_{c on t of j: N_j within N} n_c x_c <= GPUs of type t on the schedulable nodes in N

    There is one row for each type t and each set N of its nodes that some selector matches. N_j are
    the nodes that the selector of job j matches. A row that no choice of columns can exceed is left
    out. Of the others, those whose jobs ask for most, relative to what there is, are added.
    """
    snapshot = draft.snapshot
    selector = snapshot.jobs.required_selector
    if not len(snapshot.unmatched_nodes) or not (selector[draft.job] >= 0).any():
        return draft
    rows: list[tuple[float, RowUse]] = []
    for kind in range(len(snapshot.gpu_types)):
        rows += _rows_of_type(draft, kind)
    rows.sort(key=lambda row: -row[0])  # of equals, the first
    return replace(draft, rows=(*draft.rows, *(use for _, use in rows[:MAX_SELECTOR_ROWS])))


def _rows_of_type(draft: Draft, kind: int) -> list[tuple[float, RowUse]]:
    """Return the rows of one GPU type, each with what its jobs ask for in units of its capacity."""
    snapshot = draft.snapshot
    of_column = snapshot.jobs.required_selector[draft.job]
    pool = np.flatnonzero(snapshot.nodes.schedulable & (snapshot.nodes.gpu_type == kind))
    column = np.flatnonzero((draft.gpu_type == kind) & (of_column >= 0))
    used = np.unique(of_column[column])
    sets, first, which = np.unique(
        snapshot.matching_nodes()[used][:, pool], axis=0, return_index=True, return_inverse=True
    )
    set_of = np.zeros(len(snapshot.selectors), dtype=np.int64)
    set_of[used] = which.ravel()
    # Whether each set lies within each other one.
    within = sets.astype(np.int64) @ (~sets).astype(np.int64).T == 0
    rows = []
    for k in np.flatnonzero(~sets.all(axis=1)).tolist():
        users = column[within[set_of[of_column[column]], k]]
        capacity = int(snapshot.nodes.gpus[pool[sets[k]]].sum())
        most = np.zeros(len(draft.current), dtype=np.int64)
        np.maximum.at(most, draft.job[users], draft.gpus[users])
        if most.sum() <= capacity:
            continue
        subject = f"{snapshot.gpu_types[kind].name} with {snapshot.selectors.in_words(int(used[first[k]]))}"
        row = CouplingRow(kind=RowKind.SELECTED, subject=subject, capacity=capacity)
        use = RowUse(row=row, column=users, amount=draft.gpus[users])
        rows.append((float(most.sum()) / max(1, capacity), use))
    return rows


def _room(snapshot: Snapshot) -> Ints:
    """Return the schedulable GPUs on the nodes that each job may run on, int64[jobs, types]."""
    nodes, types = snapshot.nodes, len(snapshot.gpu_types)
    gpus = np.where(nodes.schedulable, nodes.gpus, 0)
    by_type = np.zeros((len(nodes), types), dtype=np.int64)
    by_type[np.arange(len(nodes)), nodes.gpu_type] = gpus
    # The last row is that of jobs without a selector, which have the index -1.
    matches = np.append(snapshot.matching_nodes(), [np.ones(len(nodes), np.bool_)], axis=0)
    selector = snapshot.jobs.required_selector
    room: Ints = (matches.astype(np.int64) @ by_type)[selector]
    job, node = np.unique(
        np.stack([snapshot.avoided_nodes.job, snapshot.avoided_nodes.node]), axis=1
    )
    counted = matches[selector[job], node]
    np.subtract.at(room, (job[counted], nodes.gpu_type[node[counted]]), gpus[node[counted]])
    return room


def sits_elsewhere(snapshot: Snapshot) -> Bools:
    """Return whether each job owns a GPU, held or reserved, of a node that it may not run on, bool[jobs]."""
    a, nodes = snapshot.allocations, len(snapshot.nodes)
    own = np.flatnonzero((a.hold != Hold.RELEASING) & (a.job >= 0))
    job, node = a.job[own], a.node[own]
    wrong = np.isin(
        job * nodes + node, snapshot.avoided_nodes.job * nodes + snapshot.avoided_nodes.node
    )
    selector = snapshot.jobs.required_selector[job]
    unmatched = snapshot.unmatched_nodes.selector * nodes + snapshot.unmatched_nodes.node
    wrong |= (selector >= 0) & np.isin(selector * nodes + node, unmatched)
    out = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    out[job[wrong]] = True
    return out


def _contradiction(draft: Draft, room: Ints, job: int) -> Reason:
    """Explain a job whose Cells all need more GPUs than the nodes have that it may run on."""
    snapshot, jobs = draft.snapshot, draft.snapshot.jobs
    own = draft.columns_of(job)
    kinds, gpus = draft.gpu_type[own], draft.gpus[own]
    if (reason := _missing_runtime(snapshot, job, kinds, gpus)) is not None:
        return reason
    whole = snapshot.schedulable_gpus()
    left = "; ".join(
        f"it needs {int(gpus[kinds == t].min())} x {snapshot.gpu_types[t].name}, but may use only"
        f" {int(room[job, t])} of {int(whole[t])}"
        for t in sorted(set(kinds.tolist()))
    )
    nodes = sorted(
        {
            snapshot.nodes.name[n]
            for n in snapshot.avoided_nodes.node[snapshot.avoided_nodes.job == job].tolist()
        }
    )
    more = len(nodes) - MAX_NAMED_NODES
    others = f" and {more} more node{'s' if more > 1 else ''}" if more > 0 else ""
    pin = int(jobs.requested_gpu_type[job]) if jobs.pinned_gpu_type[job] else -1
    selector = int(jobs.required_selector[job])
    text = snapshot.selectors.in_words(selector) if selector >= 0 else ""
    demands = [
        f"is pinned to {snapshot.gpu_types[pin].name}" if pin >= 0 else "",
        f"runs only on nodes with {text}" if text else "",
        f"avoids {', '.join(nodes[:MAX_NAMED_NODES])}{others}" if nodes else "",
    ]
    return Reason(
        code=ReasonCode.PINS_CONTRADICT,
        message=f"the job {' and '.join(filter(None, demands))}, which leaves too few GPUs: {left}",
        next_step="let the job run on more nodes" + (", or unpin its type" if pin >= 0 else ""),
        evidence=(
            *((("avoided nodes", " ".join(nodes[:16])),) if nodes else ()),
            *((("node selector", text),) if text else ()),
            ("needs", left),
        ),
    )


def _missing_runtime(snapshot: Snapshot, job: int, kinds: Ints, gpus: Ints) -> Reason | None:
    """Explain a job for whose Cells too few nodes offer its runtime. Return None if enough do.

    ``kinds`` and ``gpus`` are the GPU types and the numbers of GPUs of its Cells.
    """
    selectors, nodes = snapshot.selectors, snapshot.nodes
    selector = selectors.without_labels(int(snapshot.jobs.required_selector[job]))
    if selector < 0:
        return None
    offering = snapshot.matching_nodes()[selector] & nodes.schedulable
    room = np.bincount(
        nodes.gpu_type[offering], nodes.gpus[offering], minlength=len(snapshot.gpu_types)
    )
    if (gpus <= room[kinds]).any():
        return None
    lack = selectors.lack_of(selector)
    message = lack.message
    if offering.any():
        message = (
            f"the job needs at least {int(gpus.min())} GPUs, and nodes offer its runtime {lack.runtime}"
            f" on {int(room.sum())}; others do not: {lack.cause}"
        )
    return Reason(
        code=ReasonCode.RUNTIME_MISSING,
        message=message,
        next_step=lack.next_step,
        evidence=(
            ("runtime", lack.runtime),
            ("missing", lack.cause),
            ("offered", lack.alternatives),
        ),
    )
