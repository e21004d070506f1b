"""Cells: shapes, dominance, demands for other resources than GPUs, and caution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.resources import Capacity, Demand
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.capacity import pools_have_enough
from tessera.formulation.round.columns import first_draft
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem, draft_columns, state_draft
from tessera.formulation.state.cells import Cells, build_cells
from tessera.formulation.state.dominance import find_undominated
from tessera.formulation.state.given_demand import demand_on, demands_of_cells
from tessera.formulation.state.information import apply_caution
from tessera.formulation.state.snapshot import Nodes, Snapshot
from tests.support.builders import (
    a_job,
    a_node,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
)


def test_a_shape_for_which_the_cluster_has_too_few_nodes_is_left_out() -> None:
    estimates = [
        an_estimate(gpus=8, nodes=1, iter_time_s=2.0),
        an_estimate(gpus=8, nodes=2, iter_time_s=1.0),
        an_estimate(gpus=8, nodes=4, iter_time_s=0.5),
    ]
    nodes = some_nodes((0, 1, 8), (0, 1, 4), (0, 2, 2))
    snapshot = a_snapshot(
        nodes=[node | {"name": f"n{i}"} for i, node in enumerate(nodes)],
        jobs=[],
        estimates=estimates,
    )
    assert sorted(build_cells(snapshot).nodes.tolist()) == [1, 2, 4]
    one_less = a_snapshot(
        nodes=[snapshot.nodes.row(n) for n in (0, 2, 3)], jobs=[], estimates=estimates
    )
    assert build_cells(one_less).nodes.tolist() == [1]


def test_a_job_on_another_shape_than_its_column_gets_the_fastest_cell_there() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=1, degree=1, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=2, degree=2, iter_time_s=2.0),
        an_estimate(gpus=4, nodes=2, degree=4, iter_time_s=1.6),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    (first,) = np.flatnonzero(cells.nodes == 1).tolist()
    assert cells.pipeline_degree[cells.row_on(first, 2)] == 4
    assert cells.placed_rate(first, 2) == 160.0
    assert cells.row_on(first, 4) == first  # nothing is known of this shape
    assert cells.placed_rate(first, 4) == pytest.approx(256 * 0.9**2)


def test_a_worse_shape_uses_its_own_estimate_or_nine_tenths_of_the_speed_per_halving() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=1, iter_time_s=1.0),
        an_estimate(gpus=4, nodes=2, iter_time_s=1.6),
    ]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=estimates))
    assert cells.rate_on(0, 1) == 256.0
    assert cells.rate_on(0, 2) == 160.0  # nearest narrower shape that runs, for 4 nodes
    assert cells.rate_on(0, 4) == pytest.approx(160.0 * 0.9)


def test_a_shape_that_this_cluster_cannot_have_is_scaled_to_a_possible_one() -> None:
    """Measured on one 8-GPU node, run on 4-GPU nodes."""
    snapshot = a_snapshot(
        nodes=some_nodes((0, 4, 4)), jobs=[], estimates=[an_estimate(gpus=8, nodes=1)]
    )
    cells = build_cells(snapshot)
    assert (cells.nodes[0], cells.rate[0]) == (2, pytest.approx(256 * 0.9))


def test_nothing_is_inferred_from_a_complete_profile() -> None:
    estimates = [
        an_estimate(gpus=4, nodes=2),
        an_estimate(gpus=8, nodes=1) | {"complete": True},
        an_estimate(1, gpus=4, nodes=2) | {"complete": False},
    ]
    rows = [{"complete": False} | estimate for estimate in estimates]
    cells = build_cells(a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=[], estimates=rows))
    shapes = list(zip(cells.workload, cells.gpus, cells.nodes, strict=True))
    assert sorted(shapes) == [(0, 4, 2), (1, 4, 1), (1, 4, 2)]  # eight GPUs are two nodes here
    (complete,) = np.flatnonzero(cells.workload == 0).tolist()
    assert cells.complete[complete]
    assert [cells.rate_on(complete, nodes) for nodes in (1, 2, 4)] == [0.0, 256.0, 0.0]
    incomplete = int(np.flatnonzero(cells.workload == 1)[0])
    assert cells.rate_on(incomplete, 4) == pytest.approx(256.0 * 0.9)


@pytest.mark.parametrize("seed", range(20))
def test_dominance_agrees_with_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimates = [
        an_estimate(w, t, g, n, degree=d, iter_time_s=float(rng.integers(1, 9)))
        for w in range(3)
        for t in range(2)
        for g in (1, 2, 4, 8, 16)
        for d in (1, 2)
        for n in (1, 2, 3, 4)
        if n <= g and rng.random() < 0.7
    ]
    nodes = some_nodes((0, 4, 8), (1, 5, 8))
    cells = build_cells(a_snapshot(nodes=nodes, jobs=[], estimates=estimates))
    keep = find_undominated(cells)
    for c in range(len(cells)):
        baselines = [
            r
            for r in range(len(cells))
            if r != c
            and cells.workload[r] == cells.workload[c]
            and cells.gpu_type[r] == cells.gpu_type[c]
            and cells.gpus[r] <= cells.gpus[c]
            and cells.nodes[r] <= cells.nodes[c]
            and cells.rate[r] >= cells.rate[c]
        ]
        needs = (cells.gpus, cells.nodes, cells.rate)
        strictly = [r for r in baselines if any(n[r] != n[c] for n in needs) or r < c]
        assert keep[c] == (not strictly)


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


def test_host_memory_rows_do_not_overflow_although_bytes_would() -> None:
    nodes = [a_node(f"n{i}", gpus=8, host_bytes=2 << 40) for i in range(64)]
    problem = a_problem_with_demands(
        a_snapshot_with_two_counts(nodes, jobs=4000), [0, 0], [1 << 40, 2 << 40]
    )
    assert problem.rows[1].capacity == 64 * 2 * 1024**2


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


def test_demands_of_a_problem_read_back() -> None:
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


def a_choice(sd_of_faster: float) -> Snapshot:
    """Return a job with two Cells of one GPU: one takes exactly 2 s, the other is estimated at 1 s."""
    slow = an_estimate(0, 0, 1, 1, iter_time_s=2.0) | {"sd": 0.0}
    fast = an_estimate(0, 1, 1, 1, iter_time_s=1.0) | {"sd": sd_of_faster}
    nodes = some_nodes((0, 1, 1), (1, 1, 1))
    return a_snapshot(nodes=nodes, jobs=[a_job("j")], estimates=[slow, fast])


def rates_at(snapshot: Snapshot, caution: float) -> list[float]:
    return [float(rate) for rate in first_draft(snapshot, Policy(caution=caution)).rate]


@pytest.mark.parametrize("sd", [-0.1, math.inf])
def test_uncertainty_must_be_at_least_0(sd: float) -> None:
    with pytest.raises(InvalidInput, match=r"estimates\.sd"):
        a_choice(sd)


def test_an_uncertain_cell_is_treated_as_slower() -> None:
    assert rates_at(a_choice(0.5), 0.0) == [128.0, 256.0]
    slower = 256.0 / math.exp(2 * 0.5)
    assert rates_at(a_choice(0.5), 2.0) == pytest.approx([128.0, slower], rel=1e-12)


def test_without_known_uncertainty_an_estimate_stays_as_it_is() -> None:
    assert rates_at(a_choice(math.nan), 2.0) == [128.0, 256.0]


@given(st.integers(0, 1000), st.floats(0, 10))
def test_caution_without_uncertainty_changes_nothing(seed: int, caution: float) -> None:
    snapshot = a_random_snapshot(seed, jobs=2, workloads=2, max_gpus=4)
    assert apply_caution(snapshot, caution) is snapshot


@given(st.lists(st.floats(0, 3), min_size=1, max_size=5), st.floats(0, 5), st.floats(0, 5))
def test_more_caution_never_makes_a_cell_faster(sds: list[float], a: float, b: float) -> None:
    rows = [an_estimate(0, 0, n + 1, 1) | {"sd": sd} for n, sd in enumerate(sds)]
    snapshot = a_snapshot(nodes=some_nodes((0, 1, 8)), jobs=[], estimates=rows)
    less, more = sorted((a, b))
    times = [apply_caution(snapshot, c).estimates.iter_time_s for c in (less, more)]
    assert (times[0] <= times[1]).all()


def without_sd(problem: Problem) -> Problem:
    """Return the problem with Cells that are certain. Otherwise, only replans read their spread."""
    cells = replace(problem.cells, sd=np.zeros(len(problem.cells)))
    return replace(problem, cells=cells)


def test_a_round_without_caution_is_stated_as_before() -> None:
    sure = a_random_snapshot(3, jobs=6)
    rng = np.random.default_rng(3)
    unsure = replace(
        sure, estimates=replace(sure.estimates, sd=rng.uniform(0, 1, len(sure.estimates)))
    )
    before, after, cautious = (
        encode(without_sd(build_problem(s, Policy(caution=caution))))
        for s, caution in ((sure, 0.0), (unsure, 0.0), (unsure, 1.0))
    )
    assert before == after
    assert before != cautious


@pytest.mark.parametrize("caution", [-0.1, 10.1, math.nan])
def test_caution_has_limits(caution: float) -> None:
    with pytest.raises(InvalidInput, match="caution"):
        Policy(caution=caution)
