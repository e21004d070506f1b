"""Rows and reasons of reservations: the GPUs that windows leave to the jobs that they do not serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tessera.formulation.base.moments import format_rfc3339
from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.base.texts import fill
from tessera.formulation.base.values import Hold
from tessera.formulation.job.reasons import Reason, ReasonCode
from tessera.formulation.round.draft import Draft, RowUse, find_losers
from tessera.formulation.round.problem import CouplingRow, RowKind
from tessera.formulation.state.reservations import reserved_gpus
from tessera.formulation.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Window:
    """Reservations that overlap, and the columns that must leave their GPUs to others."""

    members: tuple[int, ...]  # indices into Snapshot.reservations
    active: bool
    out: Bools  # bool[columns]
    gpus: Ints  # int64[types], reserved
    name: str


def windows_are_kept(draft: Draft) -> Draft:
    """Keep jobs off the GPUs that reservations have for others (Eq. 39a).

        sum_{j not entitled to any of S} sum_{c of j on t} n_c x_c
            <= max(0, schedulable GPUs of t - sum_{r in S} n_{r, t})

    ``S`` is each reservation, and each set of active ones that keeps some job out. Before a window,
    only the columns count that would last into it, of jobs that could not leave
    (``with_reservations``). Launched jobs then keep what they have, since the row has room for it.
    During a window, jobs on its nodes must leave these. They are treated as on a drained node.
    """
    if not len(draft.snapshot.excluded_jobs):
        return draft
    capacity = draft.snapshot.schedulable_gpus()
    keep = np.ones(len(draft.cell), dtype=np.bool_)
    why: dict[int, Reason] = {}
    rows: list[RowUse] = []
    for window in _windows(draft):
        left = np.maximum(0, capacity - window.gpus)
        for kind in np.flatnonzero(window.gpus).tolist():
            column = np.flatnonzero(window.out & (draft.gpu_type == kind))
            has = 0 if window.active else _present_gpus(draft, column)
            if len(column):
                row = CouplingRow(
                    kind=RowKind.WINDOW,
                    subject=f"{window.name}/{draft.snapshot.gpu_types[kind].name}",
                    capacity=max(int(left[kind]), has),
                )
                rows.append(RowUse(row=row, column=column, amount=draft.gpus[column]))
        may_stay = ~draft.starts if not window.active else np.zeros_like(keep)
        keep &= ~window.out | may_stay | (draft.gpus <= left[draft.gpu_type])
        for job in find_losers(draft, keep):
            why.setdefault(job, _held(draft.snapshot, window))
    draft = replace(draft, rows=(*draft.rows, *rows)).only(keep, why)
    leaves = _must_leave(draft.snapshot)
    return replace(draft, current=np.where(leaves, -1, draft.current))


def _windows(draft: Draft) -> Iterator[_Window]:
    """Yield each reservation that keeps a column out, and then the sets of active ones that do."""
    snapshot = draft.snapshot
    table, bars, gpus = snapshot.reservations, snapshot.excluded_jobs, reserved_gpus(snapshot)
    active = table.are_active(snapshot.now_s)
    barred = np.zeros((len(table), len(snapshot.jobs)), dtype=np.bool_)
    barred[bars.reservation, bars.job] = True
    for r in np.flatnonzero(barred.any(axis=1)).tolist():
        out = barred[r][draft.job]
        if not active[r]:
            out &= draft.end_s > table.start_s[r]
        yield _Window(
            members=(r,), active=bool(active[r]), out=out, gpus=gpus[r], name=table.name[r]
        )
    now = np.flatnonzero(active & (barred.sum(axis=1) > 0))
    if len(now) < 2:
        return
    for some in np.unique(barred[now].T, axis=0):
        members = tuple(now[some].tolist())
        if len(members) > 1:
            yield _Window(
                members=members,
                active=True,
                out=np.asarray(barred[list(members)].all(axis=0))[draft.job],
                gpus=gpus[list(members)].sum(axis=0),
                name="+".join(table.name[r] for r in members),
            )


def _present_gpus(draft: Draft, column: Ints) -> int:
    """Return the GPUs of the columns that run now among ``column`` (int64[any])."""
    return int(draft.gpus[column[~draft.starts[column]]].sum())


def _must_leave(snapshot: Snapshot) -> Bools:
    """Return whether each job owns GPUs of a node that an active window has for others, bool[jobs]."""
    table, bars, own = snapshot.reservations, snapshot.excluded_jobs, snapshot.reserved_nodes
    active, a = table.are_active(snapshot.now_s), snapshot.allocations
    leaves = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    held = (a.hold != Hold.RELEASING) & (a.job >= 0)
    for r in np.flatnonzero(active).tolist():
        barred = np.zeros(len(snapshot.jobs), dtype=np.bool_)
        barred[bars.job[bars.reservation == r]] = True
        inside = np.isin(a.node, own.node[own.reservation == r])
        leaves[a.job[held & inside & barred[a.job]]] = True
    return leaves


def _held(snapshot: Snapshot, window: _Window) -> Reason:
    """Explain a job whose columns all need GPUs that a window has for others."""
    table = snapshot.reservations
    end_s = max(float(table.end_s[r]) for r in window.members)
    start_s = min(float(table.start_s[r]) for r in window.members)
    return Reason(
        code=ReasonCode.HELD_FOR_RESERVATION,
        message=f"the reservation {window.name} keeps the GPUs that the job needs for others until"
        f" {format_rfc3339(end_s)}"
        if window.active
        else f"the job cannot leave before the reservation {window.name}, which begins at"
        f" {format_rfc3339(start_s)} and needs its GPUs until {format_rfc3339(end_s)}",
        next_step="wait for the end of the reservation, or entitle the job to it: `tessera reserve list`",
        evidence=(
            ("reservation", window.name),
            ("begins", format_rfc3339(start_s)),
            ("ends", format_rfc3339(end_s)),
        ),
    )


def with_window(snapshot: Snapshot, reason: Reason) -> Reason:
    """Return the reason with when the reservation ends, if a row of one holds a job back."""
    row = dict(reason.evidence).get("row")
    if reason.code is not ReasonCode.HELD_FOR_RESERVATION or not isinstance(row, str):
        return reason
    names = row.split("/")[1].split("+")
    ends = [
        float(end_s)
        for name, end_s in zip(
            snapshot.reservations.name, snapshot.reservations.end_s.tolist(), strict=True
        )
        if name in names
    ]
    end = format_rfc3339(max(ends))
    return replace(
        reason,
        message=fill("{message}; it ends at {end}", message=reason.message, end=end),
        evidence=(*reason.evidence, ("reservation", "+".join(names)), ("ends", end)),
    )
