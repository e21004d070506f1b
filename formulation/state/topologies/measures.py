"""Measures of a topology: counts, links by speed, and the bandwidth between its halves."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tessera.formulation.state.topologies.topology import NO_HOST, Tier, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """Directed links between two tiers with the same speed and delay."""

    source: Tier
    target: Tier
    bytes_per_s: float
    delay_s: float
    links: int


def count_tiers(topology: Topology) -> dict[Tier, int]:
    """Return the number of vertices of each tier that occurs."""
    counts = Counter(topology.vertices.tier.tolist())
    return {Tier(tier): counts[tier] for tier in sorted(counts)}


def link_kinds(topology: Topology) -> list[LinkKind]:
    """Return the links grouped by tiers, speed and delay, from GPUs upwards."""
    tier, e = topology.vertices.tier, topology.links
    columns = (
        tier[e.source].tolist(),
        tier[e.target].tolist(),
        e.bytes_per_s.tolist(),
        e.delay_s.tolist(),
    )
    counts = Counter(zip(*columns, strict=True))
    return [
        LinkKind(source=Tier(a), target=Tier(b), bytes_per_s=speed, delay_s=delay_s, links=count)
        for (a, b, speed, delay_s), count in sorted(counts.items())
    ]


def disconnected_groups(topology: Topology) -> list[list[int]]:
    """Return hosts, by index, in groups that no link joins. If there is one group, all are connected.

    Links count in both directions, because cables have two.
    """
    v, e = topology.vertices, topology.links
    label = np.arange(len(v), dtype=np.int64)
    while True:  # at most as many passes as the longest path has links
        least = label.copy()
        np.minimum.at(least, e.source, label[e.target])
        np.minimum.at(least, e.target, label[e.source])
        # Jump to the label of the label, so that long paths need few passes.
        least = least[least]
        if np.array_equal(least, label):
            break
        label = least
    groups: dict[int, set[int]] = {}
    inside = np.flatnonzero(v.host != NO_HOST)
    for part, host in zip(label[inside].tolist(), v.host[inside].tolist(), strict=True):
        groups.setdefault(part, set()).add(host)
    return sorted((sorted(hosts) for hosts in groups.values()), key=lambda hosts: hosts[0])


def bisection_bytes_per_s(topology: Topology) -> float | None:
    """Return the maximum flow from the first half of the ToRs, in order, to the others.

    Only switches count, not the bandwidth of hosts. If there are fewer than two ToRs, return None.
    """
    v, e = topology.vertices, topology.links
    tors = np.flatnonzero((v.tier == Tier.TOR) & (v.host == NO_HOST)).tolist()
    if len(tors) < 2:
        return None
    room: dict[int, dict[int, float]] = {}
    for link in np.flatnonzero(
        (v.host[e.source] == NO_HOST) & (v.host[e.target] == NO_HOST)
    ).tolist():
        a, b = int(e.source[link]), int(e.target[link])
        room.setdefault(a, {}).setdefault(b, 0.0)
        room[a][b] += float(e.bytes_per_s[link])
        room.setdefault(b, {}).setdefault(a, 0.0)
    source, sink, endless = -1, -2, float(e.bytes_per_s.sum())
    half = len(tors) // 2
    room[source], room[sink] = dict.fromkeys(tors[:half], endless), {}
    for tor in tors[:half]:
        room.setdefault(tor, {})[source] = 0.0
    for tor in tors[half:]:
        room.setdefault(tor, {})[sink] = endless
    return _flow(room, source, sink)


def _flow(room: dict[int, dict[int, float]], source: int, sink: int) -> float:
    """Return the maximum flow (Dinic 1970): shortest augmenting paths, one length at a time."""
    total, least = 0.0, 1e-9 * max(max(r.values(), default=0.0) for r in room.values())
    while sink in (level := _levels(room, source, least)):
        ahead = {a: [b for b in room[a] if level.get(b, -1) == level[a] + 1] for a in level}
        while path := _path(room, ahead, source, sink, least):
            sent = min(room[a][b] for a, b in path)
            for a, b in path:
                room[a][b] -= sent
                room[b][a] = room[b].get(a, 0.0) + sent
            total += sent
    return total


def _levels(room: dict[int, dict[int, float]], source: int, least: float) -> dict[int, int]:
    level, queue = {source: 0}, deque([source])
    while queue:
        at = queue.popleft()
        for then, left in room[at].items():
            if left > least and then not in level:
                level[then] = level[at] + 1
                queue.append(then)
    return level


def _path(
    room: dict[int, dict[int, float]],
    ahead: dict[int, list[int]],
    source: int,
    sink: int,
    least: float,
) -> list[tuple[int, int]]:
    """Return a path with remaining capacity. Dead ends are removed from ``ahead``."""
    path = [source]
    while path and path[-1] != sink:
        at = path[-1]
        while ahead[at] and room[at][ahead[at][-1]] <= least:
            ahead[at].pop()
        if ahead[at]:
            path.append(ahead[at][-1])
        else:
            path.pop()
            if path:
                ahead[path[-1]].pop()
    return list(pairwise(path))
