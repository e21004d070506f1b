"""Equal-cost paths between ports of hosts, through switches (ECMP).

Paths depend only on the switches that two ports are attached to. They are therefore listed once for
each pair of attachments: the switches of a port's outgoing links, and those of another port's
incoming links.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from tessera.formulation.base.tables import (
    Bools,
    Floats,
    Ints,
    concatenate_ranges,
    run_starts,
    sum_by_group,
)
from tessera.formulation.state.topologies.topology import NO_HOST, Topology

GOLDEN_RATIO: Final = (5**0.5 - 1) / 2

MAX_CACHED_NUMBERS: Final = 2**26
"""Largest number of integers and floats of earlier searches that are kept, 512 MiB.

On a torus, their number grows by switches squared.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedPaths:
    """Shortest paths of P pairs of attachments, M in all.

    A link below the topology's number of links is that link. Other numbers are placeholders for the
    n-th link of a port (``Fabric.real``). Links that all paths of a pair share are its common
    links; paths hold the rest.
    """

    ways: Floats  # (P,) number of paths; 0 if there is no path
    common_start: Ints  # (P + 1,)
    common: Ints
    first: Ints  # (P + 1,) the paths of a pair; a pair with only one path has none here
    path_start: Ints  # (M + 1,)
    path_link: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Hops:
    """The next hops of traffic to one attachment: N entries in order of vertex, then of link."""

    distance: Ints  # (switches,) links to the port; -1 if there is no path
    ways: Floats  # (switches,)
    vertex: Ints  # (N,)
    link: Ints  # (N,)
    then: Ints  # (N,) vertex

    @property
    def numbers(self) -> int:
        """Return the number of integers and floats that this holds."""
        return 2 * len(self.distance) + 3 * len(self.vertex)


class _Ends:
    """Links between ports and switches by port, and the groups of ports with equal attachments."""

    def __init__(self, ports: Ints, port: Ints, switch: Ints, link: Ints, first: int) -> None:
        order = np.lexsort((link, port))
        self.link = link[order]
        self.start = np.searchsorted(port[order], ports)
        count = np.searchsorted(port[order], ports, side="right") - self.start
        known: dict[bytes, int] = {}
        kinds: list[Ints] = []
        self.kind = np.empty(len(ports), dtype=np.int64)
        for i, (begin, size) in enumerate(zip(self.start.tolist(), count.tolist(), strict=True)):
            own = switch[order[begin : begin + size]]
            self.kind[i] = known.setdefault(own.tobytes(), len(kinds))
            if self.kind[i] == len(kinds):
                kinds.append(own)
        sizes = np.array([len(k) for k in kinds], dtype=np.int64)
        self.kind_start = run_starts(sizes)
        self.switch = np.concatenate(kinds) if kinds else np.empty(0, dtype=np.int64)
        self.place = concatenate_ranges(np.zeros_like(sizes), sizes)  # n-th of its port
        self.first = first  # number of the first placeholder


