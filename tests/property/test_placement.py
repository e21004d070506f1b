"""Laws of placement, for random clusters, running jobs and solutions that fit by counts."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.check import find_placement_violations, find_violations, score_solution
from tessera.formulation.placement import Placement, current_gangs
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem, restrict_problem
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution
from tessera.formulation.statement import build_problem
from tessera.solvers.placement import PlacementResult, defragment, place
from tessera.solvers.placement.blocks import carve_share, mask_of
from tests.support.laws import examples
from tests.support.placed_rounds import a_cluster, a_solution, the_next_round

Round: TypeAlias = tuple[Snapshot, Problem, Solution]


def never() -> bool:
    return False


def always() -> bool:
    return True


def a_round(seed: int, jobs: int, keep: float, promised: float) -> Round:
    """Return the second or third round of a random cluster, with a random solution of it."""
    rng = np.random.default_rng(seed)
    snapshot = a_cluster(rng, jobs, promised)
    for _ in range(int(rng.integers(1, 3))):
        problem = build_problem(snapshot, Policy())
        solution = a_solution(rng, problem, keep)
        placed = place(snapshot, problem, solution, deadline_expired=never)
        snapshot = the_next_round(rng, snapshot, problem, placed)
    problem = build_problem(snapshot, Policy())
    return snapshot, problem, a_solution(rng, problem, keep)


def rounds_with(promised: float) -> st.SearchStrategy[Round]:
    """Return random rounds in which each job is guaranteed with probability ``promised``."""
    return st.builds(
        a_round,
        st.integers(0, 2**32),
        st.integers(1, 12),
        st.sampled_from([0.3, 0.7, 1.0]),
        st.just(promised),
    )


rounds = rounds_with(0.3)
rounds_without_promises = rounds_with(0.0)


def broken_rules(snapshot: Snapshot, problem: Problem, placed: PlacementResult) -> set[str]:
    """Return the rules that the outcome breaks, apart from promises (which have a law below)."""
    found = find_placement_violations(snapshot, problem, placed.solution, placed.placement)
    found += find_violations(problem, placed.solution)
    return {v.rule for v in found} - {"must run"}


def placed_score(problem: Problem, placed: PlacementResult) -> float:
    return score_solution(problem, placed.solution, placed.placement)


@examples(120)
@given(rounds)
def test_every_placement_passes_the_checker(case: Round) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never)
    assert broken_rules(snapshot, problem, placed) == set()
    for job, column in enumerate(solution.choice.tolist()):
        denied = placed.solution.choice[job] != column
        assert (job in placed.unplaced) == (job in placed.wanted) == denied
    for job in placed.degraded:
        cell = int(problem.cell[placed.solution.choice[job]])
        assert placed.placement.gangs[job].nodes > problem.cells.nodes[cell]


@examples(80)
@given(rounds)
def test_jobs_that_keep_their_cell_move_only_as_migrated_and_pinned_ones_never(
    case: Round,
) -> None:
    snapshot, problem, solution = case
    now = current_gangs(snapshot)
    placed = place(snapshot, problem, solution, deadline_expired=never)
    for outcome in (placed, defragment(snapshot, problem, placed)):
        for job, gang in outcome.placement.gangs.items():
            if outcome.solution.choice[job] == problem.current[job] >= 0:
                assert (gang == now[job]) != (job in outcome.placement.migrated)
        assert all(snapshot.jobs.movable[job] for job in outcome.placement.migrated)


@examples(80)
@given(rounds_without_promises)
def test_shares_are_made_of_aligned_blocks(case: Round) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never)
    for gang in placed.placement.gangs.values():
        for _, indices in gang.members:
            assert carve_share(mask_of(indices), len(indices)) == mask_of(indices)


@examples(80)
@given(rounds)
def test_promised_jobs_on_healthy_nodes_always_run(case: Round) -> None:
    snapshot, problem, solution = case
    if (problem.must_run & (problem.current < 0)).any():
        return  # a promised job lost its node, so it may not fit
    placed = place(snapshot, problem, solution, deadline_expired=never)
    assert (placed.solution.choice[problem.must_run] >= 0).all()


@examples(80)
@given(rounds_without_promises)
def test_repair_never_scores_below_leaving_unplaced_jobs_waiting(
    case: Round,
) -> None:
    snapshot, problem, solution = case
    placed = place(snapshot, problem, solution, deadline_expired=never)
    hurried = place(snapshot, problem, solution, deadline_expired=always)
    drop = hurried.solution.choice.copy()
    drop[[*hurried.unplaced, *(hurried.degraded - set(current_gangs(snapshot)))]] = -1
    gangs = {j: g for j, g in hurried.placement.gangs.items() if drop[j] >= 0}
    left = dataclasses.replace(
        hurried,
        solution=dataclasses.replace(
            hurried.solution, choice=drop, objective=int(problem.value[drop[drop >= 0]].sum())
        ),
        placement=Placement(gangs=gangs, migrated=hurried.placement.migrated & set(gangs)),
    )
    assert broken_rules(snapshot, problem, left) == set()
    assert placed_score(problem, placed) >= placed_score(problem, left) - 1e-9


@examples(80)
@given(rounds)
def test_defragmentation_never_lowers_the_score(case: Round) -> None:
    snapshot, problem, solution = case
    for expired in (never, always):
        placed = place(snapshot, problem, solution, deadline_expired=expired)
        after = defragment(snapshot, problem, placed)
        assert broken_rules(snapshot, problem, after) == set()
        assert placed_score(problem, after) >= placed_score(problem, placed) - 1e-9


def without_alternatives(problem: Problem) -> Problem:
    """Return the problem in which a job has one column for each GPU type and count, or runs on it."""
    cells, seen = problem.cells, set()
    keep = []
    for column, job in enumerate(problem.column_job.tolist()):
        cell = problem.cell[column]
        key = (job, int(cells.gpu_type[cell]), int(cells.gpus[cell]))
        if key not in seen or column == problem.current[job]:
            keep.append(column)
        seen.add(key)
    everyone = np.arange(len(problem.jobs), dtype=np.int64)
    return restrict_problem(problem, everyone, np.array(keep, dtype=np.int64))


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0.3, 0.7, 1.0]))
def test_a_placement_is_never_worth_less_than_without_alternatives(
    seed: int, jobs: int, keep: float
) -> None:
    snapshot, problem, _ = a_round(seed, jobs, keep, promised=0.0)
    fewer = without_alternatives(problem)
    solution = a_solution(np.random.default_rng(seed), fewer, keep)
    without = place(snapshot, fewer, solution, deadline_expired=never)
    choice = np.full(len(problem.jobs), -1, dtype=np.int64)
    for job in np.flatnonzero(solution.choice >= 0).tolist():
        columns = problem.columns_of(job)
        cell = fewer.cell[solution.choice[job]]
        choice[job] = columns.start + problem.cell[columns.start : columns.stop].tolist().index(
            cell
        )
    same = dataclasses.replace(solution, choice=choice)
    placed = place(snapshot, problem, same, deadline_expired=never)
    assert broken_rules(snapshot, problem, placed) == set()
    assert placed_score(problem, placed) >= placed_score(fewer, without) - 1e-9
