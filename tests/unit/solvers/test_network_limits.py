"""Network planning of any jobs takes bounded work, and inputs at the limits break nothing."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.answer.network.flows import NetworkJob, build_contention
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.state.topologies import fabric
from tessera.formulation.state.topologies.builders import build_clos, build_torus
from tessera.formulation.state.topologies.document import build_topology
from tessera.formulation.state.topologies.routes import Routes
from tessera.formulation.state.topologies.shapes import SHAPES
from tessera.formulation.state.topologies.topology import NO_HOST, Links, Tier, Topology, Vertices
from tessera.formulation.state.traffic import (
    MAX_BYTES,
    MAX_FLOP,
    MAX_ITERATION_S,
    MIN_ITERATION_S,
    Exchange,
    Pattern,
    Traffic,
    parse_cell_traffic,
)
from tessera.solvers.network import floor, swaps
from tessera.solvers.network.baselines.circles import common_grid
from tessera.solvers.network.baselines.sincronia import bssi_order
from tessera.solvers.network.compression import compression_of
from tessera.solvers.network.factors import Clip, correction_factors
from tessera.solvers.network.floor import apply_floor
from tessera.solvers.network.fluid import (
    FluidRun,
    contending_groups,
    flop_under_levels,
    simulate_fluid,
)
from tessera.solvers.network.replan import replan
from tessera.solvers.network.swaps import PlayEffort, PlayWindow, swap_orders
from tests.support.networks import FluidJob, a_demand


def _uneven(ratio: float) -> tuple[FluidJob, ...]:
    return (
        FluidJob(work=1.0, compute_s=1.0, busy_s={0: 0.8}),
        FluidJob(work=ratio, compute_s=ratio, busy_s={0: 0.8 * ratio}),
        FluidJob(work=3.0, compute_s=1.0, busy_s={0: 0.7}),
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_job_that_leaves_next_to_nothing_of_a_link_starves_the_other(steps: int) -> None:
    """By rounding, the job's slowest link is another one, so 1 less its share is not a speed."""
    busy_s = 0.8294255678822373
    longer_s = busy_s
    for _ in range(steps):
        longer_s = math.nextafter(longer_s, 2.0)
    demand = a_demand(
        FluidJob(compute_s=0.001, start_s=0.0, busy_s={0: busy_s, 1: longer_s}),
        FluidJob(compute_s=0.1, start_s=0.0, busy_s={0: 1.1036914384693883}),
    )
    factors = correction_factors(demand, clip=Clip.NONE)
    assert np.isfinite(factors).all()
    assert (factors > 0).all()


@pytest.mark.parametrize("ratio", [1e4, 1e9, 1e15])
def test_a_window_simulates_a_bounded_number_of_iterations_however_uneven_the_jobs(
    ratio: float,
) -> None:
    assert PlayWindow().played(a_demand(*_uneven(ratio))) <= swaps.MAX_JUDGED_ITERATIONS * (
        1 + 1e-9
    )


