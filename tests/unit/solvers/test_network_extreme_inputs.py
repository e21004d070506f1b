"""Inputs at the limits: they are processed or refused, and nothing hangs or breaks."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.errors import InvalidInput
from tessera.formulation.network.contention import join_parts
from tessera.formulation.network.traffic import parse_cell_traffic
from tessera.formulation.topologies.document import build_topology
from tessera.formulation.topologies.routes import Routes
from tessera.formulation.topologies.topology import NO_HOST, Links, Tier, Topology, Vertices
from tessera.solvers.network.baselines.circles import common_grid
from tessera.solvers.network.baselines.sincronia import bssi_order
from tessera.solvers.network.compression import compression_of
from tessera.solvers.network.floor import apply_floor
from tessera.solvers.network.fluid import simulate_fluid
from tessera.solvers.network.swaps import PlayWindow
from tests.support.networks import FluidJob, a_demand
from tests.support.random_contentions import a_contention

GPU, NIC, TOR = Tier.GPU, Tier.NIC, Tier.TOR
DIGITS = 10**400


def a_topology(vertices: dict[str, tuple[Tier, int]], cables: list[tuple[str, str]]) -> Topology:
    """Return two hosts with the given vertices (tier, host), and cables between them."""
    at = {name: i for i, name in enumerate(vertices)}
    ends = np.array([(at[a], at[b]) for x, y in cables for a, b in ((x, y), (y, x))])
    return Topology(
        hosts=("left", "right"),
        vertices=Vertices(
            name=tuple(vertices),
            tier=np.array([tier for tier, _ in vertices.values()]),
            host=np.array([host for _, host in vertices.values()]),
        ),
        links=Links(
            source=ends[:, 0],
            target=ends[:, 1],
            bytes_per_s=np.full(len(ends), 1e9),
            delay_s=np.zeros(len(ends)),
        ),
    )


def test_thousands_of_senders_that_stop_at_one_link_do_not_hold_the_others_back() -> None:
    """Adding and subtracting shares leaves a rounding error that belongs to no sender."""
    shares = np.random.default_rng(2).random(2000).tolist()
    crowd = [
        FluidJob(compute_s=1e-3, start_s=0.0, busy_s={0: s, 2 + j: 1.0})
        for j, s in enumerate(shares)
    ]
    crowd[0] = replace(crowd[0], busy_s={**crowd[0].busy_s, 1: 1e-3})
    pair = [FluidJob(compute_s=1e-3, start_s=0.0, busy_s={1: 0.6}) for _ in range(2)]
    demand = a_demand(*crowd, *pair)
    run = simulate_fluid(demand, np.zeros(demand.jobs, np.int64), horizon_s=0.01)
    assert run.comm[:-2] == pytest.approx(1 / sum(shares), rel=1e-9)
    assert run.comm[-2:] == pytest.approx((1 - 1e-3 / sum(shares)) / 2, rel=1e-9)


def test_noise_that_leaves_no_time_to_compute_is_refused() -> None:
    demand = a_demand(FluidJob(busy_s={0: 1.0}), FluidJob(busy_s={0: 1.0}))
    with pytest.raises(InvalidInput, match="noise"):
        simulate_fluid(demand, np.array([0, 0]), horizon_s=10.0, noise=40.0)


def test_sincronia_orders_jobs_whose_times_differ_beyond_floating_point_precision() -> None:
    demand = a_demand(FluidJob(busy_s={1: 1e3}), FluidJob(busy_s={1: 1e-15}))
    assert bssi_order(demand).tolist() == [1, 0]


def test_a_group_too_large_to_be_simulated_keeps_its_levels_without_using_memory() -> None:
    jobs = 3000
    demand = a_demand(
        *(FluidJob(compute_s=1e-3, start_s=0.0, busy_s={0: 1.0}) for _ in range(jobs))
    )
    level, order = np.zeros(jobs, np.int64), np.arange(jobs)
    simulate_fluid(demand, level, horizon_s=1.0)  # compile before memory is measured
    tracemalloc.start()
    result = apply_floor(demand, level, order, 8, 1.0, window=PlayWindow(horizon_s=18.0))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.level.tolist() == level.tolist()
    assert not result.met
    assert most_bytes < jobs * jobs  # no memory for each pair of jobs


def test_joined_contentions_have_the_ends_of_all_bundles_or_of_none() -> None:
    one, other = (
        replace(
            a_contention(fixed=[{}], bundles=[[[[0], [1]]]], names=[name]),
            bundle_source=np.array([at]),
            bundle_target=np.array([at + 1]),
        )
        for name, at in (("a", 3), ("b", 5))
    )
    whole = join_parts([one, other])
    assert whole.bundle_source.tolist() == [3, 5]
    assert whole.bundle_target.tolist() == [4, 6]
    unasked = a_contention(fixed=[{}], bundles=[[[[0], [1]]]], names=["c"])
    assert join_parts([one, unasked]).bundle_source.size == 0


def test_a_host_without_components_does_not_affect_the_paths_of_others() -> None:
    topology = a_topology(
        {"a": (GPU, 0), "b": (NIC, 0), "s": (TOR, NO_HOST)}, [("a", "b"), ("b", "s")]
    )
    assert len(Routes(topology).insides.ports) == 1


def test_gpus_joined_only_outside_their_host_pass_its_port_twice() -> None:
    topology = a_topology(
        {"a": (GPU, 0), "b": (GPU, 0), "n": (NIC, 0), "s": (TOR, NO_HOST), "c": (GPU, 1)},
        [("a", "n"), ("b", "n"), ("n", "s"), ("c", "s")],
    )
    (path,) = Routes(topology).between(0, 1)
    assert [topology.link_name(link) for link in path] == ["a > n", "n > s", "s > n", "n > b"]


def test_an_integer_of_hundreds_of_digits_is_refused_with_its_location() -> None:
    fabric = {"kind": "clos", "hosts": 2, "host": "a100", "tors": 1, "aggregations": 1}
    with pytest.raises(InvalidInput, match="tor_bytes_per_s"):
        build_topology(fabric | {"tor_bytes_per_s": DIGITS})
    links = {"source": [0], "target": [1], "bytes_per_s": [DIGITS], "delay_s": [0]}
    vertices = {"name": ["a", "b"], "tier": [4, 4], "host": [-1, -1]}
    for name in ("bytes_per_s", "delay_s"):
        with pytest.raises(InvalidInput, match=f"links.{name}"):
            build_topology(
                {
                    "kind": "columns",
                    "hosts": [],
                    "vertices": vertices,
                    "links": links | {"bytes_per_s": [1e9], name: [DIGITS]},
                }
            )


@pytest.mark.parametrize(("work", "dp"), [(str(DIGITS), "1"), ("1", "Infinity"), ("1", "NaN")])
def test_traffic_with_numbers_out_of_range_is_refused(work: str, dp: str) -> None:
    text = f'{{"work_flop":{work},"compute_s":1,"start_s":0,"stages":[{{"dp":{dp},"tp":1}}]}}'
    with pytest.raises(InvalidInput, match="traffic"):
        parse_cell_traffic(text)


def test_levels_are_optimal_even_if_the_least_urgent_job_is_by_far_the_most_intense() -> None:
    """No loss depends on this job, so it must not reduce the precision of the others' weights."""
    demand = a_demand(*(FluidJob(work=work, busy_s={0: 1.0}) for work in (3e5, 1e5, 1.0, 1e25)))
    compression = compression_of(demand, np.arange(4), 2)
    assert compression.level.tolist() == [1, 0, 0, 0]
    assert compression.lost == 2e5 + 1


