"""Routes between two GPUs: all shortest paths by links, and the links that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Bools, Floats, Ints, concatenate_ranges, run_starts
from tessera.formulation.state.topologies.fabric import Fabric, ListedPaths
from tessera.formulation.state.topologies.insides import NO_LINK, HostInsides
from tessera.formulation.state.topologies.topology import Topology

MAX_PATHS: Final = 64
"""Largest number of equal-cost paths that are listed.

Switches have a similar limit on groups of next hops.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """The ways of F flows from GPU to GPU: links that each always loads, and choices for the rest.

    A choice is a run of paths. Flows whose paths differ in the same links share it.
    """

    crosses: Bools  # (F,) goes through a port of a host
    fixed_flow: Ints  # (N,)
    fixed_link: Ints  # (N,)
    choice: Ints  # (F,) -1 if there is only one way
    choice_start: Ints  # (choices + 1,) into paths
    path_start: Ints  # (P + 1,)
    path_link: Ints
    total: Floats  # (F,) number of ways, listed or not; a flow without a way loads nothing


class Routes:
    """The ways through a topology, kept for later calls. Inside a host, NVLink goes before PCIe.

    ``most`` is the largest number of equal-cost paths that are listed. They are spread evenly over
    all paths in order of links. Traffic passes switches, but never a host that it neither comes
    from nor goes to.
    """

    def __init__(self, topology: Topology, most: int = MAX_PATHS) -> None:
        if most < 1:
            raise InvalidInput("most", f"is {most}; it must be at least 1")
        self.topology, self.most = topology, most
        self.insides = HostInsides(topology)
        self._fabric = Fabric(topology, self.insides.ports)

    def ways(self, source: Ints, target: Ints) -> Ways:
        """Return the ways of flows between pairs of different GPU vertices."""
        host = self.topology.vertices.host
        within = self.insides.between(source, target)
        crosses = host[source] != host[target]
        if within.shape[1]:
            within[crosses] = NO_LINK
        # GPUs of one host without a path inside it use the fabric.
        stuck = ~crosses & ~(within != NO_LINK).any(axis=1)
        crosses |= stuck
        total = np.ones(len(source))
        total[crosses] = 0
        out, into = self.insides.port(source), self.insides.port(target)
        # List the paths through the fabric once for each pair of attachments.
        over = np.flatnonzero(crosses & (out != NO_LINK) & (into != NO_LINK))
        ports = out[over], into[over]
        pairs, pair = np.unique(self._fabric.attachments(*ports), return_inverse=True)
        listed = self._fabric.listed(pairs, self.most)
        total[over] = listed.ways[pair]
        joined = total[over] > 0
        over, pair, ports = over[joined], pair[joined], (ports[0][joined], ports[1][joined])
        # Fixed links are those inside hosts, to and from ports, and common to all paths.
        parts = [(np.arange(len(source)), within)]
        parts += [
            (over, self.insides.leaving(source[over])),
            (over, self.insides.entering(target[over])),
        ]
        flow, link = _entries(parts)
        count = np.diff(listed.common_start)[pair]
        at = concatenate_ranges(listed.common_start[pair], count)
        shared = np.repeat(np.arange(len(over)), count)
        common = self._fabric.real(listed.common[at], ports[0][shared], ports[1][shared])
        choice, runs, paths = self._choices(listed, pair, *ports)
        chosen = np.full(len(source), -1, dtype=np.int64)
        chosen[over] = choice
        return Ways(
            crosses=crosses,
            fixed_flow=np.concatenate([flow, over[shared]]),
            fixed_link=np.concatenate([link, common]),
            choice=chosen,
            choice_start=runs,
            path_start=paths[0],
            path_link=paths[1],
            total=total,
        )

    def between(self, source: int, target: int) -> list[tuple[int, ...]]:
        """Return the listed paths from GPU to GPU, each as its links in order.

        Raises:
            InvalidInput: there is no path.
        """
        if source == target:
            return [()]
        ways = self._way(source, target)
        fixed = ways.fixed_link.tolist()
        if ways.choice[0] < 0:
            return [self._in_order(source, fixed)]
        cuts = ways.path_start[1:-1]
        return [
            self._in_order(source, [*fixed, *rest.tolist()])
            for rest in np.split(ways.path_link, cuts)
        ]

    def count(self, source: int, target: int) -> int:
        """Return the number of shortest paths from GPU to GPU, listed or not.

        Raises:
            InvalidInput: there is no path.
        """
        if source == target:
            return 1
        return int(self._way(source, target).total[0])

    def gap(self, source: int, target: int) -> str:
        """Return a sentence about two GPUs that no path joins, with advice."""
        none = f"no path from {self._name(source)} to {self._name(target)}"
        for end, verb in ((source, "leave"), (target, "reach")):
            if self.insides.port(np.array([end]))[0] == NO_LINK:
                return (
                    f"{none}: traffic cannot {verb} {self._name(end)}, because no port of its host leads"
                    " to a switch and back"
                )
        return f"{none}; join their switches, or place jobs so that they need no such path"

    def _way(self, source: int, target: int) -> Ways:
        ways = self.ways(np.array([source]), np.array([target]))
        if ways.total[0] == 0:
            raise InvalidInput("topology", f"has {self.gap(source, target)}")
        return ways

    def _choices(
        self, listed: ListedPaths, pair: Ints, out: Ints, into: Ints
    ) -> tuple[Ints, Ints, tuple[Ints, Ints]]:
        """Return the choice of each flow, the starts of choices' paths, and paths (starts, links).

        Paths that differ in a port's own links belong to that port. Others belong to all ports with
        the same attachments.
        """
        count = np.diff(listed.first)
        owner = np.repeat(np.repeat(np.arange(len(count)), count), np.diff(listed.path_start))
        up, down = self._fabric.at_ports(listed.path_link)
        # A choice belongs to a port only if its paths differ in links of that port.
        own_up = np.bincount(owner, up, minlength=len(count)) > 0
        own_down = np.bincount(owner, down, minlength=len(count)) > 0
        has = np.flatnonzero(count[pair] > 0)
        own = pair[has]
        a, b = np.where(own_up[own], out[has], -1), np.where(own_down[own], into[has], -1)
        size = len(self.topology.vertices) + 1
        # Flows with the same pair of attachments and the same such ports share a choice.
        key, of_choice, which = np.unique(
            (own * size + a + 1) * size + b + 1, return_index=True, return_inverse=True
        )
        choice = np.full(len(pair), -1, dtype=np.int64)
        choice[has] = which
        own, a, b = own[of_choice], a[of_choice], b[of_choice]
        path = concatenate_ranges(listed.first[own], count[own])
        length = np.diff(listed.path_start)[path]
        of_link = np.repeat(np.repeat(np.arange(len(key)), count[own]), length)
        links = listed.path_link[concatenate_ranges(listed.path_start[path], length)]
        return (
            choice,
            run_starts(count[own]),
            (run_starts(length), self._fabric.real(links, a[of_link], b[of_link])),
        )

    def _in_order(self, at: int, links: list[int]) -> tuple[int, ...]:
        e, host = self.topology.links, self.topology.vertices.host
        leaves: dict[int, list[int]] = {}
        for link in sorted(links, key=lambda link: -int(host[e.target[link]])):
            leaves.setdefault(int(e.source[link]), []).append(link)
        path = []
        while left := leaves.get(at):
            path.append(left.pop())  # a port that is passed twice leads to its switch first
            at = int(e.target[path[-1]])
        return tuple(path)

    def _name(self, vertex: int) -> str:
        return self.topology.vertices.name[vertex]


def _entries(rows: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Return (flow, link) of rows of links that are padded with ``NO_LINK``."""
    flows, links = [], []
    for flow, of_row in rows:
        at, column = np.nonzero(of_row != NO_LINK)
        flows.append(flow[at])
        links.append(of_row[at, column])
    return np.concatenate(flows), np.concatenate(links)
