"""Topologies as plain dictionaries: their meaning, and how mistakes are reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.builders import build_testbed as crux_testbed
from tessera.formulation.state.topologies.document import build_topology, list_assumptions
from tessera.formulation.state.topologies.drafts import TopologyDraft
from tessera.formulation.state.topologies.measures import count_tiers
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.shapes import A100_HOST
from tessera.formulation.state.topologies.topology import Tier
from tests.support.topologies import a_clos, gpu, vertex_names, write_columns

TESTBED = {
    "kind": "clos",
    "hosts": 12,
    "host": "a100",
    "tors": 6,
    "aggregations": 8,
    "tor_bytes_per_s": "100 Gb/s",
}
SIDES = {
    "kind": "double-sided",
    "hosts": 12,
    "host": "a100",
    "tors": 6,
    "aggregations": 12,
    "cores": 32,
    "tor_bytes_per_s": 5e10,
    "aggregation_bytes_per_s": 5e10,
}
TORUS = {
    "kind": "torus",
    "hosts": 12,
    "host": "pcie",
    "sizes": [3, 4],
    "link_bytes_per_s": "10 GB/s",
}
LINGJUN = {
    "kind": "lingjun",
    "host": "a100",
    "rows": [["a", "d", "p", "s1"], ["b", "d", "p", "s2"]],
    "ports_per_nic": 2,
    "asw_cables": 2,
    "psw_cables": 2,
    "asw_bytes_per_s": "400Gb/s",
    "psw_bytes_per_s": "0.1 TB/s",
}
OWN = {
    "nodes": ["a", "b"],
    "host": {"like": "pcie", "gpus": 4},
    "switches": [{"name": "left", "tier": "tor"}, {"name": "right", "tier": "tor"}],
    "links": [
        {"from": "a", "to": "left", "bytes_per_s": "100 Gb/s"},
        {"from": "b/nic-1", "to": "right", "bytes_per_s": 1e9, "delay_s": "2e-6"},
        {"from": "left", "to": "right", "bytes_per_s": "25e9", "cables": 3},
        {"from": "right", "to": "left", "bytes_per_s": 1e9, "one_way": True, "cables": 2},
    ],
}


def change_document(document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the document with changed fields. A field that is None is left out."""
    return {key: value for key, value in (document | fields).items() if value is not None}


def test_a_document_gives_the_same_topology_as_its_builder() -> None:
    built, described = crux_testbed(), build_topology(TESTBED)
    assert described.hosts == built.hosts
    assert described.links.equals(built.links)
    assert described.vertices.equals(built.vertices)


@pytest.mark.parametrize("document", [TESTBED, SIDES, TORUS, LINGJUN, OWN])
def test_every_kind_survives_json_and_reads_back_as_written(document: dict[str, Any]) -> None:
    topology = build_topology(json.loads(json.dumps(document)))
    again = build_topology(json.loads(json.dumps(write_columns(topology))))
    assert again.hosts == topology.hosts
    assert again.links.equals(topology.links)
    assert again.vertices.equals(topology.vertices)


def test_hosts_are_named_like_the_clusters_nodes() -> None:
    assert build_topology(change_document(TESTBED, hosts=["b", "a", 7])).hosts == ("b", "a", "7")
    assert build_topology(change_document(TESTBED, hosts=None, nodes=["b", "a"])).hosts == (
        "b",
        "a",
    )
    hosts = [{"name": "a100-{}", "count": 3}, "fat"]
    assert build_topology(change_document(TESTBED, hosts=None, nodes=hosts)).hosts == (
        "a100-0",
        "a100-1",
        "a100-2",
        "fat",
    )


def test_a_host_may_be_derived_from_a_named_one_with_some_changed_numbers() -> None:
    shape = {"like": "a100", "nics": 8, "pcie_switches": 8, "nvlink_bytes_per_s": 0}
    tiers = count_tiers(build_topology(change_document(TESTBED, host=shape)))
    assert (tiers[Tier.NIC], tiers[Tier.GPU]) == (12 * 8, 12 * 8)
    assert Tier.NVSWITCH not in tiers


