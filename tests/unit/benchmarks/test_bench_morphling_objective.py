"""The choice of our policy for Morphling's traces."""

from __future__ import annotations

import pytest

from tessera.benchmarks.papers.bench_morphling_objective import (
    CANDIDATES,
    OURS,
    choose_policy,
    geometric_mean,
)
from tessera.simulator.comparison.policies import options_of


def test_the_policy_with_the_least_geometric_mean_is_chosen() -> None:
    ratios = {"a": [0.5, 2.0], "b": [0.9, 0.9], "c": [0.9, 0.9]}

    assert geometric_mean(ratios["a"]) == pytest.approx(1.0)
    assert choose_policy(ratios) == "b"


def test_ours_is_a_candidate_with_rounds_of_a_minute() -> None:
    options = options_of(OURS)

    assert OURS in CANDIDATES
    assert (options.objective, options.round_s) == ("jct", 60.0)
