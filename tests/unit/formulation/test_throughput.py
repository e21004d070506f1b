"""The throughput statement, and values that do not depend on the requested GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.reasons import ReasonCode
from tessera.formulation.round.goals import Levels
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import MAX_TOTAL, VALUE_SCALE, Problem
from tessera.formulation.round.rates import effective_weight
from tessera.formulation.round.statement import build_problem, state_round
from tessera.formulation.state.snapshot import Snapshot
from tessera.formulation.state.tenants import Tenants
from tessera.solvers.base import Budget
from tessera.solvers.registry import make_solver
from tessera.solvers.rounds.plan import plan_round
from tests.support.builders import (
    a_job,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    some_nodes,
    state_freely,
)
from tests.support.laws import examples

THROUGHPUT = Policy(objective="throughput")

CELLS = [
    an_estimate(gpus=1, iter_time_s=4.0),
    an_estimate(gpus=2, iter_time_s=2.5),
    an_estimate(gpus=4, iter_time_s=1.6),
    an_estimate(gpu_type=1, gpus=2, iter_time_s=5.0),
]


def state_problem(*jobs: dict[str, Any], policy: Policy | None = None, **rest: Any) -> Problem:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 2, 4), (1, 2, 4)),
        jobs=jobs,
        estimates=CELLS,
        **rest,
    )
    return state_freely(snapshot, policy or THROUGHPUT).problem


def column_values(problem: Problem, job: int = 0) -> list[float]:
    span = problem.columns_of(job)
    return [round(v, 6) for v in (problem.value[span.start : span.stop] / problem.scale).tolist()]


@pytest.mark.parametrize("requested", [1, 2, 3, 4])
def test_a_column_has_the_value_of_its_effective_gpus_whatever_was_requested(
    requested: int,
) -> None:
    """The most efficient Cell has 64 samples/s on one GPU. The others are relative to it."""
    assert column_values(state_problem(a_job("j", requested_gpus=requested))) == [
        1.0,
        1.6,
        2.5,
        0.8,
    ]


def test_raw_throughput_is_samples_per_second() -> None:
    problem = state_problem(
        a_job("j", requested_gpus=2), policy=Policy(objective="throughput", raw_throughput=True)
    )
    assert problem.unit == "samples/s"
    assert column_values(problem)[:2] == [64.0, 102.4]


def with_tenants(snapshot: Snapshot, **weight: float) -> Snapshot:
    return replace(
        snapshot,
        tenants=Tenants(
            name=tuple(weight),
            weight=np.array(list(weight.values())),
            borrow_gpus=np.full(len(weight), -1),
            keeps_idle_quota=np.zeros(len(weight), np.bool_),
        ),
    )


def test_the_weight_of_a_job_is_the_product_of_its_own_its_tenants_and_its_queues() -> None:
    jobs = [
        a_job("own", weight=3.0),
        a_job("tenant", tenant="lab", weight=0.5),
        a_job("queue", priority=2),
        a_job("all", weight=3.0, tenant="lab", priority=2),
        a_job("no settings", tenant="guest", priority=7),
    ]
    snapshot = a_snapshot(nodes=some_nodes((0, 2, 4)), jobs=jobs, estimates=CELLS)
    policy = Policy(objective="throughput", priority_weights="1:1, 2:4, 9:100")
    snapshot = with_tenants(snapshot, lab=10.0, other=7.0)
    assert effective_weight(snapshot, policy).tolist() == [3.0, 5.0, 4.0, 120.0, 1.0]
    problem = build_problem(snapshot, policy)
    assert problem.weight.tolist() == [3.0, 5.0, 4.0, 120.0, 1.0]
    assert [max(column_values(problem, j)) / max(column_values(problem, 4)) for j in range(4)] == [
        3,
        5,
        4,
        120,
    ]


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(0, 1000))
def test_weights_scale_only_their_own_jobs_values(own: float, shared: float, seed: int) -> None:
    snapshot = a_random_snapshot(seed, jobs=3)
    jobs = replace(snapshot.jobs, weight=np.array([own, 1.0, 1.0]), tenant=("lab", "t", "t"))
    before = build_problem(snapshot, THROUGHPUT)
    after = build_problem(with_tenants(replace(snapshot, jobs=jobs), lab=shared), THROUGHPUT)
    own_columns = before.column_job == 0
    assert after.value[own_columns] == pytest.approx(
        own * shared * before.value[own_columns], rel=1e-3, abs=101
    )
    assert np.array_equal(after.value[~own_columns], before.value[~own_columns])


def test_a_start_is_charged_its_restart_seconds_relative_to_an_hour() -> None:
    problem = state_problem(a_job("j", requested_gpus=2, restart_s=360.0))
    assert column_values(problem)[1] == pytest.approx(0.9 * 1.6)
    assert problem.restart_price[1] == pytest.approx(0.16 * VALUE_SCALE)


def test_near_its_end_a_restart_costs_more_but_never_everything() -> None:
    """On the whole cluster, its share, 100 iterations of 1.6 s are left. A restart of 60 s is 0.375
    of them; one of 600 s is capped."""
    soon = a_job("j", requested_gpus=2, iterations_left=100.0, restart_s=60.0)
    assert column_values(state_problem(soon))[1] == pytest.approx(1.6 * (1 - 60 / 160))
    assert column_values(state_problem(soon | {"restart_s": 600.0}))[1] == pytest.approx(0.16)


def test_a_huge_weight_fails_no_round_and_preserves_the_values_of_others() -> None:
    problem = state_problem(a_job("heavy", weight=1e12), a_job("other", weight=2.0))
    assert column_values(problem, 1) == [2.0, 3.2, 5.0, 1.6]
    heavy = column_values(problem, 0)
    assert min(heavy) > 1e8
    assert max(heavy) * problem.scale < MAX_TOTAL


@pytest.mark.parametrize(
    "options",
    [{"restart_horizon_s": 0.0}, {"max_restart_share": 1.0}, {"defragment_every_rounds": -1}],
)
def test_a_meaningless_policy_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Policy(**options)  # type: ignore[arg-type]


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


@examples(60)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from([*SUMS, *LEVELS]))
def test_the_requested_count_does_not_change_a_jobs_values(
    seed: int, other: int, objective: str
) -> None:
    snapshot = a_random_snapshot(seed, jobs=6)
    free = replace(snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(6, np.bool_)))
    requests = np.random.default_rng(other).integers(1, 65, 6)
    changed = replace(free, jobs=replace(free.jobs, requested_gpus=requests))
    before, after = (state_freely(s, Policy(objective=objective)) for s in (free, changed))
    assert np.array_equal(before.problem.value, after.problem.value)
    assert np.array_equal(before.problem.restart_price, after.problem.restart_price)
    for first, second in zip(before.goals, after.goals, strict=True):
        if isinstance(first, Levels) and isinstance(second, Levels):
            assert np.array_equal(first.level, second.level)
            assert np.array_equal(first.waiting, second.waiting)


@pytest.mark.parametrize("objective", SUMS)
def test_bounds_do_not_change_the_values_of_remaining_columns(objective: str) -> None:
    jobs = [a_job("free"), a_job("bounded", requested_gpus=4, min_gpus=2, max_gpus=8)]
    problem = state_freely(a_round_of(*jobs), Policy(objective=objective)).problem
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
    assert str(reason.message).startswith("the job may run on at least 3 and at most 3 GPUs")
    assert dict(reason.evidence)["GPU counts of its Cells"] == "1, 2, 4, 8, 16, 32"
