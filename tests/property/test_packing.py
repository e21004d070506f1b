"""Laws of packing rows and of Cells on shapes: no placed answer exceeds the bound that they leave."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.packing_check import find_false_rows
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.cancellation import never_cancelled
from tessera.formulation.round.packing import PackingWeights, classify_shapes, packing_rows
from tessera.formulation.round.packing.shapes import packable_types
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem, state_round
from tessera.formulation.state.cells import Cells, build_cells
from tessera.formulation.state.dominance import find_undominated
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.portfolio import Portfolio
from tessera.solvers.goals.rows import with_rows
from tessera.solvers.placement import place
from tessera.solvers.rounds.passes import PASSES_KEY
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_node, a_snapshot, an_estimate
from tests.support.laws import examples
from tests.support.packings import best_placed_value
from tests.support.placed_rounds import a_cluster, a_solution, the_next_round

ROUNDING = 2.0
"""Solver integers by which a placed job may exceed the column that counts it."""

POLICIES = ("throughput", "balanced:0.25", "jct")


def unlimited(work: dict[str, float] | None = None) -> Budget:
    return Budget(remaining_s=lambda: math.inf, work=work or {})


def a_tiny_round(rng: np.random.Generator) -> Snapshot:
    """Return at most four jobs, some of which run, on two or three nodes of 1 to 16 GPUs."""
    nodes = [
        a_node(f"n{i}", 0, int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])))
        for i in range(int(rng.integers(2, 4)))
    ]
    estimates = {}
    for workload in range(3):
        for gpus in rng.choice([1, 2, 3, 4, 5, 6, 7, 9], 2, replace=False).tolist():
            for spread in range(1, min(gpus, 3) + 1):
                if spread == 1 or rng.random() < 0.4:
                    dead = rng.random() < 0.15
                    time_s = math.inf if dead else float(8 / gpus ** rng.uniform(0.5, 1.1))
                    key = (workload, 0, gpus, spread)
                    estimates[key] = an_estimate(*key, iter_time_s=time_s)
    jobs = [
        a_job(
            f"j{j}",
            int(rng.integers(3)),
            restart_s=float(rng.choice([0.0, 60.0])),
            weight=float(rng.choice([1.0, 1.5, 3.0])),
            pinned=bool(rng.random() >= 0.7),
        )
        for j in range(int(rng.integers(2, 5)))
    ]
    snapshot = a_snapshot(
        nodes=nodes,
        jobs=jobs,
        estimates=[estimates[key] for key in sorted(estimates)],
        workloads=3,
    )
    if rng.random() < 0.5:
        return snapshot
    problem = build_problem(snapshot, Policy())
    solution = a_solution(rng, problem, 0.0)
    return the_next_round(
        rng, snapshot, problem, place(snapshot, problem, solution, deadline_expired=never_cancelled)
    )


def a_policy(rng: np.random.Generator) -> Policy:
    """Return a policy whose rounds count only GPUs in their rows, as the oracles here do."""
    return Policy(
        objective=str(rng.choice(POLICIES)),
        keep_requests=False,
        promise_starts=False,
        change_spacing=0.0,
    )


def best_counted_value(problem: Problem) -> int:
    """Return the optimum of (1) to (4), over all choices."""
    options = [
        [-1, *problem.columns_of(job)] if not problem.must_run[job] else problem.columns_of(job)
        for job in range(len(problem.jobs))
    ]
    best = 0
    for choice in itertools.product(*options):
        columns = np.array(choice)
        value = int(problem.value[columns[columns >= 0]].sum())
        if value > best and (problem.used(columns) <= problem.capacity).all():
            best = value
    return best


@examples(300)
@given(st.integers(0, 2**32 - 1))
def test_packing_rows_with_any_weights_hold_for_the_best_placed_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = a_tiny_round(rng)
    types = packable_types(snapshot)
    policy = a_policy(rng)
    problem = state_round(snapshot, policy, widened=types).problem
    gangs = current_gangs(snapshot)
    present = {job: gang.nodes for job, gang in gangs.items()}
    classes = classify_shapes(snapshot, problem, types, present)
    top = int(snapshot.node_size().max(initial=0))
    weights = [
        PackingWeights(gpu_type="a100", weight=(0, *np.sort(rng.integers(0, 5, top)).tolist()))
        for _ in range(4)
        if top
    ]
    weights = [one for one in weights if any(one.weight)]
    stated = with_rows(problem, packing_rows(classes, {"a100": 0}, weights))
    assert find_false_rows(snapshot, stated, gangs) == []
    best = best_placed_value(snapshot, problem, gangs)
    assert best_counted_value(stated) + ROUNDING * len(problem.jobs) >= best


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_the_bound_of_a_round_is_never_below_its_best_placed_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    snapshot = a_tiny_round(rng)
    policy = replace(a_policy(rng), defragment_every_rounds=0)
    outcome = plan_round(snapshot, policy, Portfolio(), unlimited())
    assert not outcome.violations
    gangs, problem = current_gangs(snapshot), outcome.problem
    allowed = ROUNDING * len(problem.jobs) / problem.scale
    best = best_placed_value(snapshot, problem, gangs) / problem.scale
    assert outcome.placed_score <= best + allowed
    assert best <= outcome.goals[-1].bound + allowed


@examples(100)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]))
def test_packing_rows_never_make_a_round_worse_and_repeat_exactly(
    seed: int, promised: float
) -> None:
    rng = np.random.default_rng(seed)
    snapshot = a_cluster(rng, int(rng.integers(3, 14)), promised)
    policy = a_policy(rng)
    for _ in range(2):
        outcome = plan_round(snapshot, policy, Portfolio(), unlimited())
        without = plan_round(snapshot, policy, Portfolio(), unlimited(work={PASSES_KEY: 0.0}))
        assert not outcome.violations
        allowed = ROUNDING * len(snapshot.jobs) / without.problem.scale
        assert outcome.placed_score >= without.placed_score - allowed
        again = plan_round(
            snapshot, policy, Portfolio(), unlimited(work=dict(outcome.solution.work))
        )
        assert np.array_equal(again.solution.choice, outcome.solution.choice)
        assert again.placed.placement == outcome.placed.placement
        assert again.solution.bound == outcome.solution.bound
        assert again.prices == outcome.prices
        snapshot = the_next_round(rng, snapshot, outcome.problem, outcome.placed)


PLANS = ("", "first", "second")


def a_profiled_cluster(seed: int) -> Snapshot:
    """Return nodes of several sizes, and estimates of random shapes, degrees and plans."""
    rng = np.random.default_rng(seed)
    nodes = [
        a_node(f"n{i}", int(rng.integers(2)), int(rng.choice([1, 2, 4, 8, 8])))
        for i in range(int(rng.integers(1, 10)))
    ]
    estimates = {}
    for _ in range(int(rng.integers(1, 60))):
        gpus = int(rng.choice([1, 2, 3, 4, 5, 8, 16]))
        key = (
            int(rng.integers(2)),
            int(rng.integers(2)),
            gpus,
            int(rng.integers(1, gpus + 1)),
            int(rng.integers(3)),
            int(rng.integers(len(PLANS))),
        )
        time_s = math.inf if rng.random() < 0.2 else float(rng.integers(1, 12))
        estimates[key] = an_estimate(*key[:4], degree=key[4], plan=key[5], iter_time_s=time_s)
    return a_snapshot(
        nodes=nodes,
        jobs=[a_job(f"j{w}", w) for w in range(2)],
        estimates=list(estimates.values()),
        workloads=2,
        plans=PLANS,
    )


snapshots = st.builds(a_profiled_cluster, st.integers(0, 2**32))


def rows_by_count(cells: Cells, rows: list[int]) -> dict[tuple[int, int, int], list[int]]:
    """Return the rows by workload, type and GPU count."""
    grouped = defaultdict(list)
    for row in rows:
        key = (int(cells.workload[row]), int(cells.gpu_type[row]), int(cells.gpus[row]))
        grouped[key].append(row)
    return grouped


def known_rates(snapshot: Snapshot, workload: int, gpu_type: int, gpus: int) -> dict[int, float]:
    """Return the best samples/s of a count on each number of nodes, according to estimates alone."""
    e = snapshot.estimates
    best: defaultdict[int, float] = defaultdict(float)
    batch = snapshot.workloads[workload].global_batch
    for k in range(len(e)):
        if (e.workload[k], e.gpu_type[k], e.gpus[k]) == (workload, gpu_type, gpus):
            nodes = int(e.nodes[k])
            best[nodes] = max(best[nodes], batch / float(e.iter_time_s[k]))
    return dict(best)


@examples(200)
@given(snapshots)
def test_each_wider_shape_that_is_kept_is_faster_and_has_one_column(snapshot: Snapshot) -> None:
    cells = build_cells(snapshot)
    kept = np.flatnonzero(find_undominated(cells)).tolist()
    for (workload, gpu_type, gpus), rows in rows_by_count(cells, kept).items():
        by_width = sorted(rows, key=lambda row: int(cells.nodes[row]))
        widths = [int(cells.nodes[row]) for row in by_width]
        rates = [float(cells.rate[row]) for row in by_width]
        assert len(set(widths)) == len(widths)
        assert all(slower < faster for slower, faster in pairwise(rates))
        known = known_rates(snapshot, workload, gpu_type, gpus)
        size = int(snapshot.node_size()[gpu_type])
        feasible = {nodes for nodes, rate in known.items() if rate > 0} | {-(-gpus // size)}
        assert set(widths) <= feasible


@examples(200)
@given(snapshots)
def test_a_shape_has_the_rate_of_its_own_estimate(snapshot: Snapshot) -> None:
    cells = build_cells(snapshot)
    e = snapshot.estimates
    batch = np.array([w.global_batch for w in snapshot.workloads])
    own = {
        (*(int(getattr(e, name)[k]) for name in ("workload", *e.CELL, "nodes")),): float(
            batch[e.workload[k]] / e.iter_time_s[k]
        )
        for k in range(len(e))
    }
    size = snapshot.node_size()
    for row in range(len(cells)):
        key = (int(cells.workload[row]), *cells.key_at(row), int(cells.nodes[row]))
        assert cells.rate[row] == cells.rate_on(row, int(cells.nodes[row])) > 0
        if key in own:
            assert cells.rate[row] == own[key]
            continue
        # It is inferred: it has the fewest nodes, and no other plan or degree is known there.
        workload, gpu_type, gpus = key[:3]
        assert key[-1] == -(-gpus // int(size[gpu_type]))
        assert key[-1] not in known_rates(snapshot, workload, gpu_type, gpus)
        if snapshot.plans[key[4]]:
            narrower = {k[-1] for k, rate in own.items() if k[:5] == key[:5] and rate > 0}
            assert min(narrower) < key[-1]
