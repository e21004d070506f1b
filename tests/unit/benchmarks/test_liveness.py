"""The judgement of promised starts and restarts in streams of jobs, and the streams themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tessera.benchmarks.schedulers.bench_liveness import liveness_figures, stream_rows
from tessera.benchmarks.schedulers.stream_kinds import STREAMS, draw_stream
from tessera.benchmarks.schedulers.stream_runs import (
    GpuHold,
    StreamRequest,
    StreamRun,
    merge_segments,
    restart_share,
    run_stream,
)
from tessera.benchmarks.schedulers.streams import SPACING_S
from tessera.formulation.base.values import Cell
from tessera.simulator.log import Segment

JOB = {"first_round": 0.0, "start": 0.0, "promise": math.inf, "end": 1000.0, "state": "succeeded"}


def a_run(*jobs: dict[str, Any], **fields: Any) -> StreamRun:
    """Return a run of jobs that arrive at time 0; each has what differs from ``JOB``."""
    rows = [JOB | job for job in jobs]
    values: dict[str, Any] = {
        "names": [f"j{i}" for i in range(len(rows))],
        "arrival_s": [0.0] * len(rows),
        "first_round_s": [row["first_round"] for row in rows],
        "start_s": [row["start"] for row in rows],
        "promise_s": [row["promise"] for row in rows],
        "planned_s": [row.get("planned", row["start"]) for row in rows],
        "end_s": [row["end"] for row in rows],
        "state": [row["state"] for row in rows],
        "exact": True,
        "forces": False,
        "refused_rounds": 0,
        "is_stuck": False,
        "ended_s": 5000.0,
        "spacing": 0.0,
        "short_starts": 0,
        "restarts": 0,
        "restart_share": 0.0,
        "utilisation": 0.5,
        "promises_broken": 0,
        "has_deadline": [row.get("has_deadline", False) for row in rows],
        "decide_s": 0.0,
    }
    return StreamRun(**{**values, **fields})


def a_segment(start_s: float, end_s: float, ended_by: str, ready_s: float | None = None) -> Segment:
    """Return a segment of job 0, whose start takes 100 s unless ``ready_s`` is given."""
    return Segment(
        job=0,
        start_s=start_s,
        ready_s=start_s + 100.0 if ready_s is None else ready_s,
        end_s=end_s,
        cell=Cell(gpu_type="a100", gpus=1, pipeline_degree=1),
        members=((0, (0,)),),
        slowdown=1.0,
        iterations=0.0,
        ended_by=ended_by,
    )


def test_a_start_one_round_after_its_promise_is_in_time_and_a_later_one_is_not() -> None:
    in_time = {"start": 600.0 + SPACING_S, "promise": 600.0}
    too_late = {"start": 601.0 + SPACING_S, "promise": 600.0}
    run = a_run(in_time, too_late)
    assert run.wait_ratios()[0] == 1.0
    assert run.starved_jobs() == ["j1"]
    assert replace(run, exact=False).starved_jobs() == []


def test_a_long_wait_shows_against_the_plan_even_without_a_promise() -> None:
    run = a_run({"start": 600.0, "planned": 70.0}, {"start": 600.0, "planned": math.inf})
    assert run.plan_ratios()[0] == pytest.approx(600.0 / (70.0 + SPACING_S))
    assert math.isnan(run.plan_ratios()[1])


def test_a_wrong_estimate_excuses_three_times_the_promised_wait_and_no_more() -> None:
    run = a_run({"start": 2000.0, "promise": 600.0}, exact=False)
    assert run.starved_jobs() == ["j0"]


def test_a_job_that_never_started_is_starved_unless_it_was_rejected() -> None:
    waiting = {"start": math.inf, "end": math.inf, "state": "queued"}
    run = a_run(waiting, waiting | {"state": "rejected"})
    assert run.starved_jobs() == ["j0"]
    assert (run.unpromised_jobs, run.unfinished_jobs) == (1, 1)


def test_only_a_job_that_had_to_wait_needs_a_promise() -> None:
    late_job = {"first_round": 20.0, "start": 50.0}
    run = a_run({"first_round": 20.0, "start": 20.0}, late_job, late_job | {"has_deadline": True})
    assert run.unpromised_jobs == 1
    assert run.promised_wait_s.tolist() == [20.0, math.inf, math.inf]


def test_a_change_of_speed_does_not_end_a_hold() -> None:
    segments = [
        a_segment(0.0, 300.0, "speed"),
        a_segment(300.0, 500.0, "suspend", ready_s=300.0),
        a_segment(900.0, 2000.0, "finish"),
    ]
    ((job, holds),) = merge_segments(segments)
    assert job == 0
    assert holds == [
        GpuHold(start_s=0.0, ready_s=100.0, end_s=500.0, ended_by="suspend"),
        GpuHold(start_s=900.0, ready_s=1000.0, end_s=2000.0, ended_by="finish"),
    ]
    assert restart_share(holds) == pytest.approx(100.0 / 1600.0)


def test_a_hold_is_short_if_an_optimization_ended_it_before_its_start_paid() -> None:
    hold = GpuHold(start_s=0.0, ready_s=100.0, end_s=500.0, ended_by="resize")
    assert not hold.is_short(4.0)
    assert hold.is_short(5.0)
    assert not replace(hold, ended_by="failure").is_short(5.0)
    assert replace(hold, end_s=50.0).is_short(0.0)


def test_figures_compare_with_rivals_where_these_broke_no_rule() -> None:
    our_run = a_run({"end": 500.0}, {"start": 60.0, "promise": 60.0, "planned": 150.0})
    rival = a_run({}, {"planned": 30.0})
    runs = {
        ("s", 0, "ilp:jct"): our_run,
        ("s", 0, "easy"): rival,
        ("s", 0, "conservative"): rival,
        ("s", 0, "srt"): replace(rival, refused_rounds=1),
    }
    figures = liveness_figures(runs, "ilp:jct")
    assert figures["jct_over_easy"] == pytest.approx(0.75)
    assert figures["promised_wait_over_same_state_worst"] == pytest.approx(60.0 / 105.0)
    assert figures["promised_wait_over_conservative_worst"] == pytest.approx(60.0 / 45.0)
    assert "jct_over_srt" not in figures
    assert [row["policy"] for row in stream_rows(runs)] == [name for _, _, name in runs]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_repeated_by_its_seed_and_has_about_its_number_of_jobs(name: str) -> None:
    stream, next_stream = draw_stream(name, 3, 40), draw_stream(name, 4, 40)
    assert stream.scenario.arrivals == draw_stream(name, 3, 40).scenario.arrivals
    assert stream.scenario.arrivals != next_stream.scenario.arrivals
    assert 36 <= len(stream.scenario.arrivals) <= 40


def test_a_run_of_a_stream_can_be_kept_and_read_again() -> None:
    request = StreamRequest(stream="one-gang", seed=0, jobs=12, policy="conservative")
    run = StreamRun.read(run_stream(**request.task().options))
    assert run.has_ended.all()
    assert run.wait_s == pytest.approx(run.planned_wait_s, abs=2 * SPACING_S)