def test_iterations_of_a_nanosecond_and_of_years_get_an_approximate_circle() -> None:
    with np.errstate(invalid="raise"):
        grid = common_grid(np.array([1e-9, 1e9]))
    assert grid.counts.tolist() == [1, 128]
    assert grid.error == pytest.approx(1.0)


def test_a_floor_holds_for_slow_jobs_next_to_thousands_of_fast_ones() -> None:
    """A window that is long enough for the slow jobs is too long to simulate the fast ones."""
    fast = [FluidJob(compute_s=0.1, busy_s={1 + j // 2: 1e-3}) for j in range(3000)]
    slow = [FluidJob(compute_s=400.0, busy_s={0: 400.0}) for _ in range(3)]
    demand = a_demand(*fast, *slow)
    level = [*np.tile([1, 0], 1500).tolist(), 2, 1, 0]
    result = apply_floor(demand, np.array(level), np.arange(demand.jobs), 3, 0.9)
    assert (result.share < 1.1).all()
    assert not result.met
    apart = demand.among(np.arange(3000, 3003))
    alone = apply_floor(apart, np.array([2, 1, 0]), np.arange(3), 3, 0.9)
    assert result.level[3000:].tolist() == alone.level.tolist()
    assert result.share[3000:] == pytest.approx(alone.share, rel=0.1)
