"""A round as a function: promises, greedy as a lower limit, and refusal of invalid input."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tessera.formulation.decisions import DecisionKind
from tessera.formulation.errors import InvalidInput
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.problem import Problem
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.solution import Solution, SolveStatus
from tessera.solvers.base import Budget
from tessera.solvers.greedy import Greedy
from tessera.solvers.portfolio import Portfolio
from tessera.solvers.rounds.plan import RoundOptions, plan_round
from tests.support.builders import (
    a_job,
    a_node,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
)

FOREVER = Budget(remaining_s=lambda: math.inf)


def a_fragmented_cluster() -> Snapshot:
    """Return three launched guaranteed jobs of 4 GPUs on three nodes, one of which was lost."""
    jobs = [
        a_job(name, state=JobState.RUNNING, cell=(0, 4, 1), guaranteed=True, weight=weight)
        for name, weight in (("light", 1.0), ("heavy", 3.0), ("middle", 2.0))
    ]
    nodes = [a_node("n0"), a_node("n1"), a_node("lost", schedulable=False)]
    gangs = {j: Gang(members=((j, (0, 1, 2, 3)),)) for j in range(3)}
    nodes = [n | {"gpus": 4} for n in nodes]
    return a_snapshot(nodes=nodes, jobs=jobs, estimates=[an_estimate(gpus=4)], gangs=gangs)


def test_impossible_promises_are_waived_by_least_weight_with_a_reason() -> None:
    outcome = plan_round(a_fragmented_cluster(), Policy(), Portfolio(), FOREVER)
    assert outcome.violations == ()
    assert outcome.given_up == {0}
    kinds = [d.kind for d in outcome.decisions]
    assert kinds == [DecisionKind.SUSPEND, DecisionKind.KEEP, DecisionKind.MOVE]
    assert outcome.decisions[0].reason is not None
    assert outcome.decisions[0].reason.code is ReasonCode.PROMISE_GIVEN_UP


class OverdrawingSolver:
    """A solver whose solutions always exceed the cluster's capacity."""

    name = "wrong"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        choice = problem.job_start[1:] - 1
        objective = int(problem.value[choice].sum())
        return Solution(
            status=SolveStatus.OPTIMAL,
            choice=choice,
            objective=objective,
            bound=objective,
            solver="wrong",
        )


def test_an_invalid_answer_is_replaced_by_greedy() -> None:
    snapshot = a_random_snapshot(1, jobs=30)
    wrong, greedy = (
        plan_round(snapshot, Policy(), s, FOREVER) for s in (OverdrawingSolver(), Greedy())
    )
    assert wrong.violations == ()
    assert np.array_equal(wrong.solution.choice, greedy.solution.choice)
    assert wrong.solution.bound == greedy.solution.bound  # its bound is not used either


class SilentSolver:
    """A solver that finds no solution."""

    name = "silent"

    def solve(self, problem: Problem, budget: Budget, hint: Solution | None = None) -> Solution:
        nothing = np.full(len(problem.jobs), -1)
        return Solution(
            status=SolveStatus.UNKNOWN, choice=nothing, objective=0, bound=math.inf, solver="silent"
        )


def test_a_missing_answer_does_not_mean_that_no_job_runs() -> None:
    outcome = plan_round(a_random_snapshot(2, jobs=10), Policy(), SilentSolver(), FOREVER)
    assert sum(d.gang is not None for d in outcome.decisions) > 0


def test_phases_are_marked_in_order() -> None:
    seen: list[str] = []
    plan_round(a_random_snapshot(3, jobs=5), Policy(), Greedy(), FOREVER, seen.append)
    assert seen == ["build", "greedy", "solve", "place", "check"]


def test_a_second_round_on_the_outcome_of_the_first_changes_nothing() -> None:
    """Nothing changed, so nothing moves: the restart cost breaks ties."""
    snapshot = a_random_snapshot(4, jobs=25, restart_s=300.0)
    first = plan_round(snapshot, Policy(), Portfolio(), FOREVER)
    jobs = [snapshot.jobs.row(j) for j in range(25)]
    gangs = {}
    for d in first.decisions:
        if d.gang is not None:
            jobs[d.job] |= {
                "state": 3,
                "current_type": d.cell.gpu_type,
                "current_gpus": d.cell.gpus,
                "current_degree": d.cell.pipeline_degree,
            }
            gangs[d.job] = d.gang
    again = a_snapshot(nodes=some_nodes((0, 4, 4), (1, 2, 8)), jobs=jobs, estimates=[], gangs=gangs)
    again = replace(again, estimates=snapshot.estimates, workloads=snapshot.workloads)
    second = plan_round(again, Policy(defragment_every_rounds=1), Portfolio(), FOREVER)
    assert {d.kind for d in second.decisions} == {DecisionKind.KEEP, DecisionKind.WAIT}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("objective", {"objective": "fame"}),
        ("gap", {"gap": 1.0}),
        ("solve_limit", {"solve_limit_s": 0.0}),
    ],
)
def test_meaningless_options_are_refused_by_name(
    field: str, options: dict[str, float | str]
) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}"):
        RoundOptions(**options)  # type: ignore[arg-type]
