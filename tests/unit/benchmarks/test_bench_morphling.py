"""Figures of runs in the benchmark of Morphling's traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tessera.benchmarks.papers.bench_morphling import (
    KNOWN_RESULTS,
    TRACES,
    mean_jct_h,
    run_morphling_traces,
    short_part,
    taken_off,
)
from tessera.formulation.errors import InvalidInput
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.data import MissingData
from tessera.solvers.schedulers import registry

Stretch = tuple[str, float, float]


def a_finished_run(
    *jct_s: float, alone_s: Sequence[float] = (), stretches: Sequence[Stretch] = ()
) -> FinishedRun:
    """Return a run of jobs that arrived at 0; a JCT of inf means that the job never ended."""
    return FinishedRun(
        figures={},
        said="",
        arrival_s=np.zeros(len(jct_s)),
        end_s=np.array(jct_s),
        alone_s=np.array(alone_s or [1.0] * len(jct_s)),
        course={},
        gaps=np.zeros((0, 2)),
        node_gpus=[8],
        node_types=["a800"],
        segments=[(job, start_s, end_s, [(0, 1)]) for job, start_s, end_s in stretches],
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


def test_suspended_guaranteed_jobs_are_counted_once_and_moves_are_not_counted() -> None:
    run = a_finished_run(
        30.0,
        30.0,
        30.0,
        stretches=[
            ("0", 20.0, 30.0),
            ("0", 0.0, 5.0),
            ("0", 8.0, 9.0),  # suspended twice
            ("1", 0.0, 10.0),
            ("1", 10.0, 30.0),  # moved
            ("2", 0.0, 1.0),
            ("2", 5.0, 30.0),  # best effort
        ],
    )

    assert taken_off(run, np.array([True, True, False])) == 1
    assert taken_off(run, np.array([True, True, True])) == 2


def test_published_results_belong_to_known_traces_and_policies() -> None:
    assert {one.trace for one in KNOWN_RESULTS} == set(TRACES)
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
