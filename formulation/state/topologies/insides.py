"""Paths inside hosts: between two GPUs, and between a GPU and the port by which its traffic leaves.

Hosts that look alike are searched once. There is no choice of paths here (Crux 4.1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.tables import Bools, Ints
from tessera.formulation.state.topologies.topology import NO_HOST, Tier, Topology

RELAY_TIERS = (Tier.NVSWITCH, Tier.PCIE)
"""Tiers that pass traffic on inside a host. A GPU or a NIC does not."""

NO_LINK = -1
"""Stands for no port or no link, and pads rows."""


class HostInsides:
    """The insides of all hosts. Rows of links are padded with ``NO_LINK`` at the end.

    A port is a vertex in a host with links from and to a switch, usually a NIC. Traffic of a GPU
    leaves by the nearest port, in hops. GPUs that are equally near to several ports take turns.
    """

    def __init__(self, topology: Topology) -> None:
        v, e = topology.vertices, topology.links
        home, away = v.host[e.source], v.host[e.target]
        is_port = np.zeros(len(v), dtype=np.bool_)
        is_port[e.source[(home != NO_HOST) & (away == NO_HOST)]] = True
        enters = np.zeros(len(v), dtype=np.bool_)
        enters[e.target[(home == NO_HOST) & (away != NO_HOST)]] = True
        is_port &= enters
        self.ports: Ints = np.flatnonzero(is_port)
        hosts = len(topology.hosts)
        self._host = v.host
        vertices, starts = _by_host(v.host, hosts)
        within = np.where(home == away, home, NO_HOST)
        self._link, self._link_start = _by_host(within, hosts)
        self._local = np.full(len(v), NO_LINK, dtype=np.int64)
        self._local[vertices] = np.arange(len(vertices)) - starts[v.host[vertices]]
        self._kinds: list[_Kind] = []
        self._kind_of = np.empty(hosts, dtype=np.int64)
        known: dict[tuple[bytes, ...], int] = {}
        for host in range(hosts):
            own = vertices[starts[host] : starts[host + 1]]
            links = self._link[self._link_start[host] : self._link_start[host + 1]]
            ends = self._local[e.source[links]], self._local[e.target[links]]
            looks = (
                v.tier[own].tobytes(),
                is_port[own].tobytes(),
                *(end.tobytes() for end in ends),
            )
            if looks not in known:
                known[looks] = len(self._kinds)
                self._kinds.append(_searched(v.tier[own], is_port[own], *ends))
            self._kind_of[host] = known[looks]
        self._vertices, self._starts = vertices, starts

    def port(self, gpus: Ints) -> Ints:
        """Return the port of each GPU vertex. It is ``NO_LINK`` if traffic cannot leave the host."""
        ports = np.full(len(gpus), NO_LINK, dtype=np.int64)
        host = self._host[gpus]
        for kind, at in self._split(gpus):
            port = kind.port[self._local[gpus[at]]]
            has = port != NO_LINK
            ports[at[has]] = self._vertices[self._starts[host[at[has]]] + port[has]]
        return ports

    def leaving(self, gpus: Ints) -> Ints:
        """Return the links from each GPU vertex to its port, int64[GPUs, most]."""
        return self._links(
            gpus, [kind.out[self._local[gpus[at]]] for kind, at in self._split(gpus)]
        )

    def entering(self, gpus: Ints) -> Ints:
        """Return the links from its port to each GPU vertex, int64[GPUs, most]."""
        return self._links(
            gpus, [kind.back[self._local[gpus[at]]] for kind, at in self._split(gpus)]
        )

    def between(self, source: Ints, target: Ints) -> Ints:
        """Return the links from GPU to GPU of one host each, int64[pairs, most].

        A row without links means that there is no path inside the host.
        """
        rows = [
            kind.within[self._local[source[at]], self._local[target[at]]]
            for kind, at in self._split(source)
        ]
        return self._links(source, rows)

    def _split(self, gpus: Ints) -> list[tuple[_Kind, Ints]]:
        kind = self._kind_of[self._host[gpus]]
        return [(k, np.flatnonzero(kind == i)) for i, k in enumerate(self._kinds)]

    def _links(self, gpus: Ints, local: list[Ints]) -> Ints:
        """Return rows of links, given the rows of each kind of host in its own numbers."""
        links = np.full(
            (len(gpus), max((r.shape[1] for r in local), default=0)), NO_LINK, dtype=np.int64
        )
        begin = self._link_start[self._host[gpus]]
        for (_, at), rows in zip(self._split(gpus), local, strict=True):
            has = rows != NO_LINK
            row, column = np.nonzero(has)
            links[at[row], column] = self._link[begin[at[row]] + rows[has]]
        return links


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """Paths inside one kind of host, in the host's own numbers of vertices (n) and links."""

    port: Ints  # (n,)
    out: Ints  # (n, most)
    back: Ints  # (n, most)
    within: Ints  # (n, n, most)