def test_a_host_may_be_described_in_full() -> None:
    shape = {
        "gpus": 2,
        "nics": 2,
        "pcie_switches": 2,
        "gpu_pcie": [1, 0],
        "nic_pcie": [0, 1],
        "nic_bytes_per_s": 1e9,
        "pcie_bytes_per_s": 2e9,
        "pcie_delay_s": 1e-6,
    }
    topology = build_topology(change_document(TESTBED, host=shape))
    assert count_tiers(topology)[Tier.GPU] == 24
    ports = Routes(topology).insides.port(topology.gpus_of(0)).tolist()
    assert [topology.vertices.name[p] for p in ports] == ["host-0/nic-1", "host-0/nic-0"]


def test_links_may_be_listed_and_a_host_name_means_all_its_nics() -> None:
    topology = build_topology(OWN)
    loads = {topology.link_name(i): topology.links.row(i) for i in range(len(topology.links))}
    assert {"a/nic-0 > left", "a/nic-1 > left", "left > a/nic-0"} <= set(loads)
    assert "b/nic-0 > right" not in loads
    assert loads["b/nic-1 > right"]["delay_s"] == 2e-6
    assert loads["a/nic-0 > left"]["bytes_per_s"] == 12.5e9
    every = [topology.link_name(i) for i in range(len(topology.links))]
    assert (every.count("left > right"), every.count("right > left")) == (3, 5)
    routes = Routes(topology)
    assert routes.count(gpu(topology, 0), gpu(topology, 1)) == 3
    path = routes.between(gpu(topology, 0), gpu(topology, 1))[0]
    assert vertex_names(topology, path)[2:5] == ["left", "right", "b/nic-1"]


