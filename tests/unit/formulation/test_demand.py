"""Demands for resources other than GPUs: on nodes, in pool rows, in dominance and in documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.capacity import pools_have_enough
from tessera.formulation.cells import Cells, build_cells
from tessera.formulation.codec import decode, digest, encode
from tessera.formulation.demand import Capacity, Demand
from tessera.formulation.dominance import find_undominated, find_undominated_from
from tessera.formulation.errors import InvalidInput
from tessera.formulation.given_demand import demand_on, demands_of_cells
from tessera.formulation.lifecycle import JobState
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.snapshot import Nodes, Snapshot
from tessera.formulation.statement import build_problem, draft_columns, state_draft
from tests.support.builders import a_job, a_node, a_random_snapshot, a_snapshot, an_estimate

GIB = 1 << 30


def with_demands(cells: Cells, cpus: Sequence[int], host_bytes: Sequence[int] = ()) -> Cells:
    """Return Cells with the given total demands for CPU cores and host memory."""
    return replace(cells, cpus=np.array(cpus), host_bytes=np.array(host_bytes, np.int64))


def a_snapshot_with_two_counts(nodes: Sequence[dict[str, object]], jobs: int = 3) -> Snapshot:
    """Return queued jobs with Cells of 1 and 2 GPUs."""
    return a_snapshot(
        nodes=list(nodes),
        jobs=[a_job(f"j{j}") for j in range(jobs)],
        estimates=[an_estimate(gpus=1), an_estimate(gpus=2, iter_time_s=0.6)],
    )


def test_a_node_share_of_the_demand_is_rounded_up() -> None:
    whole = Demand(gpus=8, cpus=20, host_bytes=9 * GIB)
    assert whole.on_node(8) == whole
    assert whole.on_node(4) == Demand(gpus=4, cpus=10, host_bytes=9 * GIB // 2)
    assert whole.on_node(3) == Demand(gpus=3, cpus=8, host_bytes=-(-27 * GIB // 8))


def test_every_stated_resource_must_suffice_and_unstated_ones_are_unlimited() -> None:
    node = Capacity(gpus=4, cpus=8)
    assert node.fits(Demand(gpus=4, cpus=8, host_bytes=1 << 50))
    assert not node.fits(Demand(gpus=5, cpus=8))
    assert not node.fits(Demand(gpus=4, cpus=9))
    assert not Capacity(gpus=4, host_bytes=GIB).fits(Demand(gpus=1, host_bytes=GIB + 1))
    share = Demand(gpus=1, cpus=3, host_bytes=GIB)
    assert node.minus(share) == Capacity(gpus=3, cpus=5)
    assert node.minus(share).plus(share) == node


def test_a_round_that_needs_only_gpus_has_only_gpu_rows() -> None:
    snapshot = a_snapshot_with_two_counts([a_node("n0", gpus=2, cpus=2, host_bytes=GIB)])
    assert [row.name for row in build_problem(snapshot, Policy()).rows] == ["gpus/a100"]


def a_problem_with_demands(
    snapshot: Snapshot, cpus: Sequence[int], host_bytes: Sequence[int] = ()
) -> Problem:
    """Return the problem of the round whose Cells have the given demands."""
    draft = draft_columns(snapshot, Policy())
    draft = replace(draft, cells=with_demands(draft.cells, cpus, host_bytes))
    return state_draft(pools_have_enough(draft)).problem


def test_a_pool_has_a_row_for_each_resource_that_its_columns_need() -> None:
    nodes = [
        a_node("n0", gpus=4, cpus=6, host_bytes=3 * GIB),
        a_node("n1", gpus=4, cpus=5, host_bytes=3 * GIB + 1),
        a_node("n2", gpus=4, cpus=64, host_bytes=64 * GIB, schedulable=False),
    ]
    problem = a_problem_with_demands(a_snapshot_with_two_counts(nodes), [3, 8], [0, GIB + 1])
    assert [(row.name, row.capacity) for row in problem.rows] == [
        ("gpus/a100", 8),
        ("cpus/a100", 11),
        ("host memory/a100", 6 * 1024),
    ]
    assert problem.usage_of(0) == {0: 1, 1: 3}
    assert problem.usage_of(1) == {0: 2, 1: 8, 2: 1024}


def test_a_pool_with_a_node_of_unstated_capacity_has_no_row() -> None:
    nodes = [a_node("n0", gpus=4, cpus=6), a_node("n1", gpus=4), a_node("v0", 1, gpus=4, cpus=7)]
    estimates = [an_estimate(gpu_type=kind, gpus=1) for kind in (0, 1)]
    snapshot = a_snapshot(nodes=nodes, jobs=[a_job("j")], estimates=estimates)
    rows = a_problem_with_demands(snapshot, [1, 1], [GIB, GIB]).rows
    assert [row.name for row in rows] == ["gpus/a100", "gpus/v100", "cpus/v100"]


def test_host_memory_rows_do_not_overflow_although_bytes_would() -> None:
    nodes = [a_node(f"n{i}", gpus=8, host_bytes=2 << 40) for i in range(64)]
    problem = a_problem_with_demands(
        a_snapshot_with_two_counts(nodes, jobs=4000), [0, 0], [1 << 40, 2 << 40]
    )
    assert problem.rows[1].capacity == 64 * 2 * 1024**2


def test_a_cell_is_dominated_only_by_one_that_needs_no_more_of_any_resource() -> None:
    estimates = [
        an_estimate(gpus=1, iter_time_s=1.0),
        an_estimate(gpus=2, iter_time_s=1.0),
        an_estimate(gpus=4, iter_time_s=0.5),
    ]
    snapshot = a_snapshot(nodes=[a_node("n0")], jobs=[], estimates=estimates)
    cells = build_cells(snapshot)
    assert find_undominated(cells).tolist() == [True, False, True]
    assert find_undominated(with_demands(cells, [4, 2, 8])).tolist() == [True, True, True]
    assert find_undominated(with_demands(cells, [4, 4, 8])).tolist() == [True, False, True]
    assert find_undominated(with_demands(cells, [0, 0, 0], [4, 2, 8])).tolist() == [
        True,
        True,
        True,
    ]
    assert find_undominated_from(with_demands(cells, [4, 2, 1]), 0, 2).tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_dominance_in_all_resources_matches_pairwise_comparison(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = build_cells(a_random_snapshot(seed, jobs=0))
    cells = replace(cells, rate=np.round(cells.rate, -1))  # so that some rates are equal
    cpus, host_bytes = rng.integers(0, 3, (2, len(cells))).tolist()
    cells = with_demands(cells, cpus, host_bytes)
    columns = (cells.gpus, cells.cpus, cells.host_bytes, -cells.rate)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    groups = list(zip(cells.workload.tolist(), cells.gpu_type.tolist(), strict=True))
    dominated = [
        any(
            groups[i] == groups[j]
            and all(other <= own for other, own in zip(rows[j], rows[i], strict=True))
            and (rows[j] != rows[i] or j < i)
            for j in range(len(rows))
        )
        for i in range(len(rows))
    ]
    assert find_undominated(cells).tolist() == [not is_dominated for is_dominated in dominated]


def test_stated_capacities_read_back() -> None:
    snapshot = a_snapshot_with_two_counts([a_node("n0", cpus=8), a_node("n1", host_bytes=GIB)])
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.nodes.equals(snapshot.nodes)
    assert digest(again) == digest(snapshot)
    assert again.nodes.capacity(0) == Capacity(gpus=8, cpus=8)
    assert again.nodes.capacity(1) == Capacity(gpus=8, host_bytes=GIB)
    problem = a_problem_with_demands(
        a_snapshot_with_two_counts([a_node("n0", cpus=8)]), [1, 2], [0, GIB]
    )
    read = decode(encode(problem))
    assert isinstance(read, Problem)
    assert read.cells.equals(problem.cells)


def test_meaningless_numbers_are_refused() -> None:
    snapshot = a_snapshot_with_two_counts([a_node("n0", cpus=8)])
    wrong = Nodes.from_rows([a_node("n0", cpus=-2)])
    with pytest.raises(InvalidInput, match=r"nodes\.cpus"):
        replace(snapshot, nodes=wrong)
    with pytest.raises(InvalidInput, match="at least 0"):
        with_demands(build_cells(snapshot), [1, -1])


def test_a_job_that_stays_needs_what_it_was_given_and_others_what_estimates_say() -> None:
    given = {"current_cpus": 3, "current_host_bytes": GIB}
    running = a_job("stays", state=JobState.RUNNING, cell=(0, 1, 1)) | given
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 4, cpus=10)],
        jobs=[running, a_job("starts")],
        estimates=[an_estimate(gpus=1, cpus=8), an_estimate(gpus=2, iter_time_s=0.6, cpus=9)],
    )
    draft = draft_columns(snapshot, Policy())
    columns = zip(draft.job.tolist(), draft.gpus.tolist(), draft.demand.cpus.tolist(), strict=True)
    assert sorted(columns) == [(0, 1, 3), (0, 2, 9), (1, 1, 8), (1, 2, 9)]
    known = demands_of_cells(snapshot.estimates)
    own, other = snapshot.jobs.key_at(0), snapshot.jobs.key_at(0)._replace(gpus=2)
    assert demand_on(snapshot, known, 0, own) == Demand(gpus=1, cpus=3, host_bytes=GIB)
    assert demand_on(snapshot, known, 0, other) == Demand(gpus=2, cpus=9)
    assert demand_on(snapshot, known, 1, own) == Demand(gpus=1, cpus=8)
    again = decode(encode(snapshot))
    assert isinstance(again, Snapshot)
    assert again.jobs.current_cpus.tolist() == [3, -1]


def test_the_shape_that_needs_most_counts_because_measurements_may_state_nothing() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 2), a_node("m", 0, 2)],
        jobs=[a_job("j")],
        estimates=[an_estimate(gpus=2, nodes=1), an_estimate(gpus=2, nodes=2, cpus=8)],
    )
    assert build_cells(snapshot).cpus.tolist() == [8, 8]
    assert list(demands_of_cells(snapshot.estimates).values()) == [(8, 0)]


def test_a_wider_shape_is_not_given_a_cell_that_needs_more() -> None:
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 2), a_node("m", 0, 2)],
        jobs=[a_job("j")],
        plans=("", "offload"),
        estimates=[
            an_estimate(gpus=2, nodes=1),
            an_estimate(gpus=2, nodes=2, iter_time_s=3.0),
            an_estimate(gpus=2, nodes=2, plan=1, cpus=8),
        ],
    )
    cells = build_cells(snapshot)
    compact = int(np.flatnonzero(cells.nodes == 1)[0])
    assert cells.plan[cells.row_on(compact, 2)] == 0
