"""The reservations of a round: nodes under maintenance, chosen nodes, and the jobs that are kept out.

A reservation of GPUs of a type is kept in two ways. A row counts: other jobs leave this number of
GPUs of the type (``promises.windows``). And nodes are chosen that other jobs must leave, as many as
the GPUs fill entirely, so that those entitled find whole nodes. Nodes are chosen again in each
round, by a rule that depends on the snapshot alone. It prefers nodes on which those entitled are
already, and then nodes that others do not use. A choice therefore stays until a node is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.base.values import Hold
from tessera.formulation.state.reserved import NO_EXCLUDED_JOBS, ExcludedJobs, ReservedNodes
from tessera.formulation.state.snapshot import Snapshot

RESTARTS_BEFORE_WINDOW: Final = 2.0
"""Restart times that must be left before a window for a job to start on its GPUs.

It takes one to start there and one to leave. With less time, the job would train less than where it
was, or than if it had waited.
"""


def with_reservations(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with what its reservations mean for a round.

    Nodes under maintenance are not schedulable. Reservations of GPUs have nodes, and ``bars`` names
    the jobs that each keeps out:

    * during a window, all jobs that are not entitled;
    * before it, those of them that cannot be moved or suspended, and those for whose restarts too
      little time is left (``RESTARTS_BEFORE_WINDOW``). Jobs that already run on its nodes stay.
    """
    if not len(snapshot.reservations):
        return snapshot
    table = snapshot.reservations
    active = table.are_active(snapshot.now_s)
    out = (active & table.maintenance)[snapshot.reserved_nodes.reservation]
    schedulable = np.array(snapshot.nodes.schedulable)
    schedulable[snapshot.reserved_nodes.node[out]] = False
    snapshot = replace(snapshot, nodes=replace(snapshot.nodes, schedulable=schedulable))
    entitled = _entitled(snapshot)
    snapshot = replace(snapshot, reserved_nodes=_with_chosen(snapshot, entitled))
    return replace(snapshot, excluded_jobs=_excluded_jobs(snapshot, entitled, active))


def reserved_gpus(snapshot: Snapshot) -> Ints:
    """Return the schedulable GPUs that each reservation takes, int64[reservations, types].

    A reservation of GPUs takes its number even where not enough GPUs are schedulable.
    """
    table, nodes, own = snapshot.reservations, snapshot.nodes, snapshot.reserved_nodes
    taken = np.zeros((len(table), len(snapshot.gpu_types)), dtype=np.int64)
    named = (table.gpu_type[own.reservation] < 0) & nodes.schedulable[own.node]
    reservation, node = own.reservation[named], own.node[named]
    np.add.at(taken, (reservation, nodes.gpu_type[node]), nodes.gpus[node])
    counted = np.flatnonzero(table.gpu_type >= 0)
    taken[counted, table.gpu_type[counted]] = table.gpus[counted]
    return taken


def _entitled(snapshot: Snapshot) -> Bools:
    """Return whether each reservation serves each job, bool[reservations, jobs]."""
    entitled = np.zeros((len(snapshot.reservations), len(snapshot.jobs)), dtype=np.bool_)
    entitled[snapshot.entitlements.reservation, snapshot.entitlements.job] = True
    return entitled


def _with_chosen(snapshot: Snapshot, entitled: Bools) -> ReservedNodes:
    """Return the reserved nodes with those that are chosen for reservations of GPUs."""
    table, named = snapshot.reservations, snapshot.reserved_nodes
    chosen: list[tuple[int, int]] = []
    by_job = _gpus_by_job(snapshot)
    lasts = table.end_s > snapshot.now_s
    for r in np.flatnonzero((table.gpu_type >= 0) & lasts).tolist():
        meets = (table.start_s < table.end_s[r]) & (table.start_s[r] < table.end_s)
        taken = {*named.node[meets[named.reservation]].tolist()}
        taken |= {node for other, node in chosen if meets[other]}
        chosen += [(r, node) for node in _choose_nodes(snapshot, r, entitled[r], taken, by_job)]
    rows = np.array(chosen, dtype=np.int64).reshape(-1, 2)
    return named.followed_by(ReservedNodes(reservation=rows[:, 0], node=rows[:, 1]))


