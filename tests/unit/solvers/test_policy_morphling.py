"""Decisions of Morphling, Synergy and AntMan, also where plans need CPU cores and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.answer.check import find_violations
from tessera.formulation.job.lifecycle import JobState
from tessera.formulation.round.policy import Policy
from tessera.formulation.round.statement import state_round
from tessera.formulation.state.plan_tables import PlanKinds
from tessera.formulation.state.snapshot import STATE_CODE, Snapshot
from tessera.solvers.exact.answers import make_solution, objective_of, trivial_bound
from tessera.solvers.schedulers.antman import AntMan
from tessera.solvers.schedulers.base import make_view, translate_choice
from tessera.solvers.schedulers.morphling import Morphling
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names
from tessera.solvers.schedulers.synergy import Synergy
from tests.support.builders import (
    a_job,
    a_node,
    a_random_snapshot,
    a_snapshot,
    an_estimate,
    state_freely,
)
from tests.support.laws import examples
from tests.support.problems import brute_force
from tests.support.published_schedulers import (
    BATCH,
    FLAT,
    LINEAR,
    MINE,
    RUNNING,
    a_round,
    choose_cells,
    rates,
    with_quota,
)


def test_morphling_gives_each_gpu_where_the_curve_is_steepest() -> None:
    jobs = [a_job("flat", 1, requested_gpus=8), a_job("steep", 0, requested_gpus=8)]

    cells = choose_cells(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    # the last four GPUs of the flat job add less than the first four of the steep job; for the steep
    # job's next four, the flat job would have to stop, and its first GPU is worth more than any other
    assert cells == {"flat": (0, 4), "steep": (0, 4)}


def test_morphling_needs_only_the_smallest_count_as_fast_as_the_request() -> None:
    jobs = [
        a_job("mine", 0, requested_gpus=4, guaranteed=True),
        a_job("other", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2, guaranteed=True),
    ]
    cells = [rates(0, 0, {1: 5.0, 2: 12.0, 4: 12.0}), rates(1, 0, {2: 20.0})]

    choice = choose_cells(Morphling(), a_round(jobs, cells, nodes=((0, 1, 4),)))

    assert choice == {"mine": (0, 2), "other": (0, 2)}


def test_morphling_serves_guaranteed_jobs_only_within_the_tenants_quota() -> None:
    jobs = [
        a_job(f"owed-{k}", 0, requested_gpus=2, guaranteed=True, submit_s=float(k))
        for k in range(3)
    ]
    snapshot = a_round(jobs, [rates(0, 0, {2: 20.0})])

    within = choose_cells(Morphling(), with_quota(snapshot, "t", 4))

    assert within == {"owed-0": (0, 2), "owed-1": (0, 2), "owed-2": None}
    assert choose_cells(Morphling(), snapshot)["owed-2"] == (0, 2)


TWO_PLANS = [
    rates(0, 0, {2: 20.0, 4: 30.0}, degree=1),
    rates(0, 0, {2: 10.0, 4: 60.0, 8: 110.0}, degree=2),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("morphling", (8, 2)),  # resources and plan
        ("morphling-r", (4, 1)),  # the best plan of the request, at any count
        ("morphling-e", (2, 1)),  # the best plan of the requested count
        ("morphling-n", (2, 1)),
    ],
)
def test_morphlings_variants_fix_what_they_are_named_for(
    name: str, expected: tuple[int, int]
) -> None:
    view = make_view(a_round([a_job("j", 0, requested_gpus=2)], TWO_PLANS), Policy())

    (column,) = make_scheduler(name).choose(view).tolist()

    cell = int(view.draft.cell[column])
    found = int(view.draft.cells.gpus[cell]), int(view.draft.cells.pipeline_degree[cell])
    assert found == expected


@examples(30)
@given(seed=st.integers(0, 10_000), share=st.floats(0.1, 0.9))
def test_morphling_never_leaves_a_guaranteed_job_below_its_request(seed: int, share: float) -> None:
    plain = a_random_snapshot(seed, jobs=14)
    owed = np.random.default_rng(seed).random(14) < share
    snapshot = replace(plain, jobs=replace(plain.jobs, guaranteed=owed))
    view = make_view(snapshot, Policy())

    choice = Morphling().choose(view)

    for job in np.flatnonzero(owed & (choice >= 0)).tolist():
        mine = slice(int(view.draft.job_start[job]), int(view.draft.job_start[job + 1]))
        at_request = (view.draft.gpu_type[mine] == view.draft.gpu_type[choice[job]]) & (
            view.draft.gpus[mine] <= snapshot.jobs.requested_gpus[job]
        )
        assert view.draft.rate[choice[job]] >= view.draft.rate[mine][at_request].max() * (1 - 1e-9)


# --- Synergy and AntMan ----------------------------------------------------------------------------


def test_synergy_skips_jobs_that_do_not_fit_and_changes_no_count() -> None:
    jobs = [
        a_job("old", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, submit_s=3.0),
        a_job("big", 0, requested_gpus=8, submit_s=1.0),
        a_job("small", 0, requested_gpus=2, submit_s=2.0),
    ]

    cells = choose_cells(Synergy(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert cells == {"old": (0, 4), "big": None, "small": (0, 2)}


def test_antman_shrinks_then_suspends_best_effort_jobs_for_a_guaranteed_one() -> None:
    def a_case(gpus: int) -> dict[str, tuple[int, int] | None]:
        jobs = [
            a_job("first", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, since_s=1.0),
            a_job("last", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, since_s=2.0),
            a_job("owed", 0, requested_gpus=gpus, guaranteed=True),
        ]
        return choose_cells(AntMan(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert a_case(2) == {"first": (0, 4), "last": (0, 2), "owed": (0, 2)}
    assert a_case(4) == {"first": (0, 4), "last": None, "owed": (0, 4)}
    assert a_case(8) == {"first": None, "last": None, "owed": (0, 8)}


# --- all four -----------------------------------------------------------------------------------


NAMES = [name for name in scheduler_names() if name.startswith(MINE)]


@pytest.mark.parametrize("name", NAMES)
@examples(15)
@given(seed=st.integers(0, 10_000))
def test_every_answer_fits_and_none_exceeds_the_optimum(name: str, seed: int) -> None:
    policy = Policy()
    snapshot = a_random_snapshot(
        seed, jobs=4, groups=((0, 1, 4), (1, 1, 2)), workloads=3, max_gpus=4
    )
    problem, view = (
        state_round(snapshot, policy, published=True).problem,
        make_view(snapshot, policy),
    )

    choice = translate_choice(view.draft, problem, make_scheduler(name).choose(view))

    bound = trivial_bound(problem)
    assert find_violations(problem, make_solution(problem, choice, bound=bound, solver=name)) == []
    best = brute_force(state_freely(snapshot, policy).problem)
    assert best is not None
    assert objective_of(problem, choice) <= best


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("morphling")])
def test_with_run_to_completion_a_second_round_keeps_all_jobs(name: str) -> None:
    snapshot = a_random_snapshot(3, jobs=30)
    view = make_view(snapshot, Policy())
    choice = make_scheduler(name).choose(view)
    runs = choice >= 0
    cells, cell = view.draft.cells, view.draft.cell[np.maximum(choice, 0)]
    jobs = replace(
        snapshot.jobs,
        state=np.where(runs, STATE_CODE[RUNNING], STATE_CODE[JobState.QUEUED]),
        current_type=np.where(runs, cells.gpu_type[cell], -1),
        current_gpus=np.where(runs, cells.gpus[cell], 0),
        current_degree=np.where(runs, cells.pipeline_degree[cell], 0),
    )

    again = make_scheduler(name).choose(make_view(replace(snapshot, jobs=jobs), Policy()))

    assert runs.any()
    assert np.all(again[runs] >= 0)


GIB = 1 << 30

DP, OFFLOAD, TP1, TP2 = 1, 2, 3, 4

PLANS = ("", "dp", "offload", "141", "142")


def a_cell(
    gpus: int, rate: float, plan: int = DP, *, workload: int = 0, nodes: int = 1, **needs: int
) -> dict[str, Any]:
    return an_estimate(workload, 0, gpus, nodes, plan=plan, iter_time_s=BATCH / rate, **needs)


def a_plan_round(
    jobs: Sequence[dict[str, Any]],
    cells: Sequence[dict[str, Any]],
    *,
    cpus: int = 16,
    host_bytes: int = 64 * GIB,
) -> Snapshot:
    """Return a round on one node of 8 GPUs. The plans 141 and 142 are of one kind."""
    snapshot = a_snapshot(
        nodes=[a_node("n", 0, 8, cpus=cpus, host_bytes=host_bytes)],
        jobs=jobs,
        estimates=cells,
        plans=PLANS,
    )
    return replace(
        snapshot, plan_kinds=PlanKinds(plan=np.array([TP1, TP2]), kind=("3d-pp1-tp4",) * 2)
    )


def choose_plans(name: str, snapshot: Snapshot) -> dict[str, tuple[int, str] | None]:
    """Return the (GPUs, execution plan) of each job, or None for a job that waits."""
    view = make_view(snapshot, Policy())
    choice = make_scheduler(name).choose(view)
    cells, cell = view.draft.cells, view.draft.cell
    return {
        job: None if c < 0 else (int(cells.gpus[cell[c]]), PLANS[int(cells.plan[cell[c]])])
        for job, c in zip(snapshot.jobs.name, choice.tolist(), strict=True)
    }


MENU = [
    a_cell(1, 10.0),
    a_cell(1, 25.0, OFFLOAD, cpus=8),
    a_cell(2, 20.0),
    a_cell(2, 40.0, OFFLOAD, cpus=16),
    a_cell(4, 30.0),
]


def test_a_guaranteed_job_needs_the_fewest_gpus_with_which_any_plan_is_fast_enough() -> None:
    rivals = [
        a_job(f"rival-{k}", 1, requested_gpus=1, state=RUNNING, cell=(0, 1, 1), guaranteed=True)
        for k in range(7)
    ]
    jobs = [*rivals, a_job("owed", 0, requested_gpus=2, submitted_plan=DP, guaranteed=True)]
    jobs[-1] |= {"requested_cpus": 8}
    snapshot = a_plan_round(
        [job | {"current_plan": DP} if job["state"] else job for job in jobs],
        [*MENU, a_cell(1, 10.0, workload=1)],
    )

    assert choose_plans("morphling", snapshot)["owed"] == (1, "offload")


def test_the_minimum_takes_no_more_cpus_than_were_requested() -> None:
    owed = a_job("owed", 0, requested_gpus=2, submitted_plan=DP, guaranteed=True)
    blocks = a_job("effort", 1, requested_gpus=4)
    cells = [*MENU[:3], a_cell(6, 600.0, workload=1)]

    def plan(requested_cpus: int) -> tuple[int, str] | None:
        owed["requested_cpus"] = requested_cpus
        return choose_plans("morphling", a_plan_round([owed, blocks], cells))["owed"]

    assert plan(8) == (1, "offload")
    assert plan(7) == (2, "dp")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("morphling", (2, "offload")),
        ("morphling-r", (4, "dp")),
        ("morphling-e", (2, "offload")),
        ("morphling-n", (2, "dp")),
        ("synergy", (2, "dp")),
        ("antman", (2, "dp")),
        ("srt", (2, "offload")),
    ],
)
def test_schedulers_without_choice_of_plans_run_the_submitted_one(
    name: str, expected: tuple[int, str]
) -> None:
    snapshot = a_plan_round([a_job("j", 0, requested_gpus=2, submitted_plan=DP)], MENU)

    assert choose_plans(name, snapshot) == {"j": expected}


def test_morphling_r_changes_only_the_data_parallel_degree_of_a_3d_plan() -> None:
    cells = [a_cell(4, 20.0, TP1), a_cell(8, 30.0, TP2), a_cell(8, 50.0, DP)]
    snapshot = a_plan_round([a_job("j", 0, requested_gpus=4, submitted_plan=TP1)], cells)

    assert choose_plans("morphling-r", snapshot) == {"j": (8, "142")}
    assert choose_plans("morphling", snapshot) == {"j": (8, "dp")}