def test_groups_share_the_simulation_budget_and_pass_on_the_rest() -> None:
    effort = PlayEffort(3, played=90.0)
    shares = []
    for used in (10.0, 40.0, 0.0):
        shares.append(effort.share())
        effort.spend(used)
    assert shares == [30.0, 40.0, 40.0]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the iterations of each call to the engine, in order."""
    found: list[float] = []

    def counted(demand: object, levels: object, *, horizon_s: float, warm_s: float = 0.0) -> object:
        found.append(len(levels) * (horizon_s + warm_s) * float((1 / demand.alone_s).sum()))  # type: ignore[arg-type,attr-defined]
        return flop_under_levels(demand, levels, horizon_s=horizon_s, warm_s=warm_s)  # type: ignore[arg-type]

    monkeypatch.setattr(swaps, "flop_under_levels", counted)
    return found


def test_orders_of_very_uneven_jobs_are_tried_within_the_simulation_budget(
    played: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swaps.PlayEffort.__init__, "__defaults__", (20_000.0, never_cancelled))
    even, uneven = a_demand(*_uneven(1.0)), a_demand(*_uneven(1e6))
    order = np.arange(3)
    assert contending_groups(uneven)
    assert swap_orders(uneven, order).tolist() == [0, 1, 2]
    assert sum(played) == 0
    swap_orders(even, order)
    assert 0 < sum(played) <= 20_000


def test_the_search_for_a_floor_is_bounded_for_very_uneven_jobs() -> None:
    demand = a_demand(*_uneven(1e5))
    level, order = np.array([7, 6, 5]), np.arange(3)
    result = apply_floor(demand, level, order, 8, 0.3)
    assert sorted(result.order.tolist()) == [0, 1, 2]
    assert ((result.level >= 0) & (result.level < 8)).all()


def test_the_search_for_a_floor_is_bounded_for_many_contending_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs: list[float] = []

    def counted(demand: LinkDemand, level: Ints, *, horizon_s: float, warm_s: float) -> FluidRun:
        costs.append(float(((horizon_s + warm_s) / demand.alone_s).sum()) * demand.jobs)
        return simulate_fluid(demand, level, horizon_s=horizon_s, warm_s=warm_s)

    monkeypatch.setattr(floor, "simulate_fluid", counted)
    monkeypatch.setattr(floor, "MAX_COST", 2e6)
    jobs = [
        FluidJob(compute_s=0.1 + n / 40, busy_s={0: 0.05 + n / 50, n + 1: 0.1}) for n in range(40)
    ]
    result = apply_floor(a_demand(*jobs), np.arange(40) % 8, np.arange(40), 8, 0.9)
    assert not result.met
    assert len(costs) >= 3  # one before, at least one round, one after
    assert sum(costs) <= 2e6


def test_impossibly_large_traffic_is_refused() -> None:
    for work_flop, compute_s in ((1e300, 1.0), (1e15, 1e300), (1e15, 1e-300)):
        with pytest.raises(InvalidInput, match="must"):
            Traffic(work_flop=work_flop, compute_s=compute_s, start_s=0.0)
    with pytest.raises(InvalidInput, match="must"):
        Exchange(pattern=Pattern.RING, members=np.array([[0, 1]]), sent_bytes=1e300)


def test_priorities_are_finite_for_the_extremes_of_work_and_traffic() -> None:
    hosts = [f"h{n}" for n in range(4)]
    topology = build_clos(
        hosts, SHAPES["a100"], tors=2, aggregations=2, tor_bytes_per_s=1e9, tor_delay_s=0.0
    )
    jobs = [
        NetworkJob(
            name=f"{work}-{sent}-{seconds}",
            gang=tuple((h, (0, 1)) for h in hosts),
            traffic=Traffic(
                work_flop=work,
                compute_s=seconds,
                start_s=0.0,
                exchanges=(
                    Exchange(pattern=Pattern.RING, members=np.arange(8)[None], sent_bytes=sent),
                ),
            ),
        )
        for work in (0.0, MAX_FLOP)
        for sent in (1e-300, 1e-3, MAX_BYTES)
        for seconds in (MIN_ITERATION_S, MAX_ITERATION_S)
    ]
    contended, notes = build_contention(topology, jobs)
    assert sum("sends nothing" in note for _, note in notes) == 4  # the jobs of 1e-300 bytes
    plan = replan(contended, levels=3).plan
    assert find_network_violations(contended, plan) == []
    assert np.isfinite(plan.priority).sum() == 8


def test_path_searches_are_cached_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = build_torus(
        [f"h{n}" for n in range(9)],
        SHAPES["a100"],
        sizes=[3, 3],
        link_bytes_per_s=1e9,
        link_delay_s=0.0,
    )
    gpus = np.array([topology.gpus_of(host)[0] for host in range(9)])
    ends = np.repeat(gpus, 9), np.tile(gpus, 9)
    apart = ends[0] != ends[1]
    plenty = Routes(topology).ways(ends[0][apart], ends[1][apart])
    monkeypatch.setattr(fabric, "MAX_CACHED_NUMBERS", 300)
    searched: list[int] = []
    search = fabric.Fabric._search

    def counted(self: fabric.Fabric, down: int) -> object:
        searched.append(down)
        return search(self, down)

    monkeypatch.setattr(fabric.Fabric, "_search", counted)
    routes = Routes(topology)
    for _ in range(2):
        paths = routes.ways(ends[0][apart], ends[1][apart])
        assert paths.path_link.tolist() == plenty.path_link.tolist()
        assert paths.fixed_link.tolist() == plenty.fixed_link.tolist()
    assert 9 < len(searched) < 18  # some were cached, some were not


@pytest.mark.parametrize("busy_s", [{}, {0: 1e-20}])
def test_a_job_whose_traffic_is_all_delay_has_a_factor(busy_s: dict[int, float]) -> None:
    demand = a_demand(
        FluidJob(compute_s=1.0, start_s=0.0, busy_s={0: 1.0}),
        FluidJob(compute_s=0.7, start_s=0.1, delay_s=1.0, busy_s=busy_s),
    )
    assert demand.comm_s[1] == 1.0
    assert np.isfinite(correction_factors(demand)).all()
    assert (correction_factors(demand) > 0).all()


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