def _gpus_by_job(snapshot: Snapshot) -> tuple[Ints, Ints, Ints]:
    """Return (job, node, GPUs), for each job and each node of which it owns GPUs."""
    a, count = snapshot.allocations, max(1, len(snapshot.nodes))
    own = (a.hold != Hold.RELEASING) & (a.job >= 0)
    pair, gpus = np.unique(a.job[own] * count + a.node[own], return_counts=True)
    return pair // count, pair % count, gpus.astype(np.int64)


def _choose_nodes(
    snapshot: Snapshot,
    reservation: int,
    entitled: Bools,
    taken: set[int],
    by_job: tuple[Ints, Ints, Ints],
) -> Sequence[int]:
    """Return nodes that the reservation's GPUs fill entirely, without those ``taken``.

    ``entitled`` is bool[jobs], and ``by_job`` the result of ``_gpus_by_job``. Nodes with the most
    GPUs of entitled jobs come first, then those with the fewest GPUs of jobs that may not be moved,
    and with the fewest GPUs of others. The rest of the GPUs, less than a node, is only counted.
    """
    nodes, (job, node, gpus) = snapshot.nodes, by_job
    served, stuck, others = (
        np.bincount(node[some], weights=gpus[some], minlength=len(nodes)).astype(np.int64)
        for some in (
            entitled[job],
            ~entitled[job] & snapshot.jobs.pinned[job],
            ~entitled[job],
        )
    )
    order = np.lexsort((np.arange(len(nodes)), others, stuck, -served))
    of_type = nodes.schedulable & (nodes.gpu_type == snapshot.reservations.gpu_type[reservation])
    left, chosen = int(snapshot.reservations.gpus[reservation]), []
    for candidate in order[of_type[order]].tolist():
        if candidate not in taken and nodes.gpus[candidate] <= left:
            chosen.append(candidate)
            left -= int(nodes.gpus[candidate])
    return chosen


def _excluded_jobs(snapshot: Snapshot, entitled: Bools, active: Bools) -> ExcludedJobs:
    """Return the jobs that each reservation keeps out (``with_reservations``)."""
    table, jobs = snapshot.reservations, snapshot.jobs
    stuck = jobs.pinned
    bars = NO_EXCLUDED_JOBS
    for r in np.flatnonzero(table.end_s > snapshot.now_s).tolist():
        if active[r]:
            if table.maintenance[r]:
                continue  # its nodes are not schedulable
            out, by_node = ~entitled[r], np.ones(len(jobs), dtype=np.bool_)
        else:
            left_s = float(table.start_s[r]) - snapshot.now_s
            hurried = jobs.restart_s * RESTARTS_BEFORE_WINDOW >= left_s
            sits = _sits_on(snapshot, r)
            by_node = (stuck | hurried) & ~sits
            out = ~entitled[r] & (stuck | jobs.guaranteed | (hurried & ~sits))
        job = np.flatnonzero(out)
        own = ExcludedJobs(reservation=np.full(len(job), r), job=job, by_node=by_node[job])
        bars = bars.followed_by(own)
    return bars


def _sits_on(snapshot: Snapshot, reservation: int) -> Bools:
    """Return whether each job owns a GPU of the reservation's nodes, bool[jobs]."""
    a, own = snapshot.allocations, snapshot.reserved_nodes
    inside = np.zeros(len(snapshot.nodes), dtype=np.bool_)
    inside[own.node[own.reservation == reservation]] = True
    sits = np.zeros(len(snapshot.jobs), dtype=np.bool_)
    sits[a.job[(a.hold != Hold.RELEASING) & (a.job >= 0) & inside[a.node]]] = True
    return sits
