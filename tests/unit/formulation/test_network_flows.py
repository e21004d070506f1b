"""Flows of jobs and the paths between GPUs, and the topologies that builders make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.network.contention import Contention, demand_of
from tessera.formulation.answer.network.flows import build_contention
from tessera.formulation.answer.network.patterns import Flows, PlacedExchange, flows_of
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.topologies.builders import build_testbed as crux_testbed
from tessera.formulation.state.topologies.document import build_topology
from tessera.formulation.state.topologies.lingjun import rows_of
from tessera.formulation.state.topologies.measures import (
    bisection_bytes_per_s,
    count_tiers,
    link_kinds,
)
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.shapes import A100_HOST, PCIE_HOST, HostShape
from tessera.formulation.state.topologies.topology import Tier, Topology
from tessera.formulation.state.traffic import Pattern
from tessera.simulator.data import data_file
from tests.support.topologies import (
    a_clos,
    a_double_sided,
    a_job,
    a_lingjun,
    a_shape,
    a_torus,
    an_exchange,
    gpu,
    shortest_paths,
    vertex_names,
    without_links,
)

EIGHT = tuple(range(8))


def bytes_by_link(flows: Flows, topology: Topology) -> dict[tuple[str, str], float]:
    names = topology.vertices.name
    return {
        (names[a], names[b]): size
        for a, b, size in zip(flows.source, flows.target, flows.sent_bytes.tolist(), strict=True)
    }


def single_job_flows(
    topology: Topology,
    gpus: Sequence[tuple[int, int]],
    members: Sequence[Sequence[int]],
    pattern: Pattern = Pattern.RING,
    sent_bytes: float = 12.0,
) -> dict[tuple[str, str], float]:
    """Return the flows between the GPUs, given as (host, index) in order of rank."""
    exchange = an_exchange(members, sent_bytes, pattern)
    vertex = np.array([gpu(topology, host, index) for host, index in gpus])
    placed = PlacedExchange(job=0, exchange=exchange, vertex=vertex[exchange.members])
    return bytes_by_link(flows_of([placed], topology.vertices.host), topology)


def bytes_on_link(topology: Topology, contention: Contention, name: str) -> float:
    """Return the bytes on a link if all bundles take their first path."""
    demand = demand_of(contention, np.zeros(len(contention.bundle_bytes), dtype=np.int64))
    busy = np.bincount(demand.link, demand.busy_s, minlength=demand.links)
    return float(
        sum(
            busy[link] * topology.links.bytes_per_s[link]
            for link in range(len(topology.links))
            if topology.link_name(link) == name
        )
    )


def test_a_ring_crosses_between_hosts_on_each_members_nic_in_equal_parts() -> None:
    topology = a_clos(2, a_shape(gpus=4))
    flows = single_job_flows(
        topology, [(h, i) for h in range(2) for i in range(4)], [list(range(8))]
    )
    across = {ends: size for ends, size in flows.items() if ends[0][:6] != ends[1][:6]}
    assert across == {
        (f"host-{a}/gpu-{i}", f"host-{1 - a}/gpu-{i}"): 3.0 for a in range(2) for i in range(4)
    }
    inside = {ends: size for ends, size in flows.items() if ends not in across}
    assert inside == {
        (f"host-{a}/gpu-{i}", f"host-{a}/gpu-{(i + 1) % 4}"): 12.0 * 3 / 4
        for a in range(2)
        for i in range(4)
    }


def test_hosts_with_unequal_numbers_of_members_still_send_and_receive_equal_parts() -> None:
    topology = a_clos(2, a_shape(gpus=3))
    flows = single_job_flows(topology, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], [[0, 1, 2, 3, 4]])
    there = {ends: size for ends, size in flows.items() if ends[0][5] == "0" and ends[1][5] == "1"}
    assert there == pytest.approx(
        {
            ("host-0/gpu-0", "host-1/gpu-0"): 4.0,
            ("host-0/gpu-0", "host-1/gpu-1"): 2.0,
            ("host-0/gpu-1", "host-1/gpu-1"): 2.0,
            ("host-0/gpu-1", "host-1/gpu-2"): 4.0,
        }
    )


def test_two_gpus_share_one_nic_on_the_testbeds_hosts() -> None:
    topology = a_clos(4, A100_HOST, aggregations=8)
    job = a_job([("host-0", EIGHT), ("host-3", EIGHT)], an_exchange([range(16)], 80.0))
    contention, _ = build_contention(topology, [job])
    for nic in range(4):
        assert bytes_on_link(topology, contention, f"host-0/nic-{nic} > tor-0") == pytest.approx(
            20.0
        )
        assert bytes_on_link(topology, contention, f"tor-1 > host-3/nic-{nic}") == pytest.approx(
            20.0
        )
    assert bytes_on_link(topology, contention, "host-0/gpu-0 > host-0/nvswitch") == pytest.approx(
        70.0
    )
    assert bytes_on_link(topology, contention, "host-0/gpu-0 > host-0/pcie-0") == pytest.approx(
        10.0
    )
    assert bytes_on_link(topology, contention, "host-0/pcie-0 > host-0/nic-0") == pytest.approx(
        20.0
    )
    assert contention.gpus.tolist() == [16]


def test_links_common_to_all_candidate_paths_are_fixed() -> None:
    topology = a_clos(4)
    job = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 1]]))
    contention, _ = build_contention(topology, [job])
    named = {topology.link_name(link) for link in contention.fixed_link}
    assert {"host-0/nic-0 > tor-0", "tor-1 > host-3/nic-0"} <= named
    assert not any("agg" in name for name in named)
    assert np.diff(contention.candidate_start).tolist() == [2, 2]
    assert {topology.link_name(link) for link in contention.path_link} == {
        f"{a} > {b}"
        for agg in ("agg-0", "agg-1")
        for a, b in (("tor-0", agg), (agg, "tor-0"), ("tor-1", agg), (agg, "tor-1"))
    }


def test_a_connection_of_several_queue_pairs_forms_as_many_equal_bundles() -> None:
    topology = a_clos(4)
    jobs = [
        a_job(
            [("host-0", [i]), ("host-3", [i])], an_exchange([[0, 1]], 12.0 * (1 + i)), name=f"j{i}"
        )
        for i in range(2)
    ]
    contention, _ = build_contention(topology, jobs, qps_per_connection=3)
    assert contention.bundle_bytes.tolist() == [4.0] * 6 + [8.0] * 6
    assert contention.bundle_start.tolist() == [0, 6, 12]
    plain, _ = build_contention(topology, jobs)
    assert bytes_on_link(topology, contention, "tor-0 > agg-0") == bytes_on_link(
        topology, plain, "tor-0 > agg-0"
    )


def test_delays_add_up_along_a_path_and_count_for_each_message() -> None:
    topology = a_clos(
        4, a_shape(nic_delay_s=1e-3, pcie_delay_s=1e-4, nvlink_delay_s=1e-5), tor_delay_s=1e-2
    )
    job = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 1]], messages=3))
    contention, _ = build_contention(topology, [job])
    assert contention.fixed_delay_s.tolist() == pytest.approx([3 * (2 * 1e-3 + 4 * 1e-4)])
    assert contention.path_delay_s.tolist() == pytest.approx([2e-2] * 4)
    demand = demand_of(contention, np.zeros(2, dtype=np.int64))
    assert demand.delay_s.tolist() == pytest.approx([3 * (2e-2 + 2e-3 + 4e-4)])


def test_an_adaptive_network_spreads_traffic_evenly_and_offers_no_choice() -> None:
    topology = replace(a_clos(4, aggregations=3, tor_delay_s=1e-2), adaptive=True)
    job = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 1]], messages=2))
    contention, notes = build_contention(topology, [job])
    assert len(contention.bundle_bytes) == 0
    for agg in range(3):
        assert bytes_on_link(topology, contention, f"tor-0 > agg-{agg}") == pytest.approx(4.0)
    assert bytes_on_link(topology, contention, "host-0/nic-0 > tor-0") == 12.0
    assert contention.fixed_delay_s.tolist() == pytest.approx([2 * 2e-2])
    assert [(job, "adaptive" in sentence) for job, sentence in notes] == [("", True)]


def test_a_job_on_unconnected_gpus_contends_with_none_and_others_keep_their_part() -> None:
    topology = without_links(a_clos(4), ("host-1/nic-0", "tor-0"))
    ring = an_exchange([[0, 1]])
    connected = a_job([("host-0", [0]), ("host-3", [0])], ring, name="seen")
    cut = a_job([("host-3", [0]), ("host-1", [0])], ring, name="cut off")
    contention, notes = build_contention(topology, [cut, connected, replace(cut, name="too")])
    plain, _ = build_contention(topology, [connected])
    gap = "no path from host-1/gpu-0 to host-3/gpu-0: traffic cannot leave host-1/gpu-0"
    assert [name for name, _ in notes] == ["cut off", "too"]
    assert all(note.startswith(gap) and "share no link" in note for _, note in notes)
    assert np.diff(contention.bundle_start).tolist() == [0, *np.diff(plain.bundle_start), 0]
    assert contention.fixed_link.tolist() == plain.fixed_link.tolist()
    assert contention.work_flop.tolist() == [job.traffic.work_flop for job in (cut, connected, cut)]


def test_jobs_with_parts_outside_the_network_are_reported() -> None:
    topology = a_clos(4)
    ring = an_exchange([[0, 1]])
    jobs = [
        a_job([("host-0", [0]), ("host-9", [0])], ring, name="elsewhere"),
        a_job([("host-0", [0]), ("host-1", [2])], ring, name="beyond"),
        a_job([("host-0", [0]), ("host-1", [-1])], ring, name="below"),
        a_job([("host-2", [0, 1])], ring, name="alone"),
        a_job([("host-0", [0]), ("host-1", [0])], name="silent"),
        a_job([("host-0", [0]), ("host-1", [0])], an_exchange([[0, 1]], 0.0), name="empty"),
        a_job([("host-0", [0, 1]), ("host-3", [0])], ring, name="inside"),
        a_job([("host-0", [0]), ("host-3", [0])], ring, name="seen"),
    ]
    contention, notes = build_contention(topology, jobs)
    assert contention.jobs == tuple(job.name for job in jobs)
    note_of = dict(notes)
    assert (
        note_of["elsewhere"]
        == "its host host-9 is not in the topology; it is assumed to share no link with another job"
    )
    assert note_of["beyond"].startswith(
        "it has GPU 2 of host-1, but the topology has only 2 GPUs there, counted from 0;"
    )
    assert note_of["below"].startswith("it has GPU -1 of host-1")
    assert note_of["alone"] == "it runs on host-2 alone, so it loads no link between hosts"
    assert (
        note_of["silent"]
        == note_of["empty"]
        == "it sends nothing, so it shares no link with another job"
    )
    assert (
        note_of["inside"] == "it sends nothing from host to host, so it loads no link between them"
    )
    assert len(notes) == 7
    loads = np.diff(contention.fixed_start).tolist()
    assert [loads[i] > 0 for i in range(8)] == [False] * 3 + [True, False, False, True, True]
    assert np.diff(contention.bundle_start).tolist() == [0] * 7 + [2]


def test_omitted_paths_are_reported() -> None:
    topology = a_clos(4, aggregations=5)
    job = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 1]]))
    contention, notes = build_contention(topology, [job], most=4)
    assert np.diff(contention.candidate_start).tolist() == [4, 4]
    assert notes == [("", "2 flows have up to 5 equal-cost paths, but they choose from 4 only")]


def test_invalid_input_is_refused() -> None:
    topology = a_clos(4)
    job = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 2]]))
    with pytest.raises(InvalidInput, match="job: members: must be ranks, 0 to 1 for 2 GPUs"):
        build_contention(topology, [job])
    fine = a_job([("host-0", [0]), ("host-3", [0])], an_exchange([[0, 1]]))
    with pytest.raises(InvalidInput, match="jobs: must have unique names; job repeats"):
        build_contention(topology, [fine, fine])
    with pytest.raises(InvalidInput, match="qps_per_connection: is 0"):
        build_contention(topology, [fine], qps_per_connection=0)


def test_a_gpu_without_nvlink_uses_pcie() -> None:
    topology = without_links(a_clos(2, a_shape(gpus=4)), ("host-0/gpu-1", "host-0/nvswitch"))
    routes = Routes(topology)
    (path,) = routes.between(gpu(topology, 0, 1), gpu(topology, 0, 3))
    assert vertex_names(topology, path) == ["host-0/pcie-0", "host-0/gpu-3"]
    (other,) = routes.between(gpu(topology, 1, 1), gpu(topology, 1, 3))
    assert vertex_names(topology, other) == ["host-1/nvswitch", "host-1/gpu-3"]


@pytest.mark.parametrize("down", [("host-1/nic-0", "tor-1"), ("tor-1", "host-1/nic-0")])
def test_a_nic_without_a_cable_in_both_directions_is_not_used(down: tuple[str, str]) -> None:
    topology = without_links(a_clos(2, a_shape(gpus=4, nics=2)), down)
    ports = Routes(topology).insides.port(topology.gpus_of(1)).tolist()
    assert [topology.vertices.name[p] for p in ports] == ["host-1/nic-1"] * 4


def test_on_a_double_sided_network_the_side_is_chosen_too() -> None:
    topology = a_double_sided(4)
    routes = Routes(topology)
    same = [vertex_names(topology, p) for p in routes.between(gpu(topology, 0), gpu(topology, 1))]
    assert [path[2] for path in same] == ["tor-0", "tor-1"]
    far = routes.between(gpu(topology, 0), gpu(topology, 3))
    assert len(far) == 2 * 2 * 2 * 2  # ToR, aggregation switch, core of its plane, ToR
    assert set(far) == shortest_paths(topology, gpu(topology, 0), gpu(topology, 3))


def test_with_more_paths_than_the_limit_the_listed_ones_are_spread_over_all() -> None:
    topology = a_double_sided(4, A100_HOST, aggregations=8, cores=32)
    source, target = gpu(topology, 0), gpu(topology, 3)
    every = Routes(topology, most=1000).between(source, target)
    some = Routes(topology, most=32).between(source, target)
    assert (len(every), len(some)) == (2 * 4 * 8 * 2, 32)
    assert Routes(topology, most=32).count(source, target) == len(every)
    assert len(set(some)) == 32
    assert set(some) < set(every)
    for place in (2, 3, -4, -3):  # each port and ToR link of all paths is on a listed one
        assert {p[place] for p in some} == {p[place] for p in every}
    ends = [vertex_names(topology, p)[-4] for p in some]
    assert min(ends.count("tor-2"), ends.count("tor-3")) >= 12


def test_distant_torus_routers_have_more_paths_than_can_be_listed() -> None:
    topology = a_torus(8, 8, 8)
    routes = Routes(topology)
    far = 4 * 64 + 4 * 8 + 4
    # 12! / 4!^3 orders of the steps, times 2^3 for either way round each ring
    assert routes.count(gpu(topology, 0), gpu(topology, far)) == 34_650 * 8
    paths = routes.between(gpu(topology, 0), gpu(topology, far))
    assert len(set(paths)) == 64
    assert {len(path) for path in paths} == {2 * 3 + 12}


def test_a_host_without_a_cable_is_named() -> None:
    topology = without_links(a_clos(4), ("host-2/nic-0", "tor-1"))
    with pytest.raises(
        InvalidInput, match=r"from host-0/gpu-0 to host-2/gpu-1.* reach host-2/gpu-1"
    ):
        Routes(topology).between(gpu(topology, 0), gpu(topology, 2, 1))


def test_less_than_one_path_is_refused() -> None:
    with pytest.raises(InvalidInput, match="most: is 0; it must be at least 1"):
        Routes(a_clos(2), most=0)


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
        (lambda: a_clos(tor_bytes_per_s=0.0), "of tor-0 > agg-0 is 0.0; it must be above 0"),
        (lambda: a_clos(tor_delay_s=-1.0), "links.delay_s"),
        (lambda: a_double_sided(tors=3), "tors: is 3; it must be a multiple of 2 x 1"),
        (
            lambda: a_double_sided(aggregations=3),
            "aggregations: is 3; it must be a multiple of 2, the number of pods",
        ),
        (
            lambda: a_double_sided(cores=5),
            "cores: is 5; it must be a multiple of 2, the number of aggregation",
        ),
        (lambda: a_torus(4), "sizes: must be 2 or 3 whole numbers"),
        (
            lambda: a_lingjun([("a", "d", "p", "s"), ("b", "e", "p", "s")]),
            "rows: b: psw p is under dsw e",
        ),
        (lambda: a_lingjun([("a", "d", "p", "s")] * 2), "hosts: must have unique names; a repeat"),
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


def test_a_gpu_reaches_itself_without_links_and_a_single_tor_has_no_bisection() -> None:
    topology = a_clos(2, tors=1)
    assert Routes(topology).between(gpu(topology, 0), gpu(topology, 0)) == [()]
    assert Routes(topology).count(gpu(topology, 0), gpu(topology, 0)) == 1
    assert bisection_bytes_per_s(topology) is None
