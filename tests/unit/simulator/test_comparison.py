"""Gains, ranks and rows of a comparison of policies, against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.benchmarks.harness.cases import find_cases
from tessera.benchmarks.harness.registry import run_case
from tessera.benchmarks.schedulers.bench_policies import ComparisonGroup, parse_shares, policy_run
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.comparison.comparisons import (
    SEED_MEAN_FIGURES,
    bound_share,
    comparison_row,
    comparison_rows,
    finished_by,
    headline_figures,
    jct_ratio,
    policy_ranks,
)
from tessera.simulator.comparison.plots import comparison_plots
from tessera.simulator.comparison.policies import DEFAULT_POLICY
from tessera.simulator.comparison.runs import FinishedRun, RunRequest, WorkloadBounds
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec
from tessera.simulator.completion_bound import CompletionBound

NEVER = math.inf


def a_run(
    jct_s: Sequence[float], throughput: float = 1.0, alone_s: float = 10.0, **figures: float
) -> FinishedRun:
    """Return a run whose jobs all arrive at 100 s, with a horizon of 1,000 s."""
    arrival_s = np.full(len(jct_s), 100.0)
    shown = dict.fromkeys(SEED_MEAN_FIGURES, 1.0) | {
        "throughput": throughput,
        "horizon_s": 1000.0,
        "stuck": 0.0,
        "load": 1.0,
        "dropped": 0.0,
        "jct_mean_s": 0.0,
        "jobs": float(len(jct_s)),
    }
    bins = np.array([0.0, 500.0])
    return FinishedRun(
        figures=shown | figures,
        arrival_s=arrival_s,
        end_s=arrival_s + np.array(jct_s),
        alone_s=np.full(len(jct_s), alone_s),
        gaps=np.array([[100.0, 1e-5], [200.0, 0.0]]),
        course={k: bins for k in ("at_s", "normalised", "samples_per_s", "gpus", "waiting")},
        node_gpus=[4],
        node_types=["a100"],
        segments=[("0", 100.0, 300.0, [(0, 2)])],
    )


def some_bounds(throughput: float = 1.0) -> WorkloadBounds:
    """Return the bounds of three jobs that cost 50 s each, where all GPUs are worth 30 s."""
    return WorkloadBounds(
        throughput=throughput,
        completion=CompletionBound(
            cost_s=np.full(3, 50.0), capacity_s=30.0, alone_s=np.full(3, 10.0)
        ),
    )


BY_POLICY = {
    "arena": [a_run([100, 200, NEVER], 10.0)],
    "fcfs": [a_run([50, 500, 30], 5.0)],
    "ilp:jct": [a_run([80, 100, 600], 8.0)],
    "ilp:throughput": [a_run([100, 150, 800], 12.0)],
    "greedy:jct": [a_run([10, 10, 10], 99.0)],
}


def test_jct_is_compared_over_the_jobs_that_both_finished() -> None:
    assert jct_ratio(BY_POLICY["ilp:jct"], BY_POLICY["arena"]).value == pytest.approx(180 / 300)
    assert jct_ratio(BY_POLICY["fcfs"], BY_POLICY["ilp:jct"]).value == pytest.approx(580 / 780)
    assert math.isnan(jct_ratio([a_run([NEVER])], [a_run([1.0])]).value)


def test_jct_within_the_horizon_excludes_jobs_that_either_ended_later() -> None:
    our_runs, their_runs = [a_run([100, 901, 200])], [a_run([200, 100, 900])]
    assert jct_ratio(our_runs, their_runs).value == pytest.approx(1201 / 1200)
    assert jct_ratio(our_runs, their_runs, within_horizon=True).value == pytest.approx(300 / 1100)


def test_ranks_count_only_policies_that_are_not_ours() -> None:
    # fcfs has the lower mean JCT over all three jobs
    assert policy_ranks("ilp:throughput", BY_POLICY) == (2, 1)
    assert policy_ranks("ilp:jct", BY_POLICY) == (2, 2)


def test_the_headline_shows_the_gain_of_the_named_policy() -> None:
    figures = headline_figures(BY_POLICY, "ilp:jct", second="ilp:throughput")
    assert figures == {
        "jct_rank": 2,
        "throughput_rank": 2,
        "others": 2,
        "longest_round_s": 1.0,
        "jct_gain_vs_arena": pytest.approx(1 - 180 / 300),
        "throughput_gain_vs_arena": pytest.approx(-0.2),
        "throughput_gain_second": pytest.approx(0.2),
        "jct_gain_within_horizon": pytest.approx(1 - 180 / 300),
    }
    without = {name: runs for name, runs in BY_POLICY.items() if name != "arena"}
    assert "jct_gain_vs_arena" not in headline_figures(without, "ilp:jct")
    assert "throughput_gain_second" not in headline_figures(BY_POLICY, "ilp:jct", second="ilp:cost")


def test_the_headline_compares_with_the_bounds() -> None:
    figures = headline_figures(BY_POLICY, "ilp:throughput", [some_bounds(throughput=15.0)])
    # 50 s for each of the jobs that finished, less 30 s: 120 of 1,050 s, and 70 of Arena's 300
    assert figures["jct_bound_share"] == pytest.approx(120 / 1050)
    assert figures["jct_over_bound"] == pytest.approx(1050 / 120 - 1)
    assert figures["jct_gain_limit"] == pytest.approx(1 - 70 / 300)
    assert figures["throughput_bound_share"] == pytest.approx(12 / 15)
    assert figures["throughput_gain_limit"] == pytest.approx(0.5)


def test_several_seeds_give_an_interval_of_the_gain() -> None:
    by_policy = {
        "arena": [a_run([100, 200], 10.0), a_run([300, 100], 8.0)],
        "ilp:jct": [a_run([50, 100], 11.0), a_run([200, 120], 8.0)],
    }
    figures = headline_figures(by_policy, "ilp:jct")
    for name, value in (("jct_gain", 1 - 235 / 350), ("throughput_gain", 19 / 18 - 1)):
        assert figures[f"{name}_vs_arena"] == pytest.approx(value)
        assert figures[f"{name}_vs_arena_low"] < value < figures[f"{name}_vs_arena_high"]


def test_a_row_covers_the_jobs_that_all_policies_finished() -> None:
    row = comparison_row("fcfs", BY_POLICY, "arena")
    assert (row["jobs_of_all"], row["jct_mean_s"], row["jct_p50_s"]) == (2, 275, 275)
    assert row["throughput_over_arena"] == 0.5
    assert row["jct_over_arena"] == pytest.approx(550 / 300)
    assert row["stuck_runs"] == 0
    assert "jct_mean_low_s" not in row  # there is only one seed
    assert [r["policy"] for r in comparison_rows(BY_POLICY)][:2] == ["greedy:jct", "ilp:jct"]


def test_the_share_of_the_bound_covers_the_jobs_the_policy_finished() -> None:
    bounds = [some_bounds().completion]
    assert bound_share([a_run([100, 60, NEVER])], bounds) == pytest.approx(70 / 160)
    assert math.isnan(bound_share([a_run([NEVER, NEVER, NEVER])], bounds))
    row = comparison_row("fcfs", BY_POLICY, "arena", bounds)
    assert row["jct_bound_share"] == pytest.approx(120 / 580)
    assert "jct_bound_share" not in comparison_row("fcfs", BY_POLICY, "arena")
    assert finished_by([a_run([1, 950])], until_s=1000).tolist() == [True, False]


def test_plots_show_the_given_policies_and_their_gpus() -> None:
    plots = comparison_plots(BY_POLICY, "ilp:jct", ["ilp:jct", "arena"])
    titles = [plot.title for plot in plots]
    assert {"Throughput", "Queue", "Job completion time", "Gap to the proven bound"} < set(titles)
    assert [t for t in titles if t.startswith("GPUs over")] == [
        "GPUs over time under ilp:jct",
        "GPUs over time under arena",
    ]
    assert "fcfs" in plots[0].alt  # bars are of all policies


def test_without_arena_plots_are_in_hours() -> None:
    by_policy = {"ilp:jct": [a_run([3600, 7200], 1.0)]}
    assert "mean JCT, ilp:jct: 1.5" in comparison_plots(by_policy, "ilp:jct", ["ilp:jct"])[0].alt


def test_a_group_is_named_by_what_its_runs_share() -> None:
    group = ComparisonGroup(trace="/somewhere/my.csv", information="optimum", gpus_share=0.5)
    assert group.name == "my.csv, optimum, 0.5 of the GPUs"
    costs = RunRequest(work=WorkloadSpec(), policy="", overheads="free")
    run = policy_run(costs, group, "ilp:jct", 3)
    assert (run.work.gpus_share, run.work.seed, run.information) == (0.5, 3, "optimum")
    assert (run.policy, run.overheads) == ("ilp:jct", "free")


def test_shares_are_parsed_as_numbers() -> None:
    assert parse_shares("1, 0.25") == [1.0, 0.25]
    with pytest.raises(InvalidInput, match="numbers"):
        parse_shares("half")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": "ilp:jct,best"}, "unknown policy 'best'"),
        ({"information": "all"}, "use estimates"),
        ({"seeds": 2, "trace": "arena-testbed-a"}, "--jobs-share"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_before_anything_runs(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        find_cases()["policies"].run(**{"trace": SYNTHETIC} | options)


@pytest.mark.full
def test_the_default_policy_is_compared_even_if_it_is_not_named() -> None:
    case = find_cases()["policies"]
    named = {"policies": "fcfs,arena,ilp:throughput", "jobs": 12}
    result = run_case(case, case.smoke | named, ["bench"])
    assert {row["policy"] for row in result["table"]} == {
        "fcfs",
        "arena",
        "ilp:throughput",
        DEFAULT_POLICY,
    }
    assert [row["policy"] for row in result["table"] if row["default"]] == [DEFAULT_POLICY]
    figures = result["figures"]
    assert figures["jct_over_bound"] == pytest.approx(1 / figures["jct_bound_share"] - 1)
    assert figures["jct_over_bound"] > 0
    assert all(0 < row["jct_bound_share"] < 1 for row in result["table"])
