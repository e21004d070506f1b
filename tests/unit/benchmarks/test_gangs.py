"""The stored rounds of the benchmark of placement."""

from __future__ import annotations

import math

import pytest

from tessera.benchmarks.rounds.bench_placement import POLICY
from tessera.benchmarks.rounds.gangs import (
    GANG_FAMILIES,
    draw_gangs,
    gang_round,
    read_stored_rounds,
)
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tests.support.oracles.joint_optimum import find_joint_optimum


def test_stored_rounds_are_those_that_are_drawn_from_their_seeds() -> None:
    stored = read_stored_rounds()
    assert {one.family for one in stored} == set(GANG_FAMILIES)
    for one in stored:
        assert one.jobs == draw_gangs(one.family, one.gpus, one.seed)
        assert one.placed_before <= one.optimum + 0.02  # weights of the old code are coarser


@pytest.mark.parametrize("family", GANG_FAMILIES)
def test_a_stored_optimum_is_found_again_and_no_answer_is_above_it(family: str) -> None:
    one = next(one for one in read_stored_rounds() if one.family == family and one.proven)
    snapshot = gang_round(one.jobs, one.gpus)
    again = find_joint_optimum(snapshot, POLICY, 120.0)
    assert again.proven
    assert again.value == pytest.approx(one.optimum, rel=1e-6)
    budget = Budget(remaining_s=lambda: math.inf)
    outcome = plan_round(snapshot, POLICY, make_solver(), budget)
    assert not outcome.violations
    assert outcome.placed_score <= one.optimum * (1 + 1e-6)
