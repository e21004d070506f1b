"""Laws of plans and resources, and of small rounds whose plans can all be listed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.round.policy import Policy
from tessera.formulation.round.problem import Problem
from tessera.formulation.round.promises.guarantee import request_rate
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.demand import NOT_STATED
from tessera.formulation.state.snapshot import Snapshot
from tessera.solvers.base import Budget
from tessera.solvers.registry import DEFAULT, make_solver
from tessera.solvers.rounds.plan import plan_round
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.packing import host_capacity
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.laws import examples
from tests.support.oracles.plan_rounds import best_throughput, draw_plan_round

POLICY: Final = Policy(objective="throughput", promise_starts=False)
EXACT: Final = Budget(remaining_s=lambda: math.inf, gap=0.0)


def finds_the_optimum(snapshot: Snapshot, problem: Problem, best: float) -> bool:
    """Return whether the default solver's objective is ``best``, but for the rounding of columns."""
    solution = make_solver(DEFAULT).solve(problem, EXACT)
    rounding = len(snapshot.jobs) / problem.scale
    return abs(solution.objective / problem.scale - best) <= rounding + 1e-9 * best


def without_hosts(snapshot: Snapshot) -> Snapshot:
    """Return the round with nodes that do not state their CPUs and host memory."""
    unstated = np.full(len(snapshot.nodes), NOT_STATED)
    return replace(snapshot, nodes=replace(snapshot.nodes, cpus=unstated, host_bytes=unstated))


@examples(200)
@given(seed=st.integers(0, 2**32))
def test_the_ilp_finds_the_best_plans_and_resources_of_small_rounds(seed: int) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    problem = state_round(snapshot, POLICY).problem

    assert finds_the_optimum(snapshot, problem, best_throughput(snapshot, problem.must_run))
    assert not plan_round(snapshot, POLICY, make_solver(DEFAULT), EXACT).violations


def test_an_answer_that_ignores_cpus_and_memory_counts_as_wrong() -> None:
    wrong = 0
    for seed in range(40):
        snapshot = draw_plan_round(np.random.default_rng(seed))
        snapshot = replace(
            snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(len(snapshot.jobs), np.bool_))
        )
        blind = state_round(without_hosts(snapshot), POLICY).problem
        wrong += not finds_the_optimum(snapshot, blind, best_throughput(snapshot, blind.must_run))
    assert wrong >= 5


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(
        ("morphling", "morphling-r", "morphling-e", "morphling-n", "synergy", "antman")
    ),
)
def test_schedulers_that_count_resources_never_give_a_pool_more_than_it_has(
    seed: int, name: str
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    view = make_view(snapshot, Policy())

    choice = make_scheduler(name).choose(view)

    runs = np.flatnonzero(choice >= 0)
    draft, column = view.draft, choice[runs]
    assert np.array_equal(draft.job[column], runs)
    hosts = host_capacity(view)
    for kind, gpus in enumerate(view.capacity.tolist()):
        used = draft.demand.at(column[draft.gpu_type[column] == kind])
        assert used.gpus.sum() <= gpus
        assert used.cpus.sum() <= hosts[kind][0]
        assert used.host_bytes.sum() <= hosts[kind][1]


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_morphling_gives_guaranteed_jobs_at_least_the_speed_of_their_submitted_plan(
    seed: int,
) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    typed = np.maximum(snapshot.jobs.requested_gpu_type, 0)
    snapshot = replace(snapshot, jobs=replace(snapshot.jobs, requested_gpu_type=typed))
    view = make_view(snapshot, Policy())
    owed = request_rate(view.draft)

    choice = make_scheduler("morphling").choose(view)

    jobs = np.flatnonzero((choice >= 0) & snapshot.jobs.guaranteed & ~np.isnan(owed))
    on_type = view.draft.gpu_type[choice[jobs]] == typed[jobs]
    jobs = jobs[on_type]
    assert (view.draft.rate[choice[jobs]] >= owed[jobs] * (1 - 1e-9)).all()
