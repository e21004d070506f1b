"""Column values do not depend on the requested GPUs, and a job's bounds limit only its GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.goals import Levels
from tessera.formulation.policy import Policy
from tessera.formulation.reasons import ReasonCode
from tessera.formulation.snapshot import Snapshot
from tessera.formulation.statement import state_round
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes
from tests.support.laws import examples

SUMS = (
    "throughput",
    "deadline",
    "jct",
    "balanced",
    "balanced:0.25",
    "throughput + 0.5*jct",
    "balanced within 5% then jct",
)
LEVELS = ("finish-time-fairness", "max-min", "makespan")
COUNTS = (1, 2, 4, 8, 16, 32)


def a_round_of(*jobs: dict[str, Any]) -> Snapshot:
    """Return jobs on 32 free GPUs of 8-GPU nodes. Rates of Cells grow as GPUs to the power 0.8."""
    cells = [an_estimate(gpus=n, nodes=math.ceil(n / 8), iter_time_s=10 / n**0.8) for n in COUNTS]
    return a_snapshot(nodes=some_nodes((0, 4, 8)), jobs=jobs, estimates=cells)


def gpus_given(snapshot: Snapshot, objective: str) -> dict[str, int]:
    budget = Budget(remaining_s=lambda: math.inf, work={"cp-sat": 1.0})
    outcome = plan_round(snapshot, Policy(objective=objective), make_solver(), budget)
    assert not outcome.violations
    names = snapshot.jobs.name
    return {names[d.job]: d.gang.gpus if d.gang else 0 for d in outcome.decisions}


@pytest.mark.parametrize("objective", [*SUMS, *LEVELS])
def test_of_two_identical_jobs_the_smaller_request_has_no_advantage(objective: str) -> None:
    jobs = [a_job("modest", requested_gpus=2), a_job("greedy", requested_gpus=32)]
    assert gpus_given(a_round_of(*jobs), objective) == {"modest": 16, "greedy": 16}


@examples(60)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from([*SUMS, *LEVELS]))
def test_the_requested_count_does_not_change_a_jobs_values(
    seed: int, other: int, objective: str
) -> None:
    snapshot = a_random_snapshot(seed, jobs=6)
    free = replace(snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(6, np.bool_)))
    requests = np.random.default_rng(other).integers(1, 65, 6)
    changed = replace(free, jobs=replace(free.jobs, requested_gpus=requests))
    before, after = (state_round(s, Policy(objective=objective)) for s in (free, changed))
    assert np.array_equal(before.problem.value, after.problem.value)
    assert np.array_equal(before.problem.restart_price, after.problem.restart_price)
    for first, second in zip(before.goals, after.goals, strict=True):
        if isinstance(first, Levels) and isinstance(second, Levels):
            assert np.array_equal(first.level, second.level)
            assert np.array_equal(first.waiting, second.waiting)


@pytest.mark.parametrize("objective", SUMS)
def test_bounds_do_not_change_the_values_of_remaining_columns(objective: str) -> None:
    jobs = [a_job("free"), a_job("bounded", requested_gpus=4, min_gpus=2, max_gpus=8)]
    problem = state_round(a_round_of(*jobs), Policy(objective=objective)).problem
    worth = [
        dict(zip(problem.cells.gpus[problem.cell[span]], problem.value[span], strict=True))
        for span in (slice(*problem.job_start[:2]), slice(*problem.job_start[1:]))
    ]
    assert list(worth[1]) == [2, 4, 8]
    assert all(worth[0][count] == value for count, value in worth[1].items())


@pytest.mark.parametrize("objective", [*SUMS, *LEVELS])
@pytest.mark.parametrize("weight", [1e-6, 1e-9])
def test_a_job_of_the_least_worth_runs_where_gpus_are_idle(objective: str, weight: float) -> None:
    long = a_job("long", weight=weight, iterations_left=1e12, max_gpus=4)
    ends = a_job("ends", iterations_left=1.0, max_gpus=16)
    assert min(gpus_given(a_round_of(long, ends), objective).values()) >= 1


def test_a_job_never_exceeds_its_gpu_maximum() -> None:
    jobs = [a_job("bounded", requested_gpus=1, max_gpus=4), a_job("other", max_gpus=16)]
    for objective in (*SUMS, *LEVELS):
        assert gpus_given(a_round_of(*jobs), objective) == {"bounded": 4, "other": 16}


def test_a_job_with_a_gpu_minimum_gets_larger_cells_that_others_would_not_use() -> None:
    """Four GPUs are slower than two here, but a job that needs four may run on them."""
    cells = [an_estimate(gpus=2, iter_time_s=2.0), an_estimate(gpus=4, iter_time_s=3.0)]
    jobs = [a_job("any"), a_job("wide", requested_gpus=4, min_gpus=4)]
    snapshot = a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=jobs, estimates=cells)
    for objective in (*SUMS, *LEVELS):
        assert gpus_given(snapshot, objective) == {"any": 2, "wide": 4}


def test_a_job_without_a_cell_within_its_bounds_gets_the_available_counts() -> None:
    job = a_job("j", requested_gpus=3, min_gpus=3, max_gpus=3)
    reason = state_round(a_round_of(job), Policy()).absent[0]
    assert reason.code is ReasonCode.PINS_CONTRADICT
    assert reason.message.startswith("the job may run on at least 3 and at most 3 GPUs")
    assert dict(reason.evidence)["GPU counts of its Cells"] == "1, 2, 4, 8, 16, 32"
