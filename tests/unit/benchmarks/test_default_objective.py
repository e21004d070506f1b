"""The rule that chooses the default objective, on hand-made standings."""

from __future__ import annotations

import math

import pytest

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.harness.registry import run_case
from tessera.benchmarks.schedulers.bench_default_objective import (
    OBJECTIVES,
    choose_objective,
    geometric_means,
)
from tessera.formulation.errors import InvalidInput
from tessera.formulation.grammar import parse_objective
from tessera.formulation.policy import DEFAULT_OBJECTIVE


def test_the_least_mean_jct_over_all_workloads_is_chosen() -> None:
    standings = {
        "often": [(0.5, 0.5), (0.9, 0.5)],
        "evenly": [(0.64, 1.25), (0.64, 0.8)],
        "seldom": [(0.4, 1.1), (1.1, 1.1)],
    }
    assert choose_objective(standings) == "evenly"
    assert geometric_means(standings["evenly"]) == pytest.approx((0.64, 1.0))
    del standings["evenly"]
    assert choose_objective(standings) == "seldom"


def test_workloads_on_which_nothing_ended_cannot_be_compared() -> None:
    with pytest.raises(InvalidInput, match="more jobs"):
        choose_objective({"a": [(math.nan, 1.0)], "b": [(1.0, 1.0)]})


def test_the_default_is_one_of_the_objectives_to_choose_from() -> None:
    assert DEFAULT_OBJECTIVE in OBJECTIVES
    assert all(parse_objective(name) for name in OBJECTIVES)


def test_the_choice_is_judged_on_the_default_workloads_alone() -> None:
    case = find_cases()["default-objective"]
    result = run_case(case, case.smoke, ["bench"])
    assert result["bounds"] == {}
    assert result["figures"]["workloads"] == 4
    assert [row["objective"] for row in result["table"]] == ["throughput", "jct"]
    assert sum(row["chosen"] for row in result["table"]) == 1
