"""The small cases of foresight: their optima, and the figures that come from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.benchmarks.schedulers.bench_foresight import OBJECTIVES, case_figures, read_optima
from tessera.benchmarks.schedulers.foresight_cases import (
    COUNTS,
    JOBS,
    ROUND_S,
    START_S,
    TICK_S,
    SmallCase,
    draw_case,
    simulate_case,
)
from tessera.benchmarks.schedulers.foresight_optimum import GAP, solve_case

QUICK_SEED = 1003
"""The seed of a case whose optimum takes half a second."""


def test_the_same_seed_draws_the_same_case_and_odd_seeds_spread_arrivals() -> None:
    one, again, even = draw_case(7), draw_case(7), draw_case(8)
    assert np.array_equal(one.speed, again.speed)
    assert np.array_equal(one.iterations, again.iterations)
    assert one.arrival.max() > 0
    assert even.arrival.max() == 0


def test_jobs_that_fit_side_by_side_all_end_after_one_start() -> None:
    # each runs on one GPU alone, so five of them share eight GPUs without waiting
    speed = np.zeros((JOBS, 2, len(COUNTS)))
    speed[:, :, 0] = 1.0
    work_s = np.array([1000.0, 2000.0, 3000.0, 1500.0, 2500.0])
    case = SmallCase(
        arrival=np.zeros(JOBS, dtype=np.int64),
        iterations=np.rint(work_s / TICK_S).astype(np.int64),
        speed=speed,
    )
    optimum = solve_case(case)
    assert optimum.proven
    assert optimum.mean_s == pytest.approx(START_S + work_s.mean(), rel=2 * GAP)
    assert simulate_case(case, "ilp:throughput") == pytest.approx(START_S + work_s.mean())


def test_a_proof_repeats_the_stored_optimum() -> None:
    stored, again = read_optima()[QUICK_SEED], solve_case(draw_case(QUICK_SEED))
    assert stored.proven
    assert again.proven
    assert again.mean_s == pytest.approx(stored.mean_s, rel=2 * GAP)


@pytest.mark.parametrize("policy", ["ilp:jct", "ilp:jct@foresight=32", "fcfs"])
def test_no_policy_beats_a_proven_optimum(policy: str) -> None:
    for seed in (QUICK_SEED, QUICK_SEED + 1):
        optimum = read_optima()[seed]
        if optimum.proven:
            assert simulate_case(draw_case(seed), policy) >= optimum.bound_s * (1 - GAP)


def test_the_stored_optima_are_longer_than_a_round_and_not_below_their_bounds() -> None:
    for optimum in read_optima().values():
        assert START_S < optimum.mean_s < optimum.rounds * ROUND_S
        assert optimum.bound_s <= optimum.mean_s * (1 + 1e-9)


def test_figures_leave_out_cases_without_a_proof() -> None:
    others = dict.fromkeys(OBJECTIVES, 0.2) | {"ilp:jct": 0.05}
    table = [
        {"case": 1, "proven": 1, "foresight": 0.01, **others},
        {"case": 2, "proven": 0, "foresight": 9.0, **others},
    ]
    figures = case_figures(table)
    assert figures["proven"] == 1
    assert figures["jct_over_optimum"] == pytest.approx(0.01)
    assert figures["default_over_optimum"] == pytest.approx(0.2)
    assert figures["best_over_optimum"] == pytest.approx(0.05)
    assert math.isnan(float(case_figures(table[1:])["jct_over_optimum"]))
