"""Small topologies and jobs on them, and the paths of a network by plain search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.formulation.answer.network.flows import NetworkJob
from tessera.formulation.state.topologies.builders import (
    build_clos,
    build_double_sided,
    build_lingjun,
    build_torus,
)
from tessera.formulation.state.topologies.shapes import A100_HOST, HostShape
from tessera.formulation.state.topologies.topology import Links, Tier, Topology
from tessera.formulation.state.traffic import Exchange, Pattern, Traffic


def host_names(count: int) -> list[str]:
    return [f"host-{i}" for i in range(count)]


def a_shape(gpus: int = 2, nics: int = 1, pcie: int = 1, **rest: Any) -> HostShape:
    return HostShape(
        **{
            "gpus": gpus,
            "nics": nics,
            "pcie_switches": pcie,
            "nic_bytes_per_s": 25e9,
            "pcie_bytes_per_s": 32e9,
            "nvlink_bytes_per_s": 300e9,
        }
        | rest
    )


def a_clos(count: int = 4, shape: HostShape | None = None, **rest: Any) -> Topology:
    numbers = {"tors": 2, "aggregations": 2, "tor_bytes_per_s": 10e9} | rest
    return build_clos(host_names(count), shape or a_shape(), **numbers)


def a_double_sided(count: int = 4, shape: HostShape | None = None, **rest: Any) -> Topology:
    numbers = {
        "tors": 4,
        "aggregations": 4,
        "cores": 4,
        "tor_bytes_per_s": 10e9,
        "aggregation_bytes_per_s": 10e9,
    } | rest
    return build_double_sided(host_names(count), shape or a_shape(), **numbers)


def a_torus(*sizes: int, shape: HostShape | None = None) -> Topology:
    count = int(np.prod(sizes))
    return build_torus(host_names(count), shape or a_shape(), sizes=sizes, link_bytes_per_s=10e9)


def a_lingjun(rows: Sequence[tuple[str, str, str, str]], **rest: Any) -> Topology:
    numbers = {
        "ports_per_nic": 2,
        "asw_cables": 2,
        "psw_cables": 3,
        "asw_bytes_per_s": 10e9,
        "psw_bytes_per_s": 20e9,
    } | rest
    return build_lingjun(rows, A100_HOST, **numbers)


def a_job(
    gang: Sequence[tuple[str, Sequence[int]]], *exchanges: Exchange, name: str = "job"
) -> NetworkJob:
    return NetworkJob(
        name=name,
        gang=tuple((host, tuple(indices)) for host, indices in gang),
        traffic=Traffic(work_flop=1e12, compute_s=1.0, start_s=0.5, exchanges=exchanges),
    )


def an_exchange(
    members: Sequence[Sequence[int]],
    sent_bytes: float = 12.0,
    pattern: Pattern = Pattern.RING,
    messages: int = 1,
) -> Exchange:
    return Exchange(
        pattern=pattern,
        members=np.array(members, dtype=np.int64),
        sent_bytes=sent_bytes,
        messages=messages,
    )


def gpu(topology: Topology, host: int, index: int = 0) -> int:
    return int(topology.gpus_of(host)[index])


def vertex_names(topology: Topology, path: Sequence[int]) -> list[str]:
    """Return the names of the vertices on a path of links, without the first."""
    return [topology.vertices.name[topology.links.target[link]] for link in path]


def shortest_paths(topology: Topology, source: int, target: int) -> set[tuple[int, ...]]:
    """Return all shortest paths by plain search over whole paths that do not cross other hosts."""
    out: dict[int, list[int]] = defaultdict(list)
    ends = topology.links.target.tolist()
    for link, vertex in enumerate(topology.links.source.tolist()):
        out[vertex].append(link)
    tier, host = topology.vertices.tier.tolist(), topology.vertices.host.tolist()
    own = {host[source], host[target]}
    passes = {
        v
        for v in range(len(tier))
        if tier[v] not in (Tier.GPU, Tier.NIC) or (tier[v] == Tier.NIC and host[v] in own)
    }
    fronts: list[tuple[int, ...]] = [()]
    seen = {source}
    while fronts:
        longer = [
            (*path, link)
            for path in fronts
            for at in [ends[path[-1]] if path else source]
            if at == source or at in passes
            for link in out[at]
            if ends[link] not in seen
        ]
        reached = {path for path in longer if ends[path[-1]] == target}
        if reached:
            return reached
        seen |= {ends[path[-1]] for path in longer}
        fronts = longer
    return set()


def without_links(topology: Topology, *pairs: tuple[str, str]) -> Topology:
    """Return the topology without the links from the first to the second vertex of each pair."""
    e, v = topology.links, topology.vertices.name
    keep = np.array([(v[a], v[b]) not in pairs for a, b in zip(e.source, e.target, strict=True)])
    links = Links(
        source=e.source[keep],
        target=e.target[keep],
        bytes_per_s=e.bytes_per_s[keep],
        delay_s=e.delay_s[keep],
    )
    return replace(topology, links=links)


def write_columns(topology: Topology) -> dict[str, Any]:
    """Return a document of the topology, column by column, with the same numbering."""
    v, e = topology.vertices, topology.links
    return {
        "kind": "columns",
        "adaptive": topology.adaptive,
        "hosts": list(topology.hosts),
        "vertices": {"name": list(v.name), "tier": v.tier.tolist(), "host": v.host.tolist()},
        "links": {
            name: getattr(e, name).tolist()
            for name in ("source", "target", "bytes_per_s", "delay_s")
        },
    }