class Fabric:
    """The switches of a network, and the attachment of ``ports`` (vertices, rising) to them."""

    def __init__(self, topology: Topology, ports: Ints) -> None:
        v, e = topology.vertices, topology.links
        inside = v.host != NO_HOST
        switches = np.flatnonzero(~inside)
        number = np.full(len(v), -1, dtype=np.int64)
        number[switches] = np.arange(len(switches))
        self._switches = len(switches)
        source, target = number[e.source], number[e.target]
        link = np.arange(len(e), dtype=np.int64)
        among = np.flatnonzero((source >= 0) & (target >= 0))
        among = among[np.argsort(target[among], kind="stable")]
        self._into, self._out_of, self._among = target[among], source[among], among
        self._into_start = np.searchsorted(self._into, np.arange(len(switches) + 1))
        up = np.flatnonzero(np.isin(e.source, ports) & (target >= 0))
        down = np.flatnonzero(np.isin(e.target, ports) & (source >= 0))
        self._ports = ports
        self._up = _Ends(ports, e.source[up], target[up], link[up], len(e))
        after = len(e) + len(self._up.switch)
        self._down = _Ends(ports, e.target[down], source[down], link[down], after)
        self._hops: dict[int, _Hops] = {}
        self._kept = 0  # numbers in them

    def attachments(self, source: Ints, target: Ints) -> Ints:
        """Return a number for the attachments of each pair of ports, for use with ``listed``."""
        up = self._up.kind[np.searchsorted(self._ports, source)]
        down = self._down.kind[np.searchsorted(self._ports, target)]
        attachments: Ints = down * (len(self._up.kind_start) - 1) + up
        return attachments

    def at_ports(self, link: Ints) -> tuple[Bools, Bools]:
        """Return whether each link is a placeholder of the source's port, and of the target's."""
        down = link >= self._down.first
        return (link >= self._up.first) & ~down, down

    def real(self, link: Ints, source: Ints, target: Ints) -> Ints:
        """Return links of the topology for links of ``ListedPaths``, each between two ports."""
        real = link.copy()
        up, down = self.at_ports(link)
        for ends, port, mask in ((self._up, source, up), (self._down, target, down)):
            at = np.searchsorted(self._ports, port[mask])
            real[mask] = ends.link[ends.start[at] + ends.place[link[mask] - ends.first]]
        return real

    def listed(self, pairs: Ints, most: int) -> ListedPaths:
        """Return the shortest paths of each pair of attachments, in order of their links.

        If there are more than ``most``, the order is cut into ``most`` equal runs, and one path is
        taken from each.

        Args:
            pairs: numbers of ``attachments``, rising, each once.
        """
        kinds = len(self._up.kind_start) - 1
        down, up = np.divmod(pairs, max(kinds, 1))
        ends, begins = np.unique(down, return_index=True)
        runs = pairwise([*begins.tolist(), len(pairs)])
        parts = [
            self._toward(int(end), up[begin:until], most)
            for end, (begin, until) in zip(ends, runs, strict=True)
        ]
        return _joined(parts)

    def _toward(self, down: int, up: Ints, most: int) -> ListedPaths:
        """Return the shortest paths from attachments ``up`` to one attachment."""
        hops = self._hops_to(down)
        # List the links from the ports of the attachments to switches.
        count = np.diff(self._up.kind_start)[up]
        at = concatenate_ranges(self._up.kind_start[up], count)
        owner = np.repeat(np.arange(len(up)), count)
        switch = self._up.switch[at]
        # Only the switches nearest to the target are on shortest paths.
        distance = np.where(
            hops.distance[switch] < 0, np.iinfo(np.int64).max, hops.distance[switch]
        )
        nearest = np.minimum.reduceat(distance, np.cumsum(count) - count)
        use = (distance == nearest[owner]) & (hops.distance[switch] >= 0)
        ways = sum_by_group(owner[use], hops.ways[switch[use]], len(up))
        first = self._switches + 1 + owner[use]  # the attachments follow the switches and the end
        chooser = _Chooser(
            vertex=np.concatenate([hops.vertex, first]),
            link=np.concatenate([hops.link, self._up.first + at[use]]),
            then=np.concatenate([hops.then, switch[use]]),
            ways=np.concatenate([hops.ways, [1.0], ways]),
        )
        # Take up to ``most`` paths of each attachment, at places spread over all of its ways.
        taken = np.minimum(ways, most).astype(np.int64)
        owner = np.repeat(np.arange(len(up)), taken)
        share = _spread(concatenate_ranges(np.zeros_like(taken), taken), taken[owner], ways[owner])
        start = self._switches + 1 + owner
        links = chooser.paths(start, share, end=self._switches)
        return _split(links, owner, taken, ways)

    def _hops_to(self, down: int) -> _Hops:
        """Return the result of ``_search``. It is kept for later if there is room."""
        if (known := self._hops.get(down)) is not None:
            return known
        hops = self._search(down)
        if self._kept + hops.numbers <= MAX_CACHED_NUMBERS:
            self._hops[down] = hops
            self._kept += hops.numbers
        return hops

    def _search(self, down: int) -> _Hops:
        """Search breadth first from one attachment, against the direction of links."""
        slots = np.arange(*self._down.kind_start[down : down + 2])
        ends = self._down.switch[slots]
        distance = np.full(self._switches, -1, dtype=np.int64)
        ways = sum_by_group(ends, np.ones(len(ends)), self._switches)
        vertex, link = [ends], [self._down.first + slots]
        then = [np.full(len(ends), self._switches)]
        frontier, depth = np.unique(ends), 1
        # Each pass reaches the switches that are one hop further away.
        while len(frontier):
            distance[frontier] = depth
            begin = self._into_start[frontier]
            at = concatenate_ranges(begin, self._into_start[frontier + 1] - begin)
            at = at[distance[self._out_of[at]] < 0]
            ways += sum_by_group(self._out_of[at], ways[self._into[at]], self._switches)
            vertex.append(self._out_of[at])
            link.append(self._among[at])
            then.append(self._into[at])
            frontier, depth = np.unique(self._out_of[at]), depth + 1
        return _Hops(
            distance=distance,
            ways=ways,
            vertex=np.concatenate(vertex),
            link=np.concatenate(link),
            then=np.concatenate(then),
        )


