"""The times at which GPUs of nodes become free, and the starts that are planned on them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np

from tessera.formulation.base.moments import SAME_S
from tessera.formulation.base.tables import Bools, Floats, Ints
from tessera.formulation.state.snapshot import Snapshot

Gap: TypeAlias = tuple[float, float]
"""The first and the last time at which a share could start and have its GPUs for as long as it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartShape:
    """GPUs on nodes of one type: ``count`` nodes with ``share`` GPUs.

    One more node has ``rest_share`` GPUs if that is not 0.
    """

    gpu_type: int
    count: int
    share: int
    rest_share: int
    pools: tuple[tuple[int, int], ...] = ()
    """(pool, amount): its use of limits that hold for several nodes, such as quotas."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the GPUs on each node."""
        return (self.share,) * self.count + (self.rest_share,) * (self.rest_share > 0)


def shape_of(gpu_type: int, gpus: int, nodes: int) -> StartShape:
    """Return ``gpus`` GPUs in shares that are as equal as possible on ``nodes`` nodes."""
    share = -(-gpus // nodes)
    count = gpus // share
    return StartShape(gpu_type=gpu_type, count=count, share=share, rest_share=gpus - count * share)


@dataclass(frozen=True, slots=True)
class Slot:
    """The GPUs of nodes that a job is to have from ``start_s`` until ``end_s``."""

    start_s: float
    end_s: float
    shares: tuple[tuple[int, int], ...]
    """(node or pool, GPUs)"""


class Timeline:
    """The GPUs of schedulable nodes that running jobs leave over time, and slots on them.

    Running jobs only ever give GPUs back, so the free GPUs of a node rise with time, apart from slots.
    A pool is a limit that is counted like a node. Its number is above the numbers of nodes.
    """

    def __init__(
        self, snapshot: Snapshot, pools: Ints, node: Ints, gpus: Ints, until_s: Floats
    ) -> None:
        """Set up the timeline of what jobs hold, one entry for each job, node or pool, and time.

        ``pools`` is int64[pools], their sizes. All others are [entries]: the node or pool, the GPUs, and
        the time until which they are held, in seconds since 1970.
        """
        nodes = snapshot.nodes
        self.now_s = snapshot.now_s
        self._size, self._gpu_type = np.where(nodes.schedulable, nodes.gpus, 0), nodes.gpu_type
        until_s = np.maximum(until_s, snapshot.now_s)
        size = np.append(self._size, pools)
        free = size - np.bincount(node, weights=gpus, minlength=len(size)).astype(np.int64)
        self._free: list[int] = free.tolist()
        self._changes: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        """By node, the changes of its free GPUs, in order of time."""
        order = np.argsort(until_s, kind="stable")
        for n, g, at_s in zip(
            node[order].tolist(), gpus[order].tolist(), until_s[order].tolist(), strict=True
        ):
            self._changes[n].append((at_s, g))
        self._slots: dict[int, Slot] = {}
        self._owners = np.zeros(len(size), dtype=np.int64)  # slots on each node or pool
        self._free_from = _free_from(self._size, self._free, self._changes, snapshot.now_s)

    def slot(self, owner: int) -> Slot | None:
        """Return the slot of ``owner``, if it has one."""
        return self._slots.get(owner)

    def slots(self) -> list[tuple[int, Slot]]:
        """Return all slots, with their owners."""
        return list(self._slots.items())

    def add(self, owner: int, slot: Slot) -> None:
        """Give ``owner``, which has none, a slot."""
        self._slots[owner] = slot
        for node, gpus in slot.shares:
            self._owners[node] += 1
            changes = self._changes[node]
            insort(changes, (slot.start_s, -gpus))
            insort(changes, (slot.end_s, gpus))

    def remove(self, owner: int) -> Slot:
        """Take the slot of ``owner`` away, and return it."""
        slot = self._slots.pop(owner)
        for node, gpus in slot.shares:
            self._owners[node] -= 1
            changes = self._changes[node]
            del changes[bisect_left(changes, (slot.start_s, -gpus))]
            del changes[bisect_left(changes, (slot.end_s, gpus))]
        return slot

    def has_room(self, slot: Slot) -> bool:
        """Return whether the slot's GPUs are free for all of its time."""
        lasts_s = slot.end_s - slot.start_s
        return all(
            any(
                first_s - SAME_S <= slot.start_s <= last_s + SAME_S
                for first_s, last_s in self._gaps(node, gpus, lasts_s)
            )
            for node, gpus in slot.shares
        )

    def earliest(
        self, shape: StartShape, lasts_s: float, nodes: Bools | None, before_s: float = math.inf
    ) -> Slot | None:
        """Return the earliest slot of this shape and duration, or None if there is no such slot.

        ``nodes`` is bool[nodes], those that the job may run on, or None if it may run on all. Slots from
        ``before_s`` on do not count.
        """
        fitting_nodes = self._nodes_of(shape, nodes)
        pools = [self._gaps_before(before_s, pool, n, lasts_s) for pool, n in shape.pools]
        if len(fitting_nodes) < len(shape.shares):
            return None
        share_gaps = self._first_gaps(
            fitting_nodes, shape.share, len(shape.shares), lasts_s, before_s
        )
        at_s = _first_time(share_gaps, shape.count, pools)
        rest_gaps: list[list[Gap]] = []
        if shape.rest_share:
            rest_gaps = self._first_gaps(
                fitting_nodes, shape.rest_share, len(shape.shares), lasts_s, before_s
            )
            at_s = max(at_s, _first_time(rest_gaps, len(shape.shares), pools))
        if at_s >= before_s or math.isinf(at_s):
            return None
        # One node may be counted for both shares. A later time then is the first.
        changes_s = {gap[0] for gaps in (*share_gaps, *rest_gaps, *pools) for gap in gaps}
        times_s = [at_s, *sorted(change_s for change_s in changes_s if change_s > at_s)]
        slots = (self.slot_at(shape, start_s, start_s + lasts_s, nodes) for start_s in times_s)
        return next((slot for slot in slots if slot is not None), None)

    def slot_at(
        self, shape: StartShape, start_s: float, end_s: float, nodes: Bools | None
    ) -> Slot | None:
        """Return a slot of this shape from ``start_s`` until ``end_s``, or None if there is no such slot.

        Of the nodes with room, those with other slots come first, and then those that become free last,
        so that nodes that are free now stay free for jobs of any length.
        """
        lasts_s, shares = end_s - start_s, list[tuple[int, int]]()
        fitting_nodes = self._nodes_of(shape, nodes)
        for share, count in (
            (shape.share, shape.count),
            (shape.rest_share, int(shape.rest_share > 0)),
        ):
            if not count:
                continue
            candidates = (
                fitting_nodes[~np.isin(fitting_nodes, [node for node, _ in shares])]
                if shares
                else fitting_nodes
            )
            fit = self._fitting(candidates, share, start_s, lasts_s)
            if len(fit) < count:
                return None
            shares += [(node, share) for node in fit[:count]]
        return Slot(start_s, end_s, (*shares, *shape.pools))

    def scattered_slot(self, gpu_type: int, gpus: int, start_s: float, end_s: float) -> Slot:
        """Return a slot of up to ``gpus`` GPUs on any nodes of a type, those with the most room first."""
        nodes = np.flatnonzero((self._gpu_type == gpu_type) & (self._size > 0)).tolist()
        rooms = {node: self._room(node, start_s, end_s) for node in nodes}
        shares = []
        for node in sorted(nodes, key=lambda node: -rooms[node]):
            share = min(rooms[node], gpus)
            if share > 0:
                shares.append((node, share))
                gpus -= share
        return Slot(start_s, end_s, tuple(shares))

    def _room(self, node: int, start_s: float, end_s: float) -> int:
        """Return the GPUs of a node that are free for all of a time."""
        level = room = self._free[node]
        for at_s, changes in groupby(self._changes[node], key=lambda change: change[0]):
            if at_s >= end_s - SAME_S:
                break
            level += sum(gpus for _, gpus in changes)
            room = level if at_s <= start_s + SAME_S else min(room, level)
        return room

    def _nodes_of(self, shape: StartShape, nodes: Bools | None) -> Ints:
        """Return the nodes of a shape's type that have enough GPUs for its larger share, int64[any]."""
        fits = (self._gpu_type == shape.gpu_type) & (self._size >= shape.share)
        fitting_nodes: Ints = np.flatnonzero(fits if nodes is None else fits & nodes)
        return fitting_nodes

    def _first_gaps(
        self, nodes: Ints, share: int, count: int, lasts_s: float, before_s: float
    ) -> list[list[Gap]]:
        """Return the gaps of nodes that matter to the first time at which ``count`` of them have one.

        Of the nodes without slots, these are the ``count`` that become free first.
        """
        has_slots = self._owners[nodes] > 0
        times = self._free_from[nodes[~has_slots], share]
        if len(times) > count:
            times = np.partition(times, count - 1)[:count]
        empty_gaps = [[(at_s, math.inf)] for at_s in times[times < before_s].tolist()]
        if len(empty_gaps) == count and max(gaps[0][0] for gaps in empty_gaps) <= self.now_s:
            return empty_gaps
        slot_gaps = [
            self._gaps_before(before_s, node, share, lasts_s) for node in nodes[has_slots].tolist()
        ]
        return empty_gaps + slot_gaps

    def _fitting(self, nodes: Ints, share: int, start_s: float, lasts_s: float) -> list[int]:
        """Return the nodes on which a share has room from ``start_s`` on, in order of preference."""
        has_slots = self._owners[nodes] > 0
        empty = nodes[~has_slots]
        empty = empty[self._free_from[empty, share] <= start_s + SAME_S]
        whole_s = self._free_from[empty, self._size[empty]]
        with_slots = [
            node
            for node in nodes[has_slots].tolist()
            for first_s, last_s in self._gaps(node, share, lasts_s)
            if first_s - SAME_S <= start_s <= last_s + SAME_S
        ]
        with_slots.sort(key=lambda node: (-int(self._owners[node]), node))
        return [*with_slots, *empty[np.lexsort((empty, -whole_s))].tolist()]

    def _gaps_before(self, before_s: float, node: int, share: int, lasts_s: float) -> list[Gap]:
        """Return the gaps of a node or pool that begin before a time."""
        return [gap for gap in self._gaps(node, share, lasts_s) if gap[0] < before_s]

    def _gaps(self, node: int, share: int, lasts_s: float) -> list[Gap]:
        """Return when a share could start on a node, in order of time."""
        level, gaps = self._free[node], list[Gap]()
        since_s = self.now_s  # of the present gap
        until_s = -math.inf  # the time of the last change
        is_open = level >= share
        for at_s, change in self._changes[node]:
            if at_s - until_s > SAME_S:  # all changes at one time count together
                if level >= share:
                    since_s, is_open = (since_s if is_open else until_s), True
                elif is_open:
                    if until_s - since_s >= lasts_s - SAME_S:
                        gaps.append((since_s, until_s - lasts_s))
                    is_open = False
                until_s = at_s
            level += change
        if level >= share:
            gaps.append((since_s if is_open else until_s, math.inf))
        return gaps


def _free_from(
    size: Ints, free: list[int], changes: Mapping[int, list[tuple[float, int]]], now_s: float
) -> Floats:
    """Return the time from which a number of GPUs of each node is free, float64[nodes, 1 + GPUs].

    It is inf where a node does not have as many. ``changes`` are those by running jobs.
    """
    count = np.arange(int(size.max(initial=0)) + 1)
    level = np.maximum(np.array(free[: len(size)], dtype=np.int64), 0)
    result = np.where(count <= level[:, None], now_s, np.inf)
    for node, node_changes in changes.items():
        if node < len(size):
            free_gpus = free[node]
            for at_s, gpus in node_changes:
                result[node, max(free_gpus, 0) + 1 : max(free_gpus + gpus, 0) + 1] = at_s
                free_gpus += gpus
    result[count > size[:, None]] = np.inf
    return result


def _first_time(gaps: list[list[Gap]], count: int, pools: list[list[Gap]]) -> float:
    """Return the earliest time at which ``count`` of the lists and all of ``pools`` have a gap, or inf."""
    if count == 1 and not pools:
        return min((node_gaps[0][0] for node_gaps in gaps if node_gaps), default=math.inf)
    events = [
        event
        for is_pool, lists in ((False, gaps), (True, pools))
        for node_gaps in lists
        for first_s, last_s in node_gaps
        for event in ((first_s, 0, is_pool), (last_s + 2 * SAME_S, 1, is_pool))
    ]
    open_ = [0, 0]
    for at_s, closes, is_pool in sorted(events):
        open_[is_pool] += -1 if closes else 1
        if open_[0] >= count and open_[1] == len(pools):
            return at_s
    return math.inf
