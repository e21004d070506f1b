"""Exchanges as flows from GPU to GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.tables import Floats, Ints, concatenate_ranges, sum_by_group
from tessera.formulation.state.traffic import Exchange, Pattern

MIN_FLOW_BYTES: Final = 1e-6
"""Smallest flow in bytes. Anything less counts as nothing, so that intensity stays a finite number.

Intensity is work divided by seconds of traffic.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """The traffic from GPU to GPU in one iteration, N flows."""

    job: Ints  # (N,)
    source: Ints  # (N,) vertex
    target: Ints  # (N,)
    sent_bytes: Floats  # (N,)
    messages: Ints  # (N,) in sequence

    def __len__(self) -> int:
        """Return the number of flows."""
        return len(self.job)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedExchange:
    """An exchange of a job whose GPUs are known."""

    job: int
    exchange: Exchange
    vertex: Ints  # [groups, size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """The groups of all rings, concatenated: members (M,) and groups (G,)."""

    vertex: Ints  # (M,)
    group: Ints  # (M,)
    job: Ints  # (G,)
    sent_bytes: Floats  # (G,)
    messages: Ints  # (G,)

    def flows(self, group: Ints, source: Ints, target: Ints, share: Floats) -> Flows:
        """Return flows that carry ``share`` of the bytes that a member sends."""
        return Flows(
            job=self.job[group],
            source=source,
            target=target,
            sent_bytes=self.sent_bytes[group] * share,
            messages=self.messages[group],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blocks:
    """The members of a ring's group on each host, as runs of ``vertex``. A group's are adjacent."""

    vertex: Ints  # (M,) in order of GPU index within a block
    group: Ints  # (B,)
    start: Ints  # (B,)
    size: Ints  # (B,)


def flows_of(placed: Sequence[PlacedExchange], host: Ints) -> Flows:
    """Return the flows of exchanges, sorted. Flows of one job with the same ends are merged.

    Args:
        host: the host of each vertex.
    """
    rings = [p for p in placed if p.exchange.pattern is Pattern.RING]
    parts = [_pairs(p) for p in placed if p.exchange.pattern is not Pattern.RING]
    if rings:
        groups = _groups(rings)
        blocks = _blocks(groups, host)
        parts += [_within(groups, blocks), _across(groups, blocks)]
    return _merged(parts, len(host))


def _pairs(placed: PlacedExchange) -> Flows:
    """Return the flows of a chain (each to the next and back), or of all members to all others."""
    size = placed.vertex.shape[1]
    place = np.arange(size)
    if placed.exchange.pattern is Pattern.CHAIN:
        a, b = np.append(place[:-1], place[1:]), np.append(place[1:], place[:-1])
    else:
        a, b = np.repeat(place, size), np.tile(place, size)
        a, b = a[a != b], b[a != b]
    source, target = placed.vertex[:, a].ravel(), placed.vertex[:, b].ravel()
    return Flows(
        job=np.full(len(source), placed.job),
        source=source,
        target=target,
        sent_bytes=np.full(len(source), placed.exchange.sent_bytes),
        messages=np.full(len(source), placed.exchange.messages),
    )


def _groups(rings: Sequence[PlacedExchange]) -> _Groups:
    counts = np.array([p.vertex.shape[0] for p in rings])
    sizes = np.repeat([p.vertex.shape[1] for p in rings], counts)
    return _Groups(
        vertex=np.concatenate([p.vertex.ravel() for p in rings]),
        group=np.repeat(np.arange(len(sizes)), sizes),
        job=np.repeat([p.job for p in rings], counts),
        sent_bytes=np.repeat([float(p.exchange.sent_bytes) for p in rings], counts),
        messages=np.repeat([p.exchange.messages for p in rings], counts),
    )


def _blocks(groups: _Groups, host: Ints) -> _Blocks:
    """Return the members by host. Hosts of a group are in the order in which it first has them."""
    at = host[groups.vertex]
    order = np.lexsort((groups.vertex, at, groups.group))
    group, at = groups.group[order], at[order]
    # A block is a run of members with the same group and host.
    new = (np.diff(group, prepend=-1) != 0) | (np.diff(at, prepend=-1) != 0)
    start = np.flatnonzero(new)
    size = np.diff(np.append(start, len(order)))
    # Order the blocks of a group by their first member in the ring.
    met = np.minimum.reduceat(order, start) if len(start) else start
    by_turn = np.lexsort((met, group[start]))
    return _Blocks(
        vertex=groups.vertex[order],
        group=group[start][by_turn],
        start=start[by_turn],
        size=size[by_turn],
    )


def _hosts_of(blocks: _Blocks, groups: _Groups) -> Ints:
    return np.bincount(blocks.group, minlength=len(groups.job))


def _within(groups: _Groups, blocks: _Blocks) -> Flows:
    """Return the flows inside hosts (41).

    Each channel visits all m members on a host and leaves through its own member, so a member hands
    (m - 1) / m of its bytes to the next. If the ring stays on one host, it hands on all of them.
    """
    several = np.flatnonzero(blocks.size > 1)
    size, start = blocks.size[several], blocks.start[several]
    place = concatenate_ranges(np.zeros_like(size), size)
    block = np.repeat(np.arange(len(several)), size)
    source = blocks.vertex[start[block] + place]
    target = blocks.vertex[start[block] + (place + 1) % size[block]]
    group = blocks.group[several]
    share = np.where(_hosts_of(blocks, groups)[group] > 1, (size - 1) / size, 1.0)
    return groups.flows(group[block], source, target, share[block])


def _across(groups: _Groups, blocks: _Blocks) -> Flows:
    """Return the flows from host to host. Of m members each sends 1 / m, of n each receives 1 / n.

    Both sides divide the line from 0 to 1 into equal parts. There is a flow where two parts overlap
    (40).
    """
    hosts = _hosts_of(blocks, groups)
    first = np.cumsum(hosts) - hosts
    block = np.flatnonzero(hosts[blocks.group] > 1)
    group = blocks.group[block]
    # Each block sends to the next block of its group, as in a ring.
    then = first[group] + (block - first[group] + 1) % hosts[group]
    m, n = blocks.size[block], blocks.size[then]
    none = np.zeros_like(m)
    # Cut the line of m * n units at the boundaries of the senders (n) and the receivers (m).
    pair = np.concatenate([np.repeat(np.arange(len(m)), m), np.repeat(np.arange(len(m)), n)])
    cut = np.concatenate(
        [
            concatenate_ranges(none, m) * np.repeat(n, m),
            concatenate_ranges(none, n) * np.repeat(m, n),
        ]
    )
    whole = m * n  # length of the line in units
    longest = int(whole.max(initial=0)) + 1
    key = np.sort(pair * longest + cut)  # np.unique would hash first, at twice the time
    key = key[np.diff(key, prepend=-1) != 0]
    pair, cut = key // longest, key % longest
    # Each piece between two cuts is a flow.
    last = np.append(np.diff(pair) != 0, [True] * min(len(pair), 1))
    end = np.where(last, whole[pair], np.append(cut[1:], 0)[: len(cut)])
    source = blocks.vertex[blocks.start[block][pair] + cut // n[pair]]
    target = blocks.vertex[blocks.start[then][pair] + cut // m[pair]]
    return groups.flows(group[pair], source, target, (end - cut) / whole[pair])


def _merged(parts: Sequence[Flows], vertices: int) -> Flows:
    """Return flows in order of job, source and target, without duplicates.

    Flows that carry nothing, or go from a vertex to itself, are left out.
    """
    none = np.empty(0, dtype=np.int64)
    job, source, target, messages = (
        np.concatenate([none, *(getattr(p, name) for p in parts)])
        for name in ("job", "source", "target", "messages")
    )
    sent = np.concatenate([none, *(p.sent_bytes for p in parts)])
    real = np.flatnonzero((sent >= MIN_FLOW_BYTES) & (source != target))
    key = (job[real] * vertices + source[real]) * vertices + target[real]
    key, which = np.unique(key, return_inverse=True)
    pair = key % (vertices * vertices)
    return Flows(
        job=key // (vertices * vertices),
        source=pair // vertices,
        target=pair % vertices,
        sent_bytes=sum_by_group(which, sent[real], len(key)),
        messages=np.bincount(which, messages[real], minlength=len(key)).astype(np.int64),
    )
