"""The exact answer over plans, GPUs, CPUs and host memory is the best of all answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.benchmarks.rounds.bench_plan_fuzz import OBJECTIVE, find_faults, without_hosts
from tessera.benchmarks.rounds.plan_oracle import best_throughput, draw_plan_round
from tessera.formulation.policy import Policy
from tessera.formulation.statement import build_problem
from tests.support.laws import examples


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_the_ilp_finds_the_best_plans_and_resources_of_small_rounds(seed: int) -> None:
    snapshot = draw_plan_round(np.random.default_rng(seed))
    problem = build_problem(snapshot, Policy(objective=OBJECTIVE))

    assert (
        find_faults(snapshot, problem, best_throughput(snapshot, problem.must_run), "portfolio")
        == []
    )


def test_an_answer_that_ignores_cpus_and_memory_counts_as_wrong() -> None:
    wrong = 0
    for seed in range(40):
        snapshot = draw_plan_round(np.random.default_rng(seed))
        snapshot = replace(
            snapshot, jobs=replace(snapshot.jobs, guaranteed=np.zeros(len(snapshot.jobs), np.bool_))
        )
        blind = build_problem(without_hosts(snapshot), Policy(objective=OBJECTIVE))
        best = best_throughput(snapshot, blind.must_run)
        wrong += find_faults(snapshot, blind, best, "portfolio") == ["wrong"]
    assert wrong >= 5
