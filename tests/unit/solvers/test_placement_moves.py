"""Placement: the choice of running jobs that move."""

from __future__ import annotations

from typing import Any

from tessera.formulation.check import find_placement_violations
from tessera.formulation.lifecycle import JobState
from tessera.formulation.placement import Gang
from tessera.formulation.policy import Policy
from tessera.formulation.statement import build_problem
from tessera.solvers.placement import place
from tessera.solvers.portfolio import Portfolio
from tests.support.builders import a_job, a_snapshot, an_estimate, some_nodes
from tests.support.driver import FOREVER


def test_a_large_gang_that_is_cheap_to_move_is_skipped_if_no_place_can_hold_it() -> None:
    """Two whole nodes are needed: one is free, two are half free.

    Moving `large` is cheapest but takes as much room as it frees. Moving `small` next to `other` frees
    the node that is needed.
    """
    running: dict[str, Any] = {"state": JobState.RUNNING, "iterations_left": 1e5}
    jobs = [
        a_job("large", 1, cell=(0, 4, 1), restart_s=1.0, **running),
        a_job("small", cell=(0, 2, 1), restart_s=300.0, **running),
        a_job("other", cell=(0, 2, 1), restart_s=600.0, **running),
        a_job("wide", 2, weight=9.0),
    ]
    gangs = {
        0: Gang(members=((1, (0, 1, 2, 3)),)),
        1: Gang(members=((2, (0, 1)),)),
        2: Gang(members=((3, (0, 1)),)),
    }
    estimates = [an_estimate(gpus=2), an_estimate(1, gpus=4), an_estimate(2, gpus=8, nodes=2)]
    snapshot = a_snapshot(nodes=some_nodes((0, 4, 4)), jobs=jobs, estimates=estimates, gangs=gangs)
    problem = build_problem(snapshot, Policy())
    solution = Portfolio().solve(problem, FOREVER)
    result = place(snapshot, problem, solution, deadline_expired=lambda: False)
    assert result.unplaced == {}
    assert result.placement.migrated == {1}
    assert find_placement_violations(snapshot, problem, result.solution, result.placement) == []
