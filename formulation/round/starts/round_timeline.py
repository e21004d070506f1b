"""The timeline of a round, before any start is planned on it."""

from __future__ import annotations

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.job.lifecycle import ACTIVE
from tessera.formulation.round.draft import Draft
from tessera.formulation.round.starts.pools import Pools
from tessera.formulation.round.starts.shares import RunningShares, segments_of_round
from tessera.formulation.round.starts.timeline import Slot, Timeline, shape_of


def make_timeline(draft: Draft, pools: Pools, shares: RunningShares) -> Timeline:
    """Return the times at which the GPUs of nodes become free, by the shares that jobs hold."""
    entries = [
        (shares.node, shares.part, shares.part_until_s),
        (shares.node, shares.gpus - shares.part, shares.all_until_s),
    ]
    runs, index = np.unique(shares.job, return_index=True)
    ends_s = shares.part_until_s[index]
    entries += [
        (np.full(len(runs), pool.number), pool.amount[draft.current[runs]], ends_s)
        for pool in pools.tenants
    ]
    array = draft.snapshot.jobs.array[runs]
    for number, pool_number in pools.number_of_array.items():
        members = np.flatnonzero(array == number)
        amount = np.ones(len(members), np.int64)
        entries.append((np.full(len(members), pool_number), amount, ends_s[members]))
    node, gpus, until_s = (np.concatenate(column) for column in zip(*entries, strict=True))
    counts = gpus > 0
    return Timeline(
        draft.snapshot,
        np.array(pools.sizes, dtype=np.int64),
        node=node[counts],
        gpus=gpus[counts],
        until_s=until_s[counts],
    )


def add_windows(draft: Draft, timeline: Timeline) -> None:
    """Add the slots of windows, which come before planned starts. Their owners are negative numbers."""
    snapshot, now_s = draft.snapshot, draft.snapshot.now_s
    table, nodes = snapshot.reservations, snapshot.reserved_nodes
    is_maintenance = table.maintenance & table.are_active(now_s)  # their nodes are not schedulable
    for r in np.flatnonzero((table.end_s > now_s) & ~is_maintenance).tolist():
        node = np.unique(nodes.node[(nodes.reservation == r)])
        if len(node):
            start_s = max(now_s, float(table.start_s[r]))
            shares = zip(node.tolist(), snapshot.nodes.gpus[node].tolist(), strict=True)
            _add(timeline, Slot(start_s, float(table.end_s[r]), tuple(shares)))


def add_schedules(draft: Draft, timeline: Timeline) -> None:
    """Add the slots of schedules for deadlines. Their owners are negative numbers.

    A schedule counts GPUs by type, and leaves enough for the starts that were planned before. Where no
    nodes have room for its shape, it takes the GPUs that are free, since placement moves jobs for it.
    """
    snapshot, segments, now_s = draft.snapshot, segments_of_round(draft), draft.snapshot.now_s
    sizes = snapshot.node_size()
    runs = snapshot.jobs.among(ACTIVE) & (draft.current >= 0)
    for segment in np.argsort(segments.start_s, kind="stable").tolist():
        job, gpu_type, gpus = (
            int(segments.job[segment]),
            int(segments.gpu_type[segment]),
            int(segments.gpus[segment]),
        )
        column = int(draft.current[job])
        goes_on = runs[job] and segments.start_s[segment] <= now_s + SAME_S
        if goes_on and draft.gpu_type[column] == gpu_type:
            gpus -= int(draft.gpus[column])  # the GPUs that it still lacks
        if gpus <= 0 or not sizes[gpu_type]:
            continue
        shape = shape_of(gpu_type, gpus, -(-gpus // int(sizes[gpu_type])))
        start_s, end_s = (
            max(now_s, float(segments.start_s[segment])),
            float(segments.end_s[segment]),
        )
        slot = timeline.slot_at(shape, start_s, end_s, None)
        _add(timeline, slot or timeline.scattered_slot(gpu_type, gpus, start_s, end_s))


def _add(timeline: Timeline, slot: Slot) -> None:
    timeline.add(-1 - len(timeline.slots()), slot)
