"""Paths between GPUs: inside hosts, through fabrics, and if there is no path or too many."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.topologies.document import build_topology
from tessera.formulation.topologies.routes import Routes
from tessera.formulation.topologies.shapes import A100_HOST
from tests.support.topologies import (
    a_clos,
    a_double_sided,
    a_shape,
    a_torus,
    gpu,
    shortest_paths,
    vertex_names,
    without_links,
)


def test_nvlink_is_preferred_to_pcie_inside_a_host() -> None:
    topology = a_clos(2, a_shape(gpus=4))
    (path,) = Routes(topology).between(gpu(topology, 0, 1), gpu(topology, 0, 3))
    assert vertex_names(topology, path) == ["host-0/nvswitch", "host-0/gpu-3"]


def test_a_gpu_without_nvlink_uses_pcie() -> None:
    topology = without_links(a_clos(2, a_shape(gpus=4)), ("host-0/gpu-1", "host-0/nvswitch"))
    routes = Routes(topology)
    (path,) = routes.between(gpu(topology, 0, 1), gpu(topology, 0, 3))
    assert vertex_names(topology, path) == ["host-0/pcie-0", "host-0/gpu-3"]
    (other,) = routes.between(gpu(topology, 1, 1), gpu(topology, 1, 3))
    assert vertex_names(topology, other) == ["host-1/nvswitch", "host-1/gpu-3"]


def test_gpus_equally_near_to_several_nics_use_them_in_turn() -> None:
    topology = a_clos(2, a_shape(gpus=4, nics=2))
    ports = Routes(topology).insides.port(topology.gpus_of(1)).tolist()
    assert [topology.vertices.name[p] for p in ports] == [f"host-1/nic-{i}" for i in (0, 1, 0, 1)]


@pytest.mark.parametrize("down", [("host-1/nic-0", "tor-1"), ("tor-1", "host-1/nic-0")])
def test_a_nic_without_a_cable_in_both_directions_is_not_used(down: tuple[str, str]) -> None:
    topology = without_links(a_clos(2, a_shape(gpus=4, nics=2)), down)
    ports = Routes(topology).insides.port(topology.gpus_of(1)).tolist()
    assert [topology.vertices.name[p] for p in ports] == ["host-1/nic-1"] * 4


def test_flows_share_candidate_paths_if_only_switches_are_chosen() -> None:
    topology = a_clos(6, A100_HOST, tors=2, aggregations=8)
    source = np.array([gpu(topology, h, i) for h in range(3) for i in range(8)])
    target = np.array([gpu(topology, 3 + h, i) for h in range(3) for i in range(8)])
    ways = Routes(topology).ways(source, target)
    assert set(ways.choice.tolist()) == {0}
    assert len(ways.path_start) - 1 == 8
    assert np.diff(ways.path_start).tolist() == [2] * 8


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


def test_a_path_from_a_gpu_to_itself_has_no_links() -> None:
    topology = a_clos(2)
    assert Routes(topology).between(gpu(topology, 0), gpu(topology, 0)) == [()]
    assert Routes(topology).count(gpu(topology, 0), gpu(topology, 0)) == 1


def test_less_than_one_path_is_refused() -> None:
    with pytest.raises(InvalidInput, match="most: is 0; it must be at least 1"):
        Routes(a_clos(2), most=0)


def test_gpus_of_a_host_without_internal_links_meet_at_the_switch() -> None:
    topology = build_topology(
        {
            "hosts": ["a"],
            "host": {
                "gpus": 2,
                "nics": 2,
                "pcie_switches": 2,
                "nic_bytes_per_s": 1e9,
                "pcie_bytes_per_s": 1e9,
            },
            "switches": [{"name": "s", "tier": "tor"}],
            "links": [{"from": "a", "to": "s", "bytes_per_s": 1e9}],
        }
    )
    cut = without_links(topology, ("a/pcie-0", "a/pcie-root"))
    (path,) = Routes(cut).between(gpu(cut, 0, 0), gpu(cut, 0, 1))
    assert vertex_names(cut, path) == ["a/pcie-0", "a/nic-0", "s", "a/nic-1", "a/pcie-1", "a/gpu-1"]