def test_assumptions_are_reported() -> None:
    assert "speeds of cables" in list_assumptions(LINGJUN)[0]
    assert "planes" in list_assumptions(SIDES)[0]
    assert list_assumptions(TESTBED) == list_assumptions(5) == []


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (5, "topology: must be a mapping of keys to values, not 5"),
        (
            {},
            "kind: must be given; choose from clos, double-sided, torus, lingjun, explicit, columns",
        ),
        ({"kind": "clo"}, "kind: unknown kind 'clo'; did you mean 'clos'?"),
        (
            change_document(TESTBED, tor=6),
            "unknown key 'tor'; did you mean 'tors'?; allowed: kind, adaptive",
        ),
        (change_document(TESTBED, aggregations=None), "needs the key 'aggregations'"),
        (
            change_document(TESTBED, aggregations=0),
            "aggregations: must be a whole number from 1 to 100,000, not 0",
        ),
        (
            change_document(TESTBED, hosts_per_tor=2),
            "tors, hosts_per_tor: give exactly one of them",
        ),
        (change_document(TESTBED, nodes=["a"]), "hosts, nodes: give exactly one of them"),
        (change_document(TESTBED, hosts=[]), "hosts: has no hosts; there must be 1 to 100,000"),
        (
            change_document(
                TESTBED, hosts=[{"name": f"h{n}-{{}}", "count": 100_000} for n in range(20_000)]
            ),
            "hosts: has more than 100,000 hosts; there must be 1 to 100,000",
        ),
        (change_document(TESTBED, hosts=["a", "a"]), "hosts: must have unique names; a repeat"),
        (
            change_document(TESTBED, hosts=[{"name": "a", "count": 2}]),
            "hosts[0].name: must contain {} for the number",
        ),
        (
            change_document(TESTBED, tor_bytes_per_s=1e5),
            "must be a number of bytes/s from 1e6 to 1e14",
        ),
        (
            change_document(TESTBED, tor_bytes_per_s="fast"),
            "or a text such as 200 Gb/s or 25 GB/s, not 'fast'",
        ),
        (
            change_document(TESTBED, tor_delay_s=-1),
            "tor_delay_s: must be a number of seconds from 0 to 10, not -1",
        ),
        (change_document(TESTBED, adaptive=1), "adaptive: must be true or false, not 1"),
        (
            change_document(TESTBED, host="a10"),
            "host: must be one of a100, pcie, not 'a10'; did you mean 'a100'?",
        ),
        (
            change_document(TESTBED, host={"gpus": 1, "nics": 1}),
            "host: needs the key 'pcie_switches'",
        ),
        (
            change_document(TESTBED, host={"like": "a100", "gpu_pcie": [0]}),
            "host.gpu_pcie: must name a PCIe switch",
        ),
        (change_document(TORUS, sizes=[3, 5]), "sizes: 3 x 5 is 15, but there are 12 hosts"),
        (change_document(SIDES, tors=5), "tors: is 5; it must be a multiple of 2 x 2"),
        (
            change_document(LINGJUN, rows=[["a", "b"]]),
            "rows[0]: has 2 values; it must be [host, dsw, psw, asw]",
        ),
        (
            change_document(OWN, switches=[{"name": "x", "tier": "tr"}]),
            "switches[0].tier: must be one of tor, aggr",
        ),
        (
            change_document(OWN, links=[{"from": "a", "to": "lft", "bytes_per_s": 1e9}]),
            "links[0].to: 'lft' is no",
        ),
        (
            change_document(OWN, links=[{"from": "a", "to": "b", "bytes_per_s": 1e9}]),
            "links[0]: joins two hosts, which pass no traffic on;",
        ),
        (
            change_document(OWN, links=[{"from": "left", "to": "left", "bytes_per_s": 1e9}]),
            "joins a vertex to it",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_location_and_the_allowed_values(
    document: object, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        build_topology(document)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("bytes_per_s", 1.0, "links.bytes_per_s[0]: must be from 1e6 to 1e14"),
        ("bytes_per_s", "x", "links.bytes_per_s[0]: must be a number, not 'x'"),
        ("source", 10**6, "links.source: must lie in [0, "),
        ("source", 0.5, "links.source[0]: must be a whole number"),
        (
            "delay_s",
            float("nan"),
            "links.delay_s: of host-0/gpu-0 > host-0/nvswitch must be at least 0",
        ),
    ],
)
def test_a_wrong_number_in_a_written_topology_is_reported(
    column: str, value: Any, message: str
) -> None:
    document = write_columns(a_clos(2))
    document["links"][column][0] = value
    with pytest.raises(InvalidInput) as caught:
        build_topology(document)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [
        TESTBED,
        SIDES,
        TORUS,
        TORUS | {"sizes": [1, 2, 6]},
        LINGJUN,
        OWN,
    ],
)
def test_links_are_counted_before_the_first_part_is_made(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[int] = []
    really = TopologyDraft.expect

    def expect(draft: TopologyDraft, links: int) -> None:
        expected.append(links)
        assert draft.names or len(expected) == 1
        really(draft, links)

    monkeypatch.setattr(TopologyDraft, "expect", expect)
    topology = build_topology(document)
    assert expected[0] == len(topology.links)


TWO_SIDES = {"from": "host-0", "to": "left", "bytes_per_s": 1e9, "cables": 1000}


@pytest.mark.parametrize(
    ("document", "links"),
    [
        (TESTBED | {"hosts": 2, "tors": 10_000, "aggregations": 10_000}, 200_000_112),
        (
            SIDES | {"hosts": 2, "tors": 20_000, "aggregations": 200, "pods": 1, "cores": 200},
            8_000_528,
        ),
        (TORUS | {"hosts": 100_000, "sizes": [1000, 100], "host": "a100"}, 6_000_000),
        (
            LINGJUN
            | {
                "ports_per_nic": 1,
                "asw_cables": 1024,
                "rows": [[f"h{i}", "d", "p", f"s{i}"] for i in range(2000)],
            },
            4_208_004,
        ),
        (OWN | {"nodes": 12, "links": 1000 * [TWO_SIDES]}, 4_000_192),
    ],
)
def test_counts_that_would_fill_the_memory_are_refused_before_anything_is_made(
    document: dict[str, Any], links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> int:
        raise AssertionError("a part was made")

    monkeypatch.setattr(TopologyDraft, "vertex", make)
    monkeypatch.setattr(TopologyDraft, "cable", make)
    with pytest.raises(InvalidInput) as refused:
        build_topology(document)
    assert (
        str(refused.value)
        == f"topology: has {links:,} links, and may have 4,000,000; lower the counts"
    )


def test_named_host_shapes_match_the_paper() -> None:
    assert (A100_HOST.gpus, A100_HOST.nics, A100_HOST.nic_bytes_per_s) == (8, 4, 25e9)


def test_columns_of_unequal_length_are_refused() -> None:
    document = write_columns(a_clos(2))
    document["links"]["delay_s"].pop()
    with pytest.raises(InvalidInput, match=r"delay_s: has \d+ links, expected"):
        build_topology(document)
