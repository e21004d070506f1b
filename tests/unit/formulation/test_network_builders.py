"""Fabrics built from a few numbers: their vertices, links and attachments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.topologies.builders import build_testbed as crux_testbed
from tessera.formulation.topologies.document import build_topology
from tessera.formulation.topologies.lingjun import rows_of
from tessera.formulation.topologies.measures import bisection_bytes_per_s, count_tiers, link_kinds
from tessera.formulation.topologies.routes import Routes
from tessera.formulation.topologies.shapes import A100_HOST, PCIE_HOST, HostShape
from tessera.formulation.topologies.topology import Tier, Topology
from tessera.simulator.data import data_file
from tests.support.topologies import (
    a_clos,
    a_double_sided,
    a_lingjun,
    a_shape,
    a_torus,
    gpu,
    vertex_names,
)

ROWS = [
    ("a", "d", "p1", "s1"),
    ("b", "d", "p1", "s1"),
    ("c", "d", "p1", "s2"),
    ("e", "d", "p2", "s1"),
]


def degrees(topology: Topology, low: Tier, high: Tier) -> tuple[set[int], set[int]]:
    """Return the numbers of links from ``low`` to ``high`` for each vertex of ``low``, and of ``high``."""
    e, tier = topology.links, topology.vertices.tier
    between = (tier[e.source] == low) & (tier[e.target] == high)
    out = Counter({int(v): 0 for v in np.flatnonzero(tier == low)})
    into = Counter({int(v): 0 for v in np.flatnonzero(tier == high)})
    out.update(e.source[between].tolist())
    into.update(e.target[between].tolist())
    return set(out.values()), set(into.values())


def test_the_papers_two_layer_clos_has_173_tors_and_16_aggregation_switches() -> None:
    topology = a_clos(250, A100_HOST, tors=173, aggregations=16)
    counts = count_tiers(topology)
    assert (counts[Tier.GPU], counts[Tier.NIC]) == (2000, 1000)
    assert (counts[Tier.TOR], counts[Tier.AGGREGATION]) == (173, 16)
    assert degrees(topology, Tier.TOR, Tier.AGGREGATION) == ({16}, {173})
    assert degrees(topology, Tier.NIC, Tier.TOR) == ({1}, {4, 8})


def test_the_papers_double_sided_network_has_6_12_and_32_switches_and_eight_links_a_host() -> None:
    topology = a_double_sided(250, A100_HOST, tors=6, aggregations=12, cores=32)
    counts = count_tiers(topology)
    assert (counts[Tier.TOR], counts[Tier.AGGREGATION], counts[Tier.CORE]) == (6, 12, 32)
    assert degrees(topology, Tier.NIC, Tier.TOR)[0] == {2}
    assert degrees(topology, Tier.TOR, Tier.AGGREGATION) == ({4}, {2})
    assert degrees(topology, Tier.AGGREGATION, Tier.CORE) == ({8}, {3})
    e, v = topology.links, topology.vertices
    up = (v.host[e.source] == 7) & (v.tier[e.target] == Tier.TOR)
    assert up.sum() == 8
    assert len(set(e.target[up].tolist())) == 2
    assert e.bytes_per_s[up].sum() == 4 * A100_HOST.nic_bytes_per_s


@pytest.mark.parametrize(
    ("sizes", "neighbours"), [((3, 4), 4), ((3, 3, 3), 6), ((2, 3), 3), ((1, 4), 2), ((2, 2, 2), 3)]
)
def test_a_torus_router_has_two_neighbours_per_dimension(
    sizes: tuple[int, ...], neighbours: int
) -> None:
    topology = a_torus(*sizes)
    assert degrees(topology, Tier.TOR, Tier.TOR) == ({neighbours}, {neighbours})
    assert degrees(topology, Tier.NIC, Tier.TOR)[0] == {1}


@pytest.mark.parametrize(
    "build",
    [
        crux_testbed,
        lambda: a_clos(5, PCIE_HOST, cables=3),
        a_double_sided,
        lambda: a_torus(2, 3, 4),
        lambda: a_lingjun(ROWS),
    ],
)
def test_every_link_has_a_reverse_link_of_equal_speed_and_delay(
    build: Callable[[], Topology],
) -> None:
    e = build().links
    columns = (e.bytes_per_s.tolist(), e.delay_s.tolist())
    there = Counter(zip(e.source.tolist(), e.target.tolist(), *columns, strict=True))
    back = Counter(zip(e.target.tolist(), e.source.tolist(), *columns, strict=True))
    assert there == back


def test_the_testbed_matches_the_paper() -> None:
    topology = crux_testbed()
    counts = count_tiers(topology)
    assert (len(topology.hosts), counts[Tier.GPU]) == (12, 96)
    assert (counts[Tier.TOR], counts[Tier.AGGREGATION]) == (6, 8)
    speeds = {(k.source, k.target): k.bytes_per_s for k in link_kinds(topology)}
    assert speeds[Tier.NIC, Tier.TOR] == 25e9
    assert speeds[Tier.TOR, Tier.AGGREGATION] == 12.5e9
    assert bisection_bytes_per_s(topology) == pytest.approx(3 * 8 * 12.5e9)
    ports = Routes(topology).insides.port(topology.gpus_of(3))
    assert [topology.vertices.name[p] for p in ports] == [
        f"host-3/nic-{i}" for i in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_the_bisection_search_can_reroute_earlier_flow(order: int) -> None:
    ends = ["s0 c", "s0 a", "a x", "a b", "c b", "b s1", "x s1"][::order]
    topology = build_topology(
        {
            "hosts": 1,
            "host": "pcie",
            "switches": [
                {"name": n, "tier": "tor" if n in ("s0", "s1") else "core"}
                for n in ("s0", "s1", *"abcx")
            ],
            "links": [
                {"from": one.split()[0], "to": one.split()[1], "bytes_per_s": 1e9, "one_way": True}
                for one in ends
            ],
        }
    )
    # s0 > a > x > s1 and s0 > c > b > s1
    assert bisection_bytes_per_s(topology) == pytest.approx(2e9)


def test_a_host_without_nvlink_has_no_nvswitch_and_joins_its_pcie_switches_by_a_root() -> None:
    topology = a_clos(2, PCIE_HOST)
    assert Tier.NVSWITCH not in count_tiers(topology)
    path = Routes(topology).between(gpu(topology, 0, 0), gpu(topology, 0, 7))
    assert [vertex_names(topology, p) for p in path] == [
        ["host-0/pcie-0", "host-0/pcie-root", "host-0/pcie-1", "host-0/gpu-7"]
    ]


def test_lingjun_groups_are_switches_and_labels_are_local_to_a_psw() -> None:
    topology = a_lingjun(ROWS)
    counts = count_tiers(topology)
    assert (counts[Tier.TOR], counts[Tier.AGGREGATION], counts[Tier.CORE]) == (3, 2, 1)
    routes = Routes(topology)
    same = routes.between(gpu(topology, 0), gpu(topology, 1))
    assert "p1/s1" in vertex_names(topology, same[0])
    assert len(same) == 2 * 2
    assert routes.count(gpu(topology, 0), gpu(topology, 2)) == (2 * 2) ** 2
    assert routes.count(gpu(topology, 0), gpu(topology, 3)) == (2 * 2 * 3) ** 2


def test_the_lingjun_file_has_847_hosts_in_119_groups() -> None:
    path = data_file(None, "lingjun", "topology.csv")
    if path is None:
        pytest.skip("the Lingjun data set is not here (TESSERA_DATA)")
    rows = rows_of(path.read_text(encoding="utf-8"), path.name)
    counts = count_tiers(a_lingjun(rows))
    assert len(rows) == 847
    assert (counts[Tier.TOR], counts[Tier.AGGREGATION], counts[Tier.CORE]) == (119, 3, 1)
    assert counts[Tier.GPU] == 847 * 8


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "f.csv: must begin with the line host_id,dsw,psw,asw"),
        ("host,dsw\n", "f.csv: must begin"),
        ("host_id,dsw,psw,asw\na,b,c\n", "f.csv: line 2: must have 4 values"),
        (
            "host_id,dsw,psw,asw\na,b,c,d\ne,,g,h\n",
            "f.csv: line 3: must have 4 values that are not empty",
        ),
    ],
)
def test_a_wrong_line_of_a_lingjun_file_is_named(content: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        rows_of(content, "f.csv")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: a_clos(tors=0), "tors: is 0; it must be at least 1"),
        (lambda: a_clos(cables=0), "cables: is 0"),
        (lambda: a_clos(tor_bytes_per_s=0.0), "of tor-0 > agg-0 is 0.0; it must be above 0"),
        (lambda: a_clos(tor_bytes_per_s=float("nan")), "links.bytes_per_s"),
        (lambda: a_clos(tor_delay_s=-1.0), "links.delay_s"),
        (lambda: a_double_sided(tors=3), "tors: is 3; it must be a multiple of 2 x 1"),
        (lambda: a_double_sided(tors=1), "tors: is 1"),
        (
            lambda: a_double_sided(aggregations=3),
            "aggregations: is 3; it must be a multiple of 2, the number of pods",
        ),
        (
            lambda: a_double_sided(cores=5),
            "cores: is 5; it must be a multiple of 2, the number of aggregation",
        ),
        (lambda: a_torus(4), "sizes: must be 2 or 3 whole numbers"),
        (lambda: a_torus(0, 4), "sizes: must be 2 or 3 whole numbers"),
        (
            lambda: a_lingjun([("a", "d", "p", "s"), ("b", "e", "p", "s")]),
            "rows: b: psw p is under dsw e",
        ),
        (lambda: a_lingjun([("a", "d", "p", "s")] * 2), "hosts: must have unique names; a repeat"),
        (lambda: a_shape(nics=0), "nics: is 0; it must be at least 1"),
        (
            lambda: a_shape(gpu_pcie=(0, 1)),
            "gpu_pcie: must name a PCIe switch, 0 to 0, for each of the 2",
        ),
    ],
)
def test_impossible_numbers_are_refused(
    build: Callable[[], Topology | HostShape], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        build()