class _Chooser:
    """A selector of paths by their place in order.

    A place in [0, 1) picks a link at each vertex, by the number of ways beyond the link.
    """

    def __init__(self, *, vertex: Ints, link: Ints, then: Ints, ways: Floats) -> None:
        order = np.lexsort((link, vertex))
        self._link, self._then = link[order], then[order]
        at = vertex[order]
        self._share = ways[self._then] / ways[at]
        new = np.diff(at, prepend=-1) != 0
        begin = np.flatnonzero(new)
        group = np.cumsum(new) - 1
        # Sum the shares within the links of each vertex, so that each vertex ends at 1.
        total = np.cumsum(self._share)
        before = total - self._share
        self._before = np.maximum(before - before[begin][group], 0.0)
        upto = total - before[begin][group]
        upto[np.append(begin[1:], len(at)) - 1] = 1.0
        # One rising key for all vertices: the vertex's group plus its summed share.
        self._key = group + upto
        self._group = np.full(len(ways), -1, dtype=np.int64)
        self._group[at[begin]] = np.arange(len(begin))

    def paths(self, vertex: Ints, share: Floats, *, end: int) -> Ints:
        """Return the links of each path, int64[paths, longest]. They are -1 after the end."""
        columns: list[Ints] = []
        active = np.arange(len(vertex))
        vertex, share = vertex.copy(), share.copy()
        while len(active):
            # A place falls into the share of one link. Rescale it for the choices beyond that link.
            at = np.searchsorted(
                self._key, self._group[vertex[active]] + share[active], side="right"
            )
            column = np.full(len(vertex), -1, dtype=np.int64)
            column[active] = self._link[at]
            columns.append(column)
            rest = (share[active] - self._before[at]) / self._share[at]
            share[active] = np.clip(rest, 0.0, 1.0 - 1e-9)
            vertex[active] = self._then[at]
            active = active[vertex[active] != end]
        return np.stack(columns, axis=1) if columns else np.empty((len(vertex), 0), dtype=np.int64)


def _spread(index: Ints, taken: Ints, ways: Floats) -> Floats:
    """Return the place of each taken path among all ways, as a share: one in each of equal runs.

    There are ``taken`` runs. The position within a run varies by the golden ratio, because with
    equal distances all paths would end with the same link.
    """
    low, high = np.floor(index * ways / taken), np.floor((index + 1) * ways / taken)
    place: Floats = (low + np.floor(index * GOLDEN_RATIO % 1.0 * (high - low)) + 0.5) / ways
    return place


def _split(links: Ints, owner: Ints, taken: Ints, ways: Floats) -> ListedPaths:
    """Separate the links that all paths of an owner share from the others.

    Paths of an owner are equally long, and a link is equally far from the end in each. It is
    therefore always in the same column.
    """
    width = links.shape[1]
    common = np.zeros((len(taken), width), dtype=np.bool_)
    lowest = np.full((len(taken), width), -1, dtype=np.int64)
    some = np.flatnonzero(taken)
    if len(some) and width:
        # A link is common to all paths if the lowest and the highest link of a column are equal.
        begin = (np.cumsum(taken) - taken)[some]
        lowest[some] = np.minimum.reduceat(links, begin, axis=0)
        common[some] = (lowest[some] == np.maximum.reduceat(links, begin, axis=0)) & (
            lowest[some] >= 0
        )
    rows = taken[owner] > 1
    keep = (links[rows] >= 0) & ~common[owner[rows]]
    return ListedPaths(
        ways=ways,
        common_start=run_starts(common.sum(axis=1)),
        common=lowest[common],
        first=run_starts(np.where(taken > 1, taken, 0)),
        path_start=run_starts(keep.sum(axis=1)),
        path_link=links[rows][keep],
    )


def _joined(parts: list[ListedPaths]) -> ListedPaths:
    none = np.empty(0, dtype=np.int64)
    return ListedPaths(
        ways=np.concatenate([p.ways for p in parts]) if parts else np.empty(0),
        common_start=run_starts(np.concatenate([none, *(np.diff(p.common_start) for p in parts)])),
        common=np.concatenate([none, *(p.common for p in parts)]),
        first=run_starts(np.concatenate([none, *(np.diff(p.first) for p in parts)])),
        path_start=run_starts(np.concatenate([none, *(np.diff(p.path_start) for p in parts)])),
        path_link=np.concatenate([none, *(p.path_link for p in parts)]),
    )