def _by_host(host: Ints, hosts: int) -> tuple[Ints, Ints]:
    """Return the indices that have a host, sorted by host, and the start of each, (hosts + 1,)."""
    order = np.argsort(host, kind="stable")
    starts = np.searchsorted(host[order], np.arange(hosts + 1))
    return order[starts[0] : starts[-1]], starts - starts[0]


def _searched(tier: Ints, is_port: Bools, source: Ints, target: Ints) -> _Kind:
    """Search the paths of a host: NVLink first, then everything."""
    count = len(tier)
    tiers = tier.tolist()
    out: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for link, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        out[a].append((link, b))
    relays = {i for i in range(count) if tiers[i] in RELAY_TIERS}
    switches = {i for i in range(count) if tiers[i] == Tier.NVSWITCH}
    ports = np.flatnonzero(is_port).tolist()
    gpus = [i for i in range(count) if tiers[i] == Tier.GPU]
    entries = {port: _paths(out, port, relays) for port in ports}
    within: dict[tuple[int, int], list[int]] = {}
    leaves: dict[int, list[int]] = {}
    comes: dict[int, list[int]] = {}
    port_of: dict[int, int] = {}
    turns: dict[tuple[int, ...], int] = {}
    for gpu in gpus:
        paths = _paths(out, gpu, relays)
        # NVLink is preferred, so look for paths through NVSwitches only.
        direct = _paths(out, gpu, switches)
        within |= {
            (gpu, other): (direct.get(other) or paths.get(other, []))
            for other in gpus
            if other != gpu
        }
        # Traffic must be able to leave by a port and to come back.
        usable = [port for port in ports if port in paths and gpu in entries[port]]
        near = min((len(paths[port]) for port in usable), default=0)
        nearest = tuple(port for port in usable if len(paths[port]) == near)
        if not nearest:
            continue
        # GPUs that are equally near to several ports take turns.
        turn = turns.get(nearest, 0)
        turns[nearest] = turn + 1
        port_of[gpu] = port = nearest[turn % len(nearest)]
        leaves[gpu], comes[gpu] = paths[port], entries[port][gpu]
    nearest_port = np.full(count, NO_LINK, dtype=np.int64)
    nearest_port[list(port_of)] = list(port_of.values())
    longest = max(map(len, within.values()), default=0)
    pairs = np.full((count, count, longest), NO_LINK, dtype=np.int64)
    for ends, links in within.items():
        pairs[ends][: len(links)] = links
    return _Kind(
        port=nearest_port, out=_rows(leaves, count), back=_rows(comes, count), within=pairs
    )


def _paths(out: list[list[tuple[int, int]]], start: int, relays: set[int]) -> dict[int, list[int]]:
    """Return the links of a shortest path from ``start`` to each reachable vertex.

    Among equal paths, the one found with the first links is used.
    """
    path_to: dict[int, list[int]] = {start: []}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if at != start and at not in relays:
            continue
        for link, neighbor in out[at]:
            if neighbor not in path_to:
                path_to[neighbor] = [*path_to[at], link]
                queue.append(neighbor)

    return path_to


def _rows(links: dict[int, list[int]], count: int) -> Ints:
    rows = np.full((count, max(map(len, links.values()), default=0)), NO_LINK, dtype=np.int64)
    for row, of_row in links.items():
        rows[row, : len(of_row)] = of_row
    return rows
