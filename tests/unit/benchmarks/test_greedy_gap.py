"""The share of a round's optimum that greedy and Arena's search reach, as benchmarked."""

from __future__ import annotations

import pytest

from tessera.benchmarks.rounds.bench_greedy_gap import compare_round
from tessera.solvers.schedulers.arena import Arena
from tests.support.builders import a_job, a_random_snapshot, a_snapshot, an_estimate, some_nodes


@pytest.mark.parametrize("seed", range(4))
def test_no_method_exceeds_the_optimum_or_breaks_a_rule(seed: int) -> None:
    row = compare_round(a_random_snapshot(seed, jobs=25), Arena())

    assert row["violations"] == 0
    assert float(row["gap"]) <= 1e-3
    best = float(row["ilp"]) * (1 + 1e-3)
    assert 0 < float(row["arena"]) <= best
    assert 0 < float(row["greedy"]) <= best


def test_a_worse_search_shows_a_lower_value() -> None:
    snapshot = a_random_snapshot(4, jobs=25)

    fixed = compare_round(snapshot, Arena(elasticity=False, max_upgrades=0))

    assert float(fixed["arena"]) < 0.7 * float(fixed["ilp"])


@pytest.mark.parametrize(("gpus", "contended"), [(2, False), (1, True)])
def test_a_round_is_contended_if_not_every_job_can_have_its_best_cell(
    gpus: int, contended: bool
) -> None:
    snapshot = a_snapshot(
        nodes=some_nodes((0, 1, gpus)),
        jobs=[a_job("a"), a_job("b")],
        estimates=[an_estimate(0, 0, 1)],
    )

    row = compare_round(snapshot, Arena())

    assert row["contended"] is contended
    assert row["load"] == 2 / gpus
    assert row["waiting"] == 2 - gpus
