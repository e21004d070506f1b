"""What the benchmark of Morphling's traces says of runs."""

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


def a_ran(
    *jct_s: float, alone_s: Sequence[float] = (), stretches: Sequence[Stretch] = ()
) -> FinishedRun:
    """Return a run of jobs that arrived at 0; inf: it never ended."""
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


def test_mean_jct_is_of_the_jobs_that_ended_and_are_asked_for() -> None:
    ran = a_ran(3600.0, 7200.0, math.inf)

    assert mean_jct_h(ran) == 1.5
    assert mean_jct_h(ran, np.array([False, True, True])) == 2.0
    assert math.isnan(mean_jct_h(ran, np.array([False, False, True])))


def test_the_part_of_short_jobs_is_of_what_is_gained_in_all() -> None:
    ours = a_ran(100.0, 1000.0, math.inf, alone_s=[50.0, 900.0, 20.0])
    baseline = a_ran(400.0, 1100.0, 5.0, alone_s=[50.0, 900.0, 20.0])

    assert short_part(ours, baseline) == 0.75
    assert math.isnan(short_part(ours, ours))


def test_guaranteed_jobs_that_were_suspended_are_counted_once_and_moves_are_not() -> None:
    ran = a_ran(
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

    assert taken_off(ran, np.array([True, True, False])) == 1
    assert taken_off(ran, np.array([True, True, True])) == 2


def test_what_was_published_is_of_traces_and_policies_that_there_are() -> None:
    assert {one.trace for one in KNOWN_RESULTS} == set(TRACES)
    assert {one.policy for one in KNOWN_RESULTS} <= set(registry.scheduler_names())
    assert all(one.jct_h < one.p99_h < one.makespan_h for one in KNOWN_RESULTS)


def test_figures_are_of_a_policy_of_ours() -> None:
    with pytest.raises(InvalidInput, match="not ours"):
        run_morphling_traces(ours="fcfs")


def test_without_data_the_case_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "none"))

    with pytest.raises(MissingData, match="morphling-base"):
        run_morphling_traces(policies="synergy")
