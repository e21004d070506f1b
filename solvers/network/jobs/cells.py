"""The hierarchy of a cluster as HiveD sees it, derived from a topology."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import IntEnum

import numpy as np

from tessera.formulation.base.tables import Ints
from tessera.formulation.state.topologies.topology import NO_HOST, Tier, Topology


class CellLevel(IntEnum):
    """The kinds of HiveD's cells, from small to large."""

    GPU = 0
    PCIE = 1
    HOST = 2
    RACK = 3
    POD = 4
    CLUSTER = 5


def cell_hierarchy(topology: Topology) -> Ints:
    """Return the cell of each GPU on each level, int64[levels, GPUs]; GPUs by host, then by index.

    The cells of a level are numbered from 0 in the order of their first GPUs. GPUs at the same PCIe
    switches form a cell; on a host without such switches, all GPUs form one. Hosts at the same
    switches of the fabric form a rack. Racks whose switches link up to the same other switches form
    a pod. A unit with no switch above it is alone on that level.
    """
    t = topology
    vertex = np.concatenate([t.gpus_of(h) for h in range(len(t.hosts))]).tolist()
    host = t.vertices.host[vertex].tolist()
    pcie, uplinks, above = _neighbors(t)
    racks = [frozenset(uplinks.get(h, ())) for h in range(len(t.hosts))]
    rack: list[Hashable] = [racks[h] or h for h in host]
    pods = {r: frozenset(s for tor in r for s in above.get(tor, ())) for r in set(racks)}
    return np.stack(
        [
            _numbered(vertex),
            _numbered((h, frozenset(pcie.get(v, ()))) for h, v in zip(host, vertex, strict=True)),
            _numbered(host),
            _numbered(rack),
            _numbered(pods[racks[h]] or r for h, r in zip(host, rack, strict=True)),
            _numbered(0 for _ in vertex),
        ]
    )


_Reached = dict[int, set[int]]


def _neighbors(topology: Topology) -> tuple[_Reached, _Reached, _Reached]:
    """Return the PCIe switches of GPUs, the fabric switches of hosts, and those above each."""
    v, e = topology.vertices, topology.links
    pcie: _Reached = {}
    uplinks: _Reached = {}
    above: _Reached = {}
    tier, host = v.tier.tolist(), v.host.tolist()
    for a, b in zip(e.source.tolist(), e.target.tolist(), strict=True):
        if host[a] == NO_HOST:
            if host[b] == NO_HOST and tier[b] > tier[a]:
                above.setdefault(a, set()).add(b)
        elif host[b] == NO_HOST:
            uplinks.setdefault(host[a], set()).add(b)
        elif tier[a] == Tier.GPU and tier[b] == Tier.PCIE:
            pcie.setdefault(a, set()).add(b)
    return pcie, uplinks, above


def _numbered(keys: Iterable[Hashable]) -> Ints:
    """Return a number for each key, in the order of first occurrence.

    Equal keys get equal numbers.
    """
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
