"""Laws of priority compression on random contention graphs."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.network.contention import LinkDemand
from tessera.formulation.tables import Ints
from tessera.solvers.network.compression import compress_levels, compression_of
from tessera.solvers.network.compression.cuts import cut_of
from tessera.solvers.network.compression.dag import Dag, dag_of
from tessera.solvers.network.compression.mincut import best_levels
from tessera.solvers.network.compression.orders import topological_orders
from tests.support.demands import a_demand
from tests.support.laws import examples


@st.composite
def demands(draw: st.DrawFn, jobs: int) -> LinkDemand:
    """Draw jobs on a few links, many of equal intensity."""
    count = draw(st.integers(2, jobs))
    links = draw(st.integers(1, 2 * jobs))
    own = draw(
        st.lists(
            st.lists(st.integers(0, links - 1), max_size=3, unique=True),
            min_size=count,
            max_size=count,
        )
    )
    work = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return a_demand(own, np.array(work, dtype=np.float64))


def weight_between(dag: Dag, order: Ints, low: int, middle: int, high: int) -> int:
    """Return C, the weight of edges from positions [low, middle) to [middle, high) of the order."""
    first, second = set(order[low:middle].tolist()), set(order[middle:high].tolist())
    return sum(
        int(dag.weight[v])
        for v in first
        for u in dag.target[dag.start[v] : dag.start[v + 1]].tolist()
        if u in second
    )


def edge_sources(dag: Dag) -> Ints:
    """Return the source vertex of each edge."""
    return np.repeat(np.arange(len(dag.job)), np.diff(dag.start))


@examples(40)
@given(demands(jobs=9), st.integers(0, 99))
def test_weights_of_an_order_keep_the_quadrangle_inequality(demand: LinkDemand, seed: int) -> None:
    dag = dag_of(demand, np.arange(demand.jobs))
    for order in topological_orders(dag, 2, seed):
        for a, b, c, d in combinations(range(len(order) + 1), 4):
            left = weight_between(dag, order, 0, a, c) + weight_between(dag, order, 0, b, d)
            right = weight_between(dag, order, 0, a, d) + weight_between(dag, order, 0, b, c)
            assert left >= right


@examples(40)
@given(demands(jobs=8), st.integers(1, 4), st.integers(0, 99))
def test_the_program_finds_the_best_of_all_cuts_of_an_order(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    dag = dag_of(demand, np.arange(demand.jobs))
    for order in topological_orders(dag, 2, seed):
        losses = []
        for cuts in combinations_with_replacement(range(len(order) + 1), levels - 1):
            level = np.empty(len(order), np.int64)
            for at, (low, high) in enumerate(pairwise([0, *cuts, len(order)])):
                level[order[low:high]] = at
            losses.append(int(dag.inside(level) @ dag.weight))
        cut = cut_of(dag, order, levels)
        assert cut.lost == min(losses) == int(dag.inside(cut.level) @ dag.weight)
        assert cut.level.tolist() == cut_of(dag, order, levels, plainly=True).level.tolist()


@examples(60)
@given(demands(jobs=40), st.integers(1, 6), st.integers(0, 99))
def test_levels_are_in_range_and_never_invert_two_contending_jobs(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(demand.jobs)
    level = compress_levels(demand, demand.intensity, order, levels, seed=seed)
    dag = dag_of(demand, order)
    assert ((level >= 0) & (level < levels)).all()
    assert (level[dag.job[edge_sources(dag)]] >= level[dag.job[dag.target]]).all()


@examples(60)
@given(demands(jobs=40), st.integers(1, 6), st.integers(0, 99))
def test_minimum_cuts_end_at_the_same_loss_from_wherever_they_start(
    demand: LinkDemand, levels: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(demand.jobs)
    dag = dag_of(demand, order)
    lowest = np.zeros(len(dag.job), np.int64)
    found = {
        best_levels(dag, start, levels).lost
        for start in (lowest, lowest + levels - 1, np.minimum(dag.height(), levels - 1))
    }
    best = compression_of(demand, order, levels)
    assert best.proven
    assert found == {int(dag.inside(best.level[dag.job]) @ dag.weight)}
    assert all(
        min(found) <= cut_of(dag, one, levels).lost for one in topological_orders(dag, 5, seed)
    )
