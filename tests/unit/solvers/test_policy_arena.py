"""Arena's characteristic decisions."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.formulation.round.policy import Policy
from tessera.solvers.schedulers.arena import Arena
from tessera.solvers.schedulers.base import make_view
from tests.support.builders import a_job
from tests.support.published_schedulers import (
    FLAT,
    LINEAR,
    RUNNING,
    a_round,
    choose_cells,
    rates,
)


def test_arena_halves_the_job_that_loses_least_for_a_new_one() -> None:
    jobs = [
        a_job("steep", 0, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("flat", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("new", 2, requested_gpus=2),
    ]
    cells = [rates(0, 0, LINEAR), rates(1, 0, FLAT), rates(2, 0, {2: 20.0})]

    assert choose_cells(Arena(), a_round(jobs, cells)) == {
        "steep": (0, 4),
        "flat": (0, 2),
        "new": (0, 2),
    }


def test_arena_moves_a_job_to_an_idle_type_in_preference_to_halving_it() -> None:
    jobs = [
        a_job("mover", 0, state=RUNNING, cell=(0, 8, 1), requested_gpus=8),
        a_job("new", 1, requested_gpus=8, requested_gpu_type=0),
    ]
    cells = [rates(0, 0, LINEAR), rates(0, 1, {8: 70.0}), rates(1, 0, {8: 80.0, 4: 10.0})]
    snapshot = a_round(jobs, cells, nodes=((0, 1, 8), (1, 1, 8)))

    assert choose_cells(Arena(), snapshot) == {"mover": (1, 8), "new": (0, 8)}
    # if types are fixed, both jobs must be halved
    assert choose_cells(Arena(heterogeneity=False), snapshot) == {"mover": (0, 4), "new": (0, 4)}
    # if counts are fixed, only a move is possible
    assert choose_cells(Arena(elasticity=False), snapshot) == {"mover": (1, 8), "new": (0, 8)}


def test_arena_scales_down_no_more_often_than_its_depth() -> None:
    jobs = [
        *(a_job(f"r{k}", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2) for k in range(4)),
        a_job("new", 1, requested_gpus=4),
    ]
    cells = [rates(0, 0, {1: 10.0, 2: 15.0}), rates(1, 0, {4: 400.0, 2: 1.0})]
    snapshot = a_round(jobs, cells)

    assert choose_cells(Arena(depth=4), snapshot)["new"] == (0, 4)
    assert choose_cells(Arena(depth=3), snapshot)["new"] == (0, 2)
    assert choose_cells(Arena(depth=1), snapshot)["new"] is None


def test_arena_gives_idle_gpus_to_the_job_that_gains_most_step_by_step() -> None:
    jobs = [
        a_job("steep", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
        a_job("flat", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
    ]
    snapshot = a_round(jobs, [rates(0, 0, LINEAR), rates(1, 0, FLAT)])

    assert choose_cells(Arena(max_upgrades=1), snapshot) == {"steep": (0, 4), "flat": (0, 2)}
    assert choose_cells(Arena(), snapshot) == {"steep": (0, 4), "flat": (0, 4)}
    assert choose_cells(Arena(elasticity=False), snapshot) == {"steep": (0, 2), "flat": (0, 2)}


def test_arena_weighs_by_raw_samples_only_on_request() -> None:
    jobs = [
        a_job("small", 0, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
        a_job("large", 1, state=RUNNING, cell=(0, 2, 1), requested_gpus=2),
    ]
    # the small model gains 500 samples/s of 1,000, the large one 1 of 1
    cells = [rates(0, 0, {2: 1000.0, 4: 1500.0}), rates(1, 0, {2: 1.0, 4: 2.0})]
    snapshot = a_round(jobs, cells, nodes=((0, 1, 6),))

    assert choose_cells(Arena(), snapshot)["large"] == (0, 4)
    assert choose_cells(Arena(performance="samples"), snapshot)["small"] == (0, 4)


BLOCKED = [rates(0, 0, {8: 80.0}), rates(1, 0, {4: 40.0})]


def test_arena_starts_a_later_job_past_a_blocked_one_and_marks_it() -> None:
    jobs = [
        a_job("old", 1, state=RUNNING, cell=(0, 4, 1), requested_gpus=4),
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("later", 1, requested_gpus=4, submit_s=2.0),
        a_job("stays", 2, state=RUNNING, cell=(0, 4, 1), requested_gpus=4, submit_s=3.0),
    ]
    snapshot = a_round(jobs, [*BLOCKED, rates(2, 0, {4: 40.0})], nodes=((0, 1, 12),))
    view = make_view(snapshot, Policy())

    choice = Arena().choose(view)

    assert (choice >= 0).tolist() == [True, False, True, True]
    assert Arena().gives_way(view, choice).tolist() == [False, False, True, False]
    assert choose_cells(Arena(opportunism=False), snapshot)["later"] is None


def test_arena_suspends_jobs_started_past_a_blocked_one_once_that_fits() -> None:
    jobs = [
        a_job("blocked", 0, requested_gpus=8, submit_s=1.0),
        a_job("guest", 1, state=RUNNING, cell=(0, 4, 1), submit_s=2.0, opportunistic=True),
    ]
    snapshot = a_round(jobs, BLOCKED)

    assert choose_cells(Arena(), snapshot) == {"blocked": (0, 8), "guest": None}
    assert choose_cells(Arena(opportunism=False), snapshot) == {"blocked": None, "guest": (0, 4)}


@pytest.mark.parametrize("seed", range(20))
def test_arena_with_only_requested_counts_equals_arena_without_elasticity(seed: int) -> None:
    """Plain rates are summed here, because one effective GPU depends on all visible counts."""
    rng = np.random.default_rng(seed)
    requested = (2 ** rng.integers(0, 4, 12)).tolist()
    jobs = [a_job(f"j{i}", i, requested_gpus=n) for i, n in enumerate(requested)]
    curve = {n: n ** float(rng.uniform(0.5, 1)) * 10 for n in (1, 2, 4, 8)}
    cells = [rates(i, kind, curve) for i in range(12) for kind in (0, 1)]
    as_requested = [
        rates(i, kind, {n: curve[n]}) for i, n in enumerate(requested) for kind in (0, 1)
    ]
    cells_as_requested = choose_cells(Arena(performance="samples"), a_round(jobs, as_requested))
    assert cells_as_requested == choose_cells(
        Arena(performance="samples", elasticity=False), a_round(jobs, cells)
    )
