from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from tessera.formulation.answer.network.check import find_network_violations
from tessera.formulation.answer.network.contention import LinkDemand
from tessera.formulation.answer.network.plan import NetworkPlan
from tessera.formulation.answer.solution import SolveStatus
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.solvers.base import Budget
from tessera.solvers.network.compression import compress_levels, compression_of, sample_orders
from tessera.solvers.network.compression.cuts import cut_of
from tessera.solvers.network.compression.dag import MAX_TOTAL_WEIGHT, Dag, dag_of
from tessera.solvers.network.compression.mincut import best_levels
from tessera.solvers.network.compression.orders import topological_orders
from tests.support.demands import (
    a_contention,
    a_demand,
    a_demand_of_pairs,
    random_pairs,
    urgency,
)
from tests.support.oracles.compression_exact import exact


def a_random_demand(seed: int, jobs: int, density: float) -> LinkDemand:
    """Return jobs of log-normal intensity that contend in pairs."""
    rng = np.random.default_rng(seed)
    return a_demand_of_pairs(random_pairs(rng, jobs, density), rng.lognormal(0.0, 1.0, jobs))


def a_contended_demand(seed: int, jobs: int, links: int, each: int) -> LinkDemand:
    """Return jobs that use ``each`` random links."""
    rng = np.random.default_rng(seed)
    own = [rng.choice(links, each, replace=False).tolist() for _ in range(jobs)]
    return a_demand(own, rng.lognormal(0.0, 1.0, jobs))


def edges_of(dag: Dag) -> list[tuple[int, int]]:
    """Return the edges as pairs of jobs."""
    source = np.repeat(np.arange(len(dag.job)), np.diff(dag.start))
    return list(zip(dag.job[source].tolist(), dag.job[dag.target].tolist(), strict=True))


def least_loss(dag: Dag, levels: int) -> int:
    """Return the least weight of edges within levels, by trying all levels of all vertices."""
    source = np.repeat(np.arange(len(dag.job)), np.diff(dag.start))
    assignments = np.array(list(product(range(levels), repeat=len(dag.job))), dtype=np.int64)
    upper, lower = assignments[:, source], assignments[:, dag.target]
    allowed = (upper >= lower).all(axis=1)
    return int(((upper == lower)[allowed] @ dag.weight[source]).min())


def has_inversion(demand: LinkDemand, order: Ints, level: Ints) -> bool:
    """Return whether a job is served before a more urgent one with which it contends."""
    return any(level[a] < level[b] for a, b in edges_of(dag_of(demand, order)))


FIGURE_13 = a_demand([[0], [0], [1], [1]], [4.0, 3.0, 2.0, 1.0])


def test_two_pairs_of_jobs_on_two_links_get_two_levels_each_as_in_figure_13() -> None:
    levels = compress_levels(FIGURE_13, FIGURE_13.intensity, np.arange(4), 2)
    assert levels.tolist() == [1, 0, 1, 0]


def test_the_graph_agrees_with_enumeration_of_all_pairs() -> None:
    demand = a_contended_demand(3, jobs=60, links=25, each=3)
    order = urgency(demand)
    own = [set(part.tolist()) for part in np.split(demand.link, demand.link_start[1:-1])]
    rank = np.argsort(order)
    pairs = {(a, b) for a in range(60) for b in range(60) if rank[a] < rank[b] and own[a] & own[b]}
    edges = edges_of(dag_of(demand, order))
    assert len(edges) == len(set(edges))
    assert set(edges) == pairs


def test_every_order_is_topological_and_by_urgency_first() -> None:
    demand = a_contended_demand(1, jobs=40, links=30, each=2)
    dag = dag_of(demand, urgency(demand))
    source = np.repeat(np.arange(len(dag.job)), np.diff(dag.start))
    found = list(topological_orders(dag, 10, 0))
    assert found[0].tolist() == list(range(len(dag.job)))
    assert len({tuple(order.tolist()) for order in found}) == 10
    for order in found:
        place = np.argsort(order)
        assert (place[source] < place[dag.target]).all()
    assert all((a == b).all() for a, b in zip(found, topological_orders(dag, 10, 0), strict=True))


def test_every_topological_order_can_be_drawn() -> None:
    demand = a_demand_of_pairs([(0, 1), (2, 3), (1, 3)], [4.0, 3.0, 2.0, 1.0])
    dag = dag_of(demand, np.arange(4))
    found = {tuple(order.tolist()) for order in topological_orders(dag, 200, 0)}
    assert found == {(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)}


