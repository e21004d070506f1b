"""The checker, which compares arrays, against plain loops over GPUs and columns."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.rounds.instances import make_instance
from tessera.formulation.answer.check import find_placement_violations, find_violations
from tessera.formulation.answer.placement import Gang, Placement, changed_gangs, current_gangs
from tessera.formulation.answer.solution import Solution, SolveStatus
from tessera.formulation.base.values import Hold
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import build_problem
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.laws import examples


def solution_of(choice: list[int], objective: int = 0) -> Solution:
    return Solution(
        status=SolveStatus.FEASIBLE,
        choice=np.array(choice, dtype=np.int64),
        objective=objective,
        bound=2.0**53,
        solver="?",
    )


@examples(60)
@given(st.integers(0, 50), st.data())
def test_overdrawn_rows_and_foreign_columns_are_found_exactly_as_by_plain_counting(
    seed: int, data: st.DataObject
) -> None:
    problem = build_problem(make_instance(8, 16, 2, seed), Policy())
    foreign = st.integers(-2, len(problem.cell) + 1)
    mine = [st.sampled_from(problem.columns_of(job)) for job in range(8) if problem.columns_of(job)]
    choice = [data.draw(one | one | one | foreign) for one in mine]
    choice += [-1] * (8 - len(choice))
    own = [c in problem.columns_of(job) for job, c in enumerate(choice)]
    used: Counter[int] = Counter()
    for column in (c for c, its in zip(choice, own, strict=True) if its):
        used.update(problem.usage_of(column))
    value = sum(int(problem.value[c]) for c, its in zip(choice, own, strict=True) if its)
    found = Counter(v.rule for v in find_violations(problem, solution_of(choice, value)))
    assert found["own column"] == sum(
        c != -1 and not its for c, its in zip(choice, own, strict=True)
    )
    assert found["capacity"] == sum(used[r] > row.capacity for r, row in enumerate(problem.rows))
    assert found["objective"] == 0
    wrong = find_violations(problem, solution_of(choice, value + 1))
    assert Counter(v.rule for v in wrong)["objective"] == 1


def all_but_one_are_equal(shares: list[int]) -> bool:
    return any(len({*shares[:k], *shares[k + 1 :]}) <= 1 for k in range(len(shares)))


GANGS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(-1, 4), max_size=4).map(tuple)), max_size=3
).map(lambda members: Gang(members=tuple(members)))


@examples(150)
@given(st.lists(GANGS, min_size=3, max_size=3))
def test_the_checker_refuses_exactly_the_gangs_that_plain_loops_refuse(gangs: list[Gang]) -> None:
    """Nodes 0 to 2 are of the Cell's type, but node 2 is not schedulable; node 3 is of another type."""
    nodes = some_nodes((0, 3, 4), (1, 1, 4))
    nodes[2]["schedulable"] = False
    jobs = [a_job(f"j{j}", requested_gpus=2) for j in range(3)]
    snapshot = a_snapshot(nodes=nodes, jobs=jobs, estimates=[an_estimate(gpus=2)])
    problem = build_problem(snapshot, Policy())
    placement = Placement(gangs=dict(enumerate(gangs)))
    expected: set[str] = set()
    taken: set[tuple[int, int]] = set()
    for gang in gangs:
        shares = [len(gpus) for _, gpus in gang.members]
        broken = {
            "gang": sum(shares) != 2,
            "node once": len({n for n, _ in gang.members}) < len(shares),
            "one GPU type": any(n == 3 for n, _ in gang.members),
            "schedulable node": any(n == 2 for n, _ in gang.members),
            "GPU exists": any(not 0 <= g < 4 for _, gpus in gang.members for g in gpus),
            "equal shares": len(set(shares)) > 1
            and sum(s == 4 for s in shares) < len(shares) - 1
            and (sum(shares) % len(shares) == 0 or not all_but_one_are_equal(shares)),
        }
        expected |= {rule for rule, is_so in broken.items() if is_so}
        for place in ((n, g) for n, gpus in gang.members for g in gpus):
            if place in taken:
                expected.add("GPU once")
            taken.add(place)
    chosen = solution_of(problem.job_start[:-1].tolist())
    assert {
        v.rule for v in find_placement_violations(snapshot, problem, chosen, placement)
    } == expected


@pytest.mark.parametrize("seed", range(4))
def test_current_gangs_are_the_allocations_that_are_not_being_given_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = some_nodes((0, 3, 4))
    jobs = [a_job(f"j{j}", state=JobState.RUNNING, cell=(0, 4, 1)) for j in range(3)]
    every = rng.permutation([(n, g) for n in range(3) for g in range(4)]).tolist()
    given = {j: every[4 * j : 4 * j + 4] for j in (2, 0, 1)}
    gangs = {j: Gang(members=tuple((n, (g,)) for n, g in its)) for j, its in given.items()}
    snapshot = a_snapshot(nodes=nodes, jobs=jobs, estimates=[an_estimate(gpus=4)], gangs=gangs)
    found = current_gangs(snapshot)
    assert list(found) == [0, 1, 2]
    for j, its in given.items():
        assert [(n, g) for n, gpus in found[j].members for g in gpus] == sorted(map(tuple, its))
        assert [n for n, _ in found[j].members] == sorted({n for n, _ in its})
    assert changed_gangs(found, current_gangs(snapshot)) == set()
    assert changed_gangs({0: found[1], 1: found[1], 5: found[0]}, found) == {0, 5}
    leaving = a_snapshot(
        nodes=nodes, jobs=jobs, estimates=[an_estimate(gpus=4)], gangs=gangs, hold=Hold.RELEASING
    )
    assert current_gangs(leaving) == {}
