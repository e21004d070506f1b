"""Packing rows: true for every placement, whatever their weights are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.answer.packing_check import find_false_rows
from tessera.formulation.round.packing import PackingWeights, classify_shapes, packing_rows
from tessera.formulation.round.packing.shares import (
    MAX_NODE_GPUS,
    leaves_gaps,
    most_weight,
    shares_of,
)
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import CouplingRow, Problem
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.cells import build_cells
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.goals.rows import with_rows
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes, state_freely
from tests.support.packings import accepted_shapes, most_on_node

HALVES = PackingWeights(gpu_type="a100", weight=(0, 0, 0, 0, 1, 2, 2, 2, 2))


def gangs(*gpus: int, nodes: int = 2) -> Snapshot:
    """Return queued jobs, each on one GPU count, on fresh nodes of 8."""
    return a_snapshot(
        nodes=some_nodes((0, nodes, 8)),
        jobs=[a_job(f"j{k}", k) for k in range(len(gpus))],
        estimates=[an_estimate(k, 0, n, -(-n // 8), iter_time_s=8 / n) for k, n in enumerate(gpus)],
    )


def stated_with(snapshot: Snapshot, *weights: PackingWeights) -> Problem:
    types = frozenset(range(len(snapshot.gpu_types)))
    problem = state_freely(snapshot, Policy(), types).problem
    classes = classify_shapes(snapshot, problem, types, {})
    names = {kind.name: k for k, kind in enumerate(snapshot.gpu_types)}
    return with_rows(problem, packing_rows(classes, names, weights))


@pytest.mark.parametrize("size", range(1, 11))
def test_the_most_that_a_node_holds_is_that_over_all_sets_of_shares(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(4):
        weight = (0, *rng.integers(0, 6, size).tolist())
        assert most_weight(size, weight) == most_on_node(size, weight)


@pytest.mark.parametrize("size", range(11, MAX_NODE_GPUS + 1))
def test_the_most_that_a_large_node_holds_is_no_less_than_that_of_any_sampled_set(
    size: int,
) -> None:
    rng = np.random.default_rng(size)
    weight = (0, *rng.integers(0, 9, size).tolist())
    most, reached = most_weight(size, weight), 0
    for _ in range(300):
        left, total = size, 0
        while left:
            share = int(rng.integers(1, left + 1))
            left, total = left - share, total + weight[share]
        reached = max(reached, total)
    assert reached <= most <= size * max(weight)


@pytest.mark.parametrize("sizes", [(8,), (4, 8), (1, 2, 3, 6), (5, 16)])
def test_gangs_are_divided_in_all_the_ways_that_the_checker_accepts(sizes: tuple[int, ...]) -> None:
    for gpus in range(1, 14):
        for nodes in range(1, min(gpus, 5) + 1):
            ways = {tuple(sorted(way)) for way in shares_of(gpus, nodes, sizes)}
            assert ways == set(accepted_shapes(gpus, nodes, set(sizes))), (gpus, nodes)


def test_weights_are_read_back_from_the_name_of_their_row() -> None:
    row = CouplingRow(kind="packing", subject=HALVES.subject, capacity=1)  # type: ignore[arg-type]
    assert row.name == "packing/a100: shares of 4 count 1, 5-8 count 2"
    read = PackingWeights.from_name(row.name)
    assert read is not None
    assert read.up_to(8) == HALVES


@pytest.mark.parametrize(
    "name",
    ["gpus/a100", "packing/a100", "packing/a: shares of 40 count 1", "packing/a: shares of x"],
)
def test_names_of_no_packing_row_have_no_weights(name: str) -> None:
    assert PackingWeights.from_name(name) is None


@pytest.mark.parametrize(
    ("gpus", "sizes", "gaps"),
    [
        ([1, 2, 4, 8, 16, 64], [8], False),
        ([1, 2, 3], [8], True),
        ([5], [8], True),
        ([3, 6], [6], False),
        ([12], [8], False),
        ([6], [8], True),
        ([8], [4, 8], False),
    ],
)
def test_shares_leave_gaps_unless_each_divides_the_next_one_and_the_node(
    gpus: list[int], sizes: list[int], gaps: bool
) -> None:
    assert leaves_gaps(gpus, sizes) is gaps


def test_rates_on_several_numbers_of_nodes_are_those_on_each() -> None:
    rng = np.random.default_rng(0)
    estimates = [
        an_estimate(0, 0, gpus, nodes, iter_time_s=float(rng.choice([1.0, 2.0, 3.0, np.inf])))
        for gpus in (2, 4, 7, 8, 12)
        for nodes in sorted(
            rng.choice(np.arange(1, gpus + 1), min(3, gpus), replace=False).tolist()
        )
    ]
    cells = build_cells(
        a_snapshot(nodes=some_nodes((0, 12, 8)), jobs=[a_job("j")], estimates=estimates)
    )
    assert len(cells) > 4
    for table in (cells, replace(cells, complete=np.ones(len(cells), np.bool_))):
        for cell in range(len(cells)):
            nodes = list(range(1, 13))
            assert table.rates_on(cell, nodes) == [table.rate_on(cell, n) for n in nodes]


def test_a_row_whose_capacity_is_too_small_is_refused() -> None:
    snapshot = gangs(5, 3, 7, 12, 2)
    problem = stated_with(snapshot, HALVES)
    last = replace(problem.rows[-1], capacity=problem.rows[-1].capacity - 1)
    false = replace(problem, rows=(*problem.rows[:-1], last))
    assert [v.rule for v in find_false_rows(snapshot, false, {})] == ["packing row"]


def test_a_row_that_counts_a_gang_at_more_than_its_shares_weigh_is_refused() -> None:
    snapshot = gangs(5, 3, 7, 12, 2)
    problem = stated_with(snapshot, HALVES)
    amount = problem.amount.copy()
    amount[np.flatnonzero(problem.row == len(problem.rows) - 1)[0]] += 1
    broken = find_false_rows(snapshot, replace(problem, amount=amount), {})
    assert len(broken) == 1
    assert "weighs 2 only" in broken[0].detail


def test_a_row_that_forbids_wider_shapes_is_refused() -> None:
    snapshot = gangs(5, 5, 5)
    problem = state_round(snapshot, Policy()).problem  # without columns for wider shapes
    columns = np.arange(len(problem.cell))
    row = len(problem.rows)
    false = replace(
        problem,
        rows=(*problem.rows, replace(stated_with(snapshot, HALVES).rows[-1], capacity=4)),
        usage_start=2 * np.arange(len(columns) + 1),
        row=np.stack([problem.row, np.full(len(columns), row)], axis=1).ravel(),
        amount=np.stack([problem.amount, np.full(len(columns), 2)], axis=1).ravel(),
    )
    assert len(find_false_rows(snapshot, false, {})) == 3


def test_a_row_that_states_no_weights_is_refused() -> None:
    snapshot = gangs(5, 5)
    problem = stated_with(snapshot, HALVES)
    last = replace(problem.rows[-1], subject="a100")
    broken = find_false_rows(snapshot, replace(problem, rows=(*problem.rows[:-1], last)), {})
    assert "does not state its weights" in broken[0].detail
