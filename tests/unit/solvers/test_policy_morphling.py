"""Morphling's characteristic decisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.policy import Policy
from tessera.solvers.schedulers.antman import AntMan
from tessera.solvers.schedulers.base import make_view
from tessera.solvers.schedulers.morphling import Morphling
from tessera.solvers.schedulers.registry import make_scheduler
from tests.support.builders import a_job, a_random_snapshot
from tests.support.laws import examples
from tests.support.published_schedulers import (
    FLAT,
    LINEAR,
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


def test_morphling_shrinks_the_least_sensitive_job_for_a_steeper_one() -> None:
    jobs = [
        a_job("flat", 1, state=RUNNING, cell=(0, 8, 1), requested_gpus=1),
        a_job("steep", 0, requested_gpus=4),
    ]

    cells = choose_cells(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    assert cells == {"flat": (0, 4), "steep": (0, 4)}


def test_morphling_needs_only_the_smallest_count_as_fast_as_the_request() -> None:
    jobs = [
        a_job("mine", 0, requested_gpus=4, guaranteed=True),
        a_job("other", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2, guaranteed=True),
    ]
    cells = [rates(0, 0, {1: 5.0, 2: 12.0, 4: 12.0}), rates(1, 0, {2: 20.0})]

    choice = choose_cells(Morphling(), a_round(jobs, cells, nodes=((0, 1, 4),)))

    assert choice == {"mine": (0, 2), "other": (0, 2)}


def test_morphling_preempts_a_steeper_best_effort_job_for_a_guaranteed_minimum() -> None:
    jobs = [
        a_job("effort", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=1),
        a_job("owed", 1, requested_gpus=8, guaranteed=True),
    ]

    cells = choose_cells(Morphling(), a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)]))

    assert cells == {"effort": None, "owed": (0, 8)}


def test_morphling_raises_a_guaranteed_job_to_its_minimum_or_stops_it() -> None:
    def a_case(*, baseline_guaranteed: bool) -> dict[str, tuple[int, int] | None]:
        jobs = [
            a_job("owed", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=4, guaranteed=True),
            a_job(
                "baseline",
                1,
                state=RUNNING,
                cell=(0, 2, 1),
                requested_gpus=2,
                guaranteed=baseline_guaranteed,
            ),
        ]
        cells = [rates(0, 0, {2: 20.0, 4: 40.0}), rates(1, 0, {2: 20.0})]
        return choose_cells(Morphling(), a_round(jobs, cells, nodes=((0, 1, 4),)))

    assert a_case(baseline_guaranteed=False) == {"owed": (0, 4), "baseline": None}
    assert a_case(baseline_guaranteed=True) == {"owed": None, "baseline": (0, 2)}


def test_morphling_serves_guaranteed_jobs_only_within_the_tenants_quota() -> None:
    jobs = [
        a_job(f"owed-{k}", 0, requested_gpus=2, guaranteed=True, submit_s=float(k))
        for k in range(3)
    ]
    snapshot = a_round(jobs, [rates(0, 0, {2: 20.0})])

    within = choose_cells(Morphling(), with_quota(snapshot, "t", 4))

    assert within == {"owed-0": (0, 2), "owed-1": (0, 2), "owed-2": None}
    assert choose_cells(Morphling(), snapshot)["owed-2"] == (0, 2)


def test_morphling_charges_a_quota_the_smallest_count_not_the_request() -> None:
    jobs = [
        a_job(f"owed-{k}", 0, requested_gpus=4, guaranteed=True, submit_s=float(k))
        for k in range(2)
    ]
    snapshot = with_quota(a_round(jobs, [rates(0, 0, {2: 20.0, 4: 20.0})]), "t", 4)

    assert choose_cells(Morphling(), snapshot) == {"owed-0": (0, 2), "owed-1": (0, 2)}
    assert choose_cells(AntMan(), snapshot) == {"owed-0": (0, 4), "owed-1": None}


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


def test_morphling_r_keeps_the_execution_plan_of_a_running_job() -> None:
    job = a_job("j", 0, requested_gpus=2, state=RUNNING, cell=(0, 2, 2))
    view = make_view(a_round([job], TWO_PLANS), Policy())

    (column,) = make_scheduler("morphling-r").choose(view).tolist()

    assert int(view.draft.gpus[column]) == 8


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
