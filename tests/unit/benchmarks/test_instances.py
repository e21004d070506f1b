"""Rounds drawn by seed: the properties of their families, and the effect of churn."""

from __future__ import annotations

import math

import pytest

from tessera.benchmarks.rounds.instances import FAMILIES, churn_round, make_instance
from tessera.formulation.answer.check import find_doubly_held
from tessera.formulation.answer.codec import digest
from tessera.formulation.answer.placement import current_gangs
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Ints
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.statement import build_problem
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.exact.answers import is_answer
from tessera.solvers.exact.greedy import Greedy


def problem_and_choice(snapshot: Snapshot) -> tuple[Problem, Ints]:
    """Return the round's problem and greedy's choice."""
    problem = build_problem(snapshot, Policy())
    return problem, Greedy().solve(problem, Budget(remaining_s=lambda: math.inf)).choice


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_names_one_round(family: str) -> None:
    first, again = (make_instance(40, 70, 3, 5, family=family, running=0.5) for _ in range(2))

    assert digest(first) == digest(again)
    assert digest(first) != digest(make_instance(40, 70, 3, 6, family=family, running=0.5))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("gpus", "types"), [(64, 4), (301, 10), (7, 7)])
def test_a_cluster_has_the_requested_gpus_spread_evenly(family: str, gpus: int, types: int) -> None:
    capacity = make_instance(20, gpus, types, family=family).schedulable_gpus()

    assert capacity.sum() == gpus
    assert capacity.max() - capacity.min() <= 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("running", [0.5, 1.0])
def test_running_jobs_hold_gpus_of_their_own_cell_only(family: str, running: float) -> None:
    snapshot = make_instance(200, 128, 4, 1, family=family, running=running)
    problem = build_problem(snapshot, Policy())
    gangs = current_gangs(snapshot)

    assert not find_doubly_held(snapshot)
    assert len(gangs) == (problem.current >= 0).sum() > 0
    assert is_answer(problem, problem.current)
    for job, gang in gangs.items():
        assert gang.gpus == snapshot.jobs.current_gpus[job] == snapshot.jobs.requested_gpus[job]
        nodes = [node for node, _ in gang.members]
        assert set(snapshot.nodes.gpu_type[nodes]) == {snapshot.jobs.current_type[job]}


def test_cells_cover_half_and_twice_of_every_request_and_every_degree() -> None:
    snapshot = make_instance(400, 4000, 2, 3)
    e = snapshot.estimates
    assert snapshot.jobs.requested_gpus.max() == 64
    for job in range(400):
        wanted = int(snapshot.jobs.requested_gpus[job])
        mine = e.workload == snapshot.jobs.workload[job]
        assert set(e.gpus[mine]) == {max(1, wanted // 2), wanted, 2 * wanted}
        most = e.pipeline_degree[mine & (e.gpus == 2 * wanted)]
        assert set(most) == {2**k for k in range(int(math.log2(2 * wanted)) + 1)}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_churn_remaining_jobs_keep_what_they_were_given(family: str) -> None:
    snapshot = make_instance(100, 100, 4, 2, family=family, running=0.5)
    problem, choice = problem_and_choice(snapshot)

    later = churn_round(snapshot, problem, choice, 0.1, 7, family)

    before, after = snapshot.jobs.name, later.jobs.name
    kept = [j for j, name in enumerate(before) if name in set(after)]
    assert len(kept) == 90
    assert len(after) == 100 == len(set(after))
    for position, job in enumerate(kept):  # arrivals come last
        column = int(choice[job])
        cell = int(problem.cell[column])
        gpus = int(problem.cells.gpus[cell]) if column >= 0 else 0
        assert after[position] == before[job]
        assert int(later.jobs.current_gpus[position]) == gpus
        assert later.jobs.iterations_left[position] <= snapshot.jobs.iterations_left[job]
    assert not find_doubly_held(later)
    following = build_problem(later, Policy())
    assert is_answer(following, following.current)
    assert (following.current >= 0).sum() == (choice[kept] >= 0).sum()


@pytest.mark.parametrize(
    ("jobs", "gpus", "types", "family"),
    [(5, 8, 2, "easy"), (5, 1, 2, "real"), (-1, 8, 2, "real"), (5, 8, 0, "real")],
)
def test_meaningless_rounds_are_refused(jobs: int, gpus: int, types: int, family: str) -> None:
    with pytest.raises(InvalidInput):
        make_instance(jobs, gpus, types, family=family)
