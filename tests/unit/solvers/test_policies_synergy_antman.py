"""Synergy and AntMan, and laws that these two, Arena and Morphling keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.check import find_violations
from tessera.formulation.lifecycle import JobState
from tessera.formulation.policy import Policy
from tessera.formulation.snapshot import STATE_CODE
from tessera.formulation.statement import state_round
from tessera.solvers.answers import make_solution, objective_of, trivial_bound
from tessera.solvers.schedulers.antman import AntMan
from tessera.solvers.schedulers.base import make_view, translate_choice
from tessera.solvers.schedulers.registry import make_scheduler, scheduler_names
from tessera.solvers.schedulers.synergy import Synergy
from tests.support.builders import a_job, a_random_snapshot
from tests.support.laws import examples
from tests.support.problems import brute_force
from tests.support.published_schedulers import (
    LINEAR,
    MINE,
    RUNNING,
    a_round,
    choose_cells,
    rates,
)

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


def test_antman_lets_best_effort_jobs_use_idle_gpus_up_to_their_request() -> None:
    jobs = [
        a_job("owed", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2, guaranteed=True),
        a_job("shrunk", 0, state=RUNNING, cell=(0, 1, 1), requested_gpus=2),
        a_job("new", 0, requested_gpus=2),
    ]

    cells = choose_cells(AntMan(), a_round(jobs, [rates(0, 0, LINEAR)]))

    assert cells == {"owed": (0, 2), "shrunk": (0, 2), "new": (0, 2)}


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
    best = brute_force(state_round(snapshot, policy).problem)
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
