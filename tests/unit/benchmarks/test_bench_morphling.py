"""Figures of runs in the benchmark of Morphling's traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.papers.bench_morphling import TRACES, run_morphling_traces
from tessera.benchmarks.papers.morphling_known import KNOWN_RESULTS
from tessera.benchmarks.papers.morphling_runs import (
    TraceRuns,
    mean_jct_h,
    pool_runs,
    promised_figures,
    short_part,
    table_of,
    trace_figures,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.data import MissingData
from tessera.solvers.schedulers import registry


def a_finished_run(*jct_s: float, alone_s: Sequence[float] = ()) -> FinishedRun:
    """Return a run of jobs that arrived at 0; a JCT of inf means that the job never ended."""
    return FinishedRun(
        figures={},
        arrival_s=np.zeros(len(jct_s)),
        end_s=np.array(jct_s),
        alone_s=np.array(alone_s or [1.0] * len(jct_s)),
        course={},
        gaps=np.zeros((0, 2)),
        node_gpus=[8],
        node_types=["a800"],
        segments=[],
    )


def test_the_mean_jct_covers_the_selected_jobs_that_ended() -> None:
    run = a_finished_run(3600.0, 7200.0, math.inf)

    assert mean_jct_h(run) == 1.5
    assert mean_jct_h(run, np.array([False, True, True])) == 2.0
    assert math.isnan(mean_jct_h(run, np.array([False, False, True])))


def test_the_share_of_short_jobs_is_relative_to_the_total_gain() -> None:
    ours = a_finished_run(100.0, 1000.0, math.inf, alone_s=[50.0, 900.0, 20.0])
    baseline = a_finished_run(400.0, 1100.0, 5.0, alone_s=[50.0, 900.0, 20.0])

    assert short_part(ours, baseline) == 0.75
    assert math.isnan(short_part(ours, ours))


def test_draws_are_taken_together_and_broken_promises_are_added() -> None:
    first, second = a_finished_run(3600.0), a_finished_run(7200.0, 10800.0)
    figures = {"makespan_s": 10.0, "refused": 0.0, "guaranteed": 1.0, "guarantees_broken": 1.0}
    runs = [
        replace(first, figures=figures),
        replace(second, figures=figures | {"makespan_s": 20.0}),
    ]

    pooled = pool_runs(runs)

    assert mean_jct_h(pooled) == 2.0
    assert pooled.figures == figures | {"makespan_s": 15.0, "guaranteed": 2, "guarantees_broken": 2}


def test_promises_are_compared_among_policies_that_know_guaranteed_jobs() -> None:
    owed = {"makespan_s": 1.0, "guaranteed": 4.0}
    runs = {
        "ilp:jct": a_finished_run(100.0, 400.0),
        "morphling": a_finished_run(200.0, 300.0),
        "antman": a_finished_run(150.0, 500.0),
        "srt": a_finished_run(50.0, 100.0),
    }
    kept = {
        name: replace(run, figures=owed | {"guarantees_broken": float(name == "ilp:jct")})
        for name, run in runs.items()
    }
    of = TraceRuns(runs=kept, guaranteed=np.array([True, False]), bound_s=200.0)

    figures = promised_figures(of, "ilp:jct")

    assert figures["guaranteed_jct_gain_vs_best_guarantor"] == pytest.approx(1 - 100 / 150)
    assert figures["best_effort_jct_gain_vs_best_guarantor"] == pytest.approx(1 - 400 / 300)
    assert figures["jct_gain_vs_best_guarantor"] == pytest.approx(0.0)
    assert figures["jct_gain_vs_best_other"] == pytest.approx(1 - 250 / 75)
    assert figures["guarantees_kept"] == 0.75


def test_the_bound_and_the_best_other_policy_are_the_references_of_the_base_trace() -> None:
    runs = {
        name: replace(a_finished_run(jct_s), figures={"makespan_s": 1.0})
        for name, jct_s in (("ilp:jct", 120.0), ("greedy:jct", 60.0), ("srt", 150.0))
    }
    of = TraceRuns(runs=runs, guaranteed=np.array([False]), bound_s=100.0)

    figures = trace_figures(of, "ilp:jct")

    assert figures["jct_over_bound"] == pytest.approx(0.2)
    assert figures["jct_gain_vs_best_other"] == pytest.approx(0.2)
    assert figures["jct_gain_vs_srt"] == pytest.approx(0.2)


def test_rows_have_the_deviation_from_the_paper_where_it_has_a_result() -> None:
    names = ("guarantees_broken", "makespan_s", "restarts", "restart_share", "decide_s")
    run = replace(a_finished_run(3600.0), figures=dict.fromkeys(names, 0.0))
    of = TraceRuns(runs={"morphling": run, "srt": run}, guaranteed=np.array([False]), bound_s=1.0)

    rows = {row["policy"]: row for row in table_of({"morphling-base": of})[:2]}

    assert rows["morphling"]["jct_vs_paper"] == pytest.approx(1 / 0.96 - 1)
    assert math.isnan(float(rows["srt"]["jct_vs_paper"]))


def test_published_results_belong_to_known_traces_and_policies() -> None:
    assert {one.trace for one in KNOWN_RESULTS} == set(TRACES) - {"morphling-quotas"}
    assert {one.policy for one in KNOWN_RESULTS} <= set(registry.scheduler_names())
    assert all(one.jct_h < one.p99_h < one.makespan_h for one in KNOWN_RESULTS)


def test_figures_require_a_policy_of_tessera() -> None:
    with pytest.raises(InvalidInput, match="not ours"):
        run_morphling_traces(ours="fcfs")


def test_without_data_the_case_is_skipped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "none"))

    with pytest.raises(MissingData, match="morphling-base"):
        run_morphling_traces(policies="synergy")
