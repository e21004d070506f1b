"""Laws of paths and flows, against plain searches and sums."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.network.flows import NetworkJob, build_contention
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.document import build_topology
from tessera.formulation.state.topologies.measures import bisection_bytes_per_s
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.topology import NO_HOST, Topology
from tessera.formulation.state.traffic import Pattern
from tests.support.laws import examples
from tests.support.topologies import (
    a_clos,
    a_double_sided,
    a_job,
    a_shape,
    a_torus,
    an_exchange,
    gpu,
    shortest_paths,
)


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    """Return hosts of one GPU and one NIC on randomly joined switches; some links are one-way."""
    hosts, switches = draw(st.integers(2, 4)), draw(st.integers(1, 7))
    number = st.integers(0, switches - 1)
    speed: dict[str, Any] = {"bytes_per_s": 1e9}
    links = [
        {"from": f"host-{h}", "to": f"s{s}"} | speed
        for h in range(hosts)
        for s in draw(st.lists(number, min_size=1, max_size=3))
    ]
    for a, b, one_way in draw(st.lists(st.tuples(number, number, st.booleans()), max_size=18)):
        if a != b:
            links.append({"from": f"s{a}", "to": f"s{b}", "one_way": one_way} | speed)
    return build_topology(
        {
            "hosts": hosts,
            "host": {
                "gpus": 1,
                "nics": 1,
                "pcie_switches": 1,
                "nic_bytes_per_s": 1e9,
                "pcie_bytes_per_s": 1e9,
            },
            "switches": [{"name": f"s{i}", "tier": "tor"} for i in range(switches)],
            "links": links,
        }
    )


@examples(60)
@given(fabrics(), st.integers(1, 12))
def test_listed_paths_are_shortest_paths_and_complete_below_the_limit(
    topology: Topology, most: int
) -> None:
    routes, count = Routes(topology, most), len(topology.hosts)
    for a, b in ((a, b) for a in range(count) for b in range(count) if a != b):
        ends = gpu(topology, a), gpu(topology, b)
        every = shortest_paths(topology, *ends)
        if not every:
            with pytest.raises(InvalidInput, match=f"host-{a}/gpu-0 to host-{b}/gpu-0"):
                routes.between(*ends)
            continue
        paths = routes.between(*ends)
        assert len(paths) == len(set(paths)) == min(most, len(every))
        assert set(paths) <= every
        assert routes.count(*ends) == len(every)


@examples(80)
@given(
    st.integers(2, 4),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 5)), max_size=24),
)
def test_the_bisection_bandwidth_is_the_minimum_cut_between_the_halves(
    tors: int, others: int, links: list[tuple[int, int, int]]
) -> None:
    count = tors + others
    kept = [(a % count, b % count, size) for a, b, size in links if a % count != b % count]
    topology = build_topology(
        {
            "hosts": 1,
            "host": "pcie",
            "switches": [
                {"name": f"s{i}", "tier": "tor" if i < tors else "core"} for i in range(count)
            ],
            "links": [
                {"from": f"s{a}", "to": f"s{b}", "bytes_per_s": size * 1e9, "one_way": True}
                for a, b, size in kept
            ],
        }
    )
    half = set(range(tors // 2))
    cuts = [
        sum(size for a, b, size in kept if a in side and b not in side)
        for chosen in product((False, True), repeat=others)
        for side in [half | {tors + i for i, on_this_side in enumerate(chosen) if on_this_side}]
    ]
    assert bisection_bytes_per_s(topology) == pytest.approx(min(cuts) * 1e9)


TOPOLOGIES = (
    a_clos(5, a_shape(gpus=4, nics=2, pcie=2), aggregations=3),
    a_clos(5, a_shape(gpus=4, nics=2, pcie=2, nvlink_bytes_per_s=0.0), tors=1),
    a_double_sided(5, a_shape(gpus=4, nics=2, pcie=2)),
    a_torus(5, 1, shape=a_shape(gpus=4, nics=4, pcie=4)),
)


@st.composite
def placed_jobs(draw: st.DrawFn) -> NetworkJob:
    """Draw a job with any exchanges, on some of five hosts of four GPUs."""
    every = [(h, i) for h in range(5) for i in range(4)]
    chosen = sorted(draw(st.lists(st.sampled_from(every), min_size=2, max_size=12, unique=True)))
    gang: dict[str, list[int]] = defaultdict(list)
    for host, index in chosen:
        gang[f"host-{host}"].append(index)
    exchanges = []
    for pattern in draw(st.lists(st.sampled_from(list(Pattern)), min_size=1, max_size=3)):
        ranks = draw(st.permutations(range(len(chosen))))
        size = draw(st.integers(1, len(chosen)))
        groups = len(chosen) // size
        members = np.array(ranks[: groups * size]).reshape(groups, size)
        exchanges.append(an_exchange(members.tolist(), draw(st.floats(1.0, 100.0)), pattern))
    return a_job(sorted(gang.items()), *exchanges)


def traffic_by_hand(
    topology: Topology, job: NetworkJob
) -> tuple[dict[int, float], dict[int, float], float]:
    """Return the bytes that each GPU sends, that each receives, and bytes between hosts, by plain loops."""
    vertex = [gpu(topology, topology.hosts.index(h), i) for h, indices in job.gang for i in indices]
    host = topology.vertices.host
    out: dict[int, float] = defaultdict(float)
    into: dict[int, float] = defaultdict(float)
    across = 0.0

    def send(a: int, b: int, size: float) -> None:
        nonlocal across
        out[a] += size
        into[b] += size
        across += size if host[a] != host[b] else 0.0

    for exchange in job.traffic.exchanges:
        for group in exchange.members.tolist():
            members = [vertex[rank] for rank in group]
            size, count = exchange.sent_bytes, len(members)
            if exchange.pattern is Pattern.ALL:
                pairs = [(a, b) for a in members for b in members if a != b]
            elif exchange.pattern is Pattern.CHAIN:
                steps = list(pairwise(members))
                pairs = steps + [(b, a) for a, b in steps]
            else:  # hosts in a ring; each member is a channel for its part
                pairs = []
                hosts = {int(host[a]) for a in members}
                for a in members if count > 1 else []:
                    out[a] += size
                    into[a] += size
                across += size * len(hosts) if len(hosts) > 1 else 0.0
                for here in hosts if len(hosts) > 1 else ():
                    mine = [a for a in members if host[a] == here]
                    for a in mine:  # a host sends as one member would, in equal parts
                        out[a] += size / len(mine) + size * (len(mine) - 1) / len(mine) - size
                        into[a] += size / len(mine) + size * (len(mine) - 1) / len(mine) - size
            for a, b in pairs:
                send(a, b, size)
    return out, into, across


@examples(60)
@given(st.sampled_from(TOPOLOGIES), placed_jobs(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_bytes_are_conserved_along_paths(
    topology: Topology, job: NetworkJob, qps: int, seed: int
) -> None:
    found, _ = build_contention(topology, [job], qps_per_connection=qps)
    many = np.diff(found.candidate_start)
    chosen = np.random.default_rng(seed).integers(0, many)
    loads = np.zeros(len(topology.links))
    np.add.at(loads, found.fixed_link, found.fixed_bytes)
    for bundle, path in enumerate((found.candidate[found.candidate_start[:-1] + chosen]).tolist()):
        links = found.path_link[found.path_start[path] : found.path_start[path + 1]]
        loads[links] += found.bundle_bytes[bundle]
    e, count = topology.links, len(topology.vertices)
    outgoing = np.bincount(e.source, loads, minlength=count)
    incoming = np.bincount(e.target, loads, minlength=count)
    out, into, across = traffic_by_hand(topology, job)
    for vertex in range(count):
        assert outgoing[vertex] - out.get(vertex, 0.0) == pytest.approx(
            incoming[vertex] - into.get(vertex, 0.0)
        )
        if topology.vertices.tier[vertex] == 0:
            assert outgoing[vertex] == pytest.approx(out.get(vertex, 0.0))
    host = topology.vertices.host
    leaves = (host[e.source] != NO_HOST) & (host[e.target] == NO_HOST)
    assert loads[leaves].sum() == pytest.approx(across)