@pytest.mark.parametrize(
    ("jobs", "levels", "density", "cases"),
    [(5, 3, 0.4, 60), (8, 3, 0.4, 40), (8, 3, 0.7, 40), (9, 3, 0.4, 20)],
)
def test_ten_orders_come_close_to_the_best_and_minimum_cuts_reach_it(
    jobs: int, levels: int, density: float, cases: int
) -> None:
    shares, hits = [], 0
    for seed in range(cases):
        demand = a_random_demand(seed, jobs, density)
        dag = dag_of(demand, urgency(demand))
        total = int(dag.weight @ np.diff(dag.start))
        if not total:
            continue
        best = least_loss(dag, levels)
        orders = sample_orders(dag, levels, 10, 0)
        assert best <= orders.lost
        assert best_levels(dag, orders.level, levels).lost == best
        assert compression_of(demand, urgency(demand), levels).proven
        shares.append((total - orders.lost) / (total - best))
        hits += orders.lost == best
    assert np.mean(shares) >= 0.999
    assert hits >= 0.95 * len(shares)


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_cp_sat_agrees_with_minimum_cuts(levels: int) -> None:
    for seed in range(5):
        demand = a_random_demand(seed, jobs=18, density=0.3)
        dag = dag_of(demand, urgency(demand))
        found = exact(dag, levels, Budget(remaining_s=lambda: math.inf))
        assert found.status is SolveStatus.OPTIMAL
        assert found.level is not None
        assert found.lost == best_levels(dag, np.zeros(len(dag.job), np.int64), levels).lost


def test_cp_sat_agrees_with_enumeration_of_all_levels() -> None:
    for seed in range(10):
        demand = a_random_demand(seed, jobs=7, density=0.5)
        dag = dag_of(demand, urgency(demand))
        found = exact(dag, 3, Budget(remaining_s=lambda: math.inf))
        assert found.lost == least_loss(dag, 3)


@pytest.mark.parametrize("levels", [2, 3, 8, 200])
def test_the_quick_program_finds_the_same_cut_as_the_plain_one(levels: int) -> None:
    demand = a_contended_demand(2, jobs=150, links=60, each=2)
    dag = dag_of(demand, urgency(demand))
    for order in topological_orders(dag, 3, 7):
        quick, plain = cut_of(dag, order, levels), cut_of(dag, order, levels, plainly=True)
        assert quick.lost == plain.lost == int(dag.inside(quick.level) @ dag.weight)
        assert quick.level.tolist() == plain.level.tolist()


def test_beyond_the_edge_limit_the_best_cut_is_used_without_a_proof() -> None:
    demand = a_contended_demand(2, jobs=60, links=30, each=2)
    order = urgency(demand)
    cut, best = compression_of(demand, order, 3, most_edges=0), compression_of(demand, order, 3)
    assert (cut.proven, best.proven) == (False, True)
    assert best.lost < cut.lost
    assert not has_inversion(demand, order, cut.level)


@pytest.mark.parametrize("demand", [a_demand([], []), a_demand([[], []], [1.0, 2.0], links=3)])
def test_an_empty_demand_is_no_error(demand: LinkDemand) -> None:
    levels = compress_levels(demand, demand.intensity, np.arange(demand.jobs), 8)
    assert levels.tolist() == [0] * demand.jobs


def test_a_plan_with_these_levels_passes_the_checker_and_an_inverted_one_does_not() -> None:
    demand = a_contended_demand(4, jobs=80, links=40, each=3)
    order = np.random.default_rng(0).permutation(80)  # not sorted by intensity, as after swaps
    level = compress_levels(demand, demand.intensity, order, 4)
    plan = NetworkPlan(
        chosen=np.zeros(0, np.int64), priority=demand.intensity, order=order, level=level, levels=4
    )
    assert not find_network_violations(a_contention(demand), plan)
    upside_down = NetworkPlan(
        chosen=plan.chosen, priority=plan.priority, order=order, level=3 - level, levels=4
    )
    assert find_network_violations(a_contention(demand), upside_down)


def test_weights_keep_their_ratios_and_none_is_rounded_to_zero() -> None:
    demand = a_demand([[0]] * 6, [1e20, 5e19, 3.0, 1e-3, 1e-9, 0.0])
    dag = dag_of(demand, urgency(demand))
    assert dag.weight[:2].tolist() == sorted(dag.weight[:2].tolist(), reverse=True)
    assert math.isclose(dag.weight[0] / dag.weight[1], 2.0, rel_tol=1e-12)
    assert (dag.weight > 0).tolist() == [True] * 5 + [False]
    assert int(dag.weight @ np.diff(dag.start)) <= MAX_TOTAL_WEIGHT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": 0}, "levels: is"),
        ({"samples": 0}, "samples"),
        ({"priority": np.array([1.0, math.nan, 2.0, 3.0])}, "priority"),
        ({"priority": np.array([1.0, 2.0])}, "priority"),
        ({"demand": a_demand([[0]] * 4, [math.nan, 1.0, 1.0, 1.0])}, "intensity"),
        ({"order": np.array([0, 1, 2])}, "order"),
        ({"order": np.array([0, 1, 2, 2])}, "order"),
        ({"order": np.array([1, 2, 3, 4])}, "order"),
    ],
)
def test_meaningless_input_is_refused(changes: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {
        "demand": FIGURE_13,
        "priority": FIGURE_13.intensity,
        "order": np.arange(4),
        "levels": 2,
    }
    with pytest.raises(InvalidInput, match=message):
        compress_levels(**fine | changes)
