"""The judgement of schedulers: promised starts, forecasts, what-ifs and published results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tessera.benchmarks.schedulers.bench_eta import (
    JudgedBands,
    band_ratio,
    judge_run,
    narrowest_offsets_s,
)
from tessera.benchmarks.schedulers.bench_liveness import liveness_figures, stream_rows
from tessera.benchmarks.schedulers.bench_what_if import JudgedChange, describe_changes
from tessera.benchmarks.schedulers.foretold import ForetoldEvent
from tessera.benchmarks.schedulers.server_records import first_start_s, read_holds
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
from tessera.benchmarks.schedulers.supposed_worlds import (
    Chance,
    Supposed,
    SupposedWorlds,
    draw_chance,
    draw_ends,
)
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.values import Cell, EstimateSource
from tessera.formulation.job.lifecycle import JobEvent, JobState, advance_state
from tessera.formulation.records.forecasts import FINISH, START
from tessera.formulation.records.jobs import JobEventRecord
from tessera.formulation.records.spreads import Spread
from tessera.formulation.state.snapshot import Snapshot
from tessera.simulator.comparison.runs import FinishedRun
from tessera.simulator.comparison.workload import SYNTHETIC, WorkloadSpec, make_scenario
from tessera.simulator.data import MissingData
from tessera.simulator.log import Segment
from tessera.simulator.measured_times import MEASURED_ITERATIONS
from tessera.simulator.run import Result
from tessera.simulator.scenario import EPOCH_S
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers import registry

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


HORIZON_S = 10_000.0


def an_event(made_s: float, after_s: float, *times_s: float, event: str = FINISH) -> ForetoldEvent:
    return ForetoldEvent(
        event=event, made_s=made_s, job="a", spread=Spread(times_s), after_s=after_s
    )


def test_the_narrowest_offsets_hold_the_share_and_no_less() -> None:
    times_s = np.array([0.0, 10.0, 11.0, 12.0, 50.0])
    assert narrowest_offsets_s(times_s, 0.6) == 2.0
    assert narrowest_offsets_s(times_s, 0.61) == 12.0
    assert narrowest_offsets_s(times_s, 1.0) == 50.0


def test_a_ratio_compares_with_offsets_from_the_forecast_or_from_its_medians() -> None:
    bands = JudgedBands.of([(90.0, 100.0, 110.0, 95.0), (990.0, 1_000.0, 1_010.0, 1_005.0)])
    assert band_ratio([bands], around_medians=False) == pytest.approx(20.0 / 910.0)
    assert band_ratio([bands], around_medians=True) == pytest.approx(20.0 / 10.0)


def test_later_events_do_not_change_earlier_bands() -> None:
    early = [an_event(0.0, 500.0, 400.0, 600.0), an_event(1_000.0, 700.0, 600.0, 800.0)]
    late = [an_event(2_000.0, 9_000.0, 100.0, 200.0)]
    alone = judge_run(early, HORIZON_S)[FINISH]
    together = judge_run(early + late, HORIZON_S)[FINISH]
    assert together.low_s[:2].tolist() == alone.low_s.tolist()
    assert together.high_s[:2].tolist() == alone.high_s.tolist()


def test_what_has_not_happened_by_a_forecast_is_not_known_to_it() -> None:
    """Whether the first event happens 3,000 s or 8,000 s on, the second forecast knows the same."""
    second = an_event(1_000.0, 700.0, 600.0, 800.0)
    bands = [
        judge_run([an_event(0.0, after_s, 400.0, 600.0), second], HORIZON_S)[FINISH]
        for after_s in (3_000.0, 8_000.0, math.inf)
    ]
    assert len({(band.low_s[1], band.high_s[1]) for band in bands}) == 1


def test_earlier_misses_make_bands_wider() -> None:
    second = an_event(9_000.0, 700.0, 600.0, 800.0)
    width_s = [
        judge_run([an_event(0.0, after_s, 400.0, 600.0)] * 300 + [second], HORIZON_S)[FINISH]
        .width_s[-1]
        .item()
        for after_s in (500.0, 1_500.0)
    ]
    assert width_s[1] > 2 * width_s[0]


def test_bands_that_end_beyond_the_horizon_are_not_judged() -> None:
    judged = judge_run([an_event(0.0, math.inf, HORIZON_S, HORIZON_S)], HORIZON_S)
    assert len(judged[FINISH]) == 0
    assert len(judged[START]) == 0


def a_change(
    foretold: float,
    *changes: float,
    measure: str = "work",
    before: float = 100.0,
    **more: float,
) -> JudgedChange:
    values = {"low": foretold - 1.0, "high": foretold + 1.0} | more
    happened = tuple((before, before + change) for change in changes)
    return JudgedChange(
        kind="weight", measure=measure, foretold=foretold, happened=happened, **values
    )


def test_a_change_within_noise_is_not_judged_but_counted() -> None:
    figures = describe_changes([a_change(10.0, 11.0), a_change(9.0, 1.9), a_change(-1.0, -1.9)])
    assert figures["noise_share"] == pytest.approx(2 / 3)
    assert figures["calm_share"] == 0.5
    assert figures["sign_right"] == 1.0
    assert figures["median_error_of_change"] == pytest.approx(1 / 11)
    assert figures["median_error"] == pytest.approx(1 / 111)
    assert figures["median_error_of_no_change"] == pytest.approx(11 / 111)


def test_the_truth_is_the_mean_of_the_realisations_and_unknown_within_two_standard_errors() -> None:
    known = a_change(10.0, 10.0, 12.0, 14.0)
    assert known.true == 12.0
    assert not known.is_noise
    assert known.once().true == 10.0
    assert a_change(10.0, -20.0, 12.0, 44.0).is_noise


def test_waiting_has_at_least_a_minute_of_noise() -> None:
    assert a_change(0.0, 59.0, measure="wait").is_noise
    assert not a_change(0.0, 61.0, measure="wait").is_noise
    assert a_change(0.0, 61.0, measure="wait", before=10_000.0).is_noise


def test_a_foretold_change_of_nothing_is_wrong_where_something_changed() -> None:
    figures = describe_changes([a_change(0.0, 10.0), a_change(-5.0, 10.0), a_change(5.0, 10.0)])
    assert figures["sign_right"] == pytest.approx(1 / 3)
    assert figures["clear_share"] == pytest.approx(2 / 3)
    assert figures["sign_right_clear"] == 0.5


def test_intervals_cover_a_share_of_the_realisations() -> None:
    figures = describe_changes([a_change(10.0, 9.5, 10.5, 12.0, 13.0)])
    assert figures["covered"] == 0.5


STANDING = RoundOptions(solver="pricing")


def begun() -> tuple[SupposedWorlds, Chance, Result, Snapshot]:
    work = WorkloadSpec(trace=SYNTHETIC, gpus_share=0.05, jobs=16, load=2.5, rounds=10**6, seed=3)
    scenario = make_scenario(work).scenario
    names = [one.spec.name for one in scenario.arrivals]
    own = Chance(arrivals=scenario.arrivals, early=draw_ends(names, 0.25, np.random.default_rng(1)))
    worlds = SupposedWorlds(
        scenario=scenario,
        standing=STANDING,
        error=0.1,
        at_s=0.5 * scenario.arrivals[-1].arrival_s,
        horizon_s=600.0,
    )
    return worlds, own, *worlds.begin(own)


def test_realisations_share_the_past_and_a_change_of_nothing_changes_nothing() -> None:
    worlds, own, before, snapshot = begun()
    now_s = snapshot.now_s - EPOCH_S
    same = worlds.follow(own, Supposed(options=STANDING))
    assert same.segments == before.segments
    other = draw_chance(own, snapshot, 0.25, np.random.default_rng(5))
    assert sorted(one.spec.name for one in other.arrivals) == sorted(
        one.spec.name for one in own.arrivals
    )
    assert [one.arrival_s for one in other.arrivals] == sorted(
        one.arrival_s for one in other.arrivals
    )
    assert other.arrivals != own.arrivals
    told = worlds.follow(other)
    past = [
        [(s.job, s.start_s, s.cell) for s in result.segments if s.start_s <= now_s]
        for result in (before, told)
    ]
    assert sorted(past[0]) == sorted(past[1])
    jobs = snapshot.jobs
    for name, left, total in zip(jobs.name, jobs.iterations_left, jobs.iterations, strict=True):
        assert other.early.get(name, 1.0) > 1.0 - left / total


def test_a_time_is_true_once_a_job_has_trained_on_its_cell() -> None:
    worlds, _, _, snapshot = begun()
    estimates, jobs = snapshot.estimates, snapshot.jobs
    measured = estimates.source == int(EstimateSource.MEASURED)
    assert measured.any()
    assert not measured.all()
    true_s = worlds.true_times_s(snapshot)
    assert estimates.iter_time_s[measured] == pytest.approx(true_s[measured])
    runs = np.isfinite(true_s) & ~measured
    assert (true_s[runs] != estimates.iter_time_s[runs]).any()
    began_s = jobs.since_s + jobs.restart_s
    trains = np.flatnonzero((jobs.since_s > 0) & (began_s < snapshot.now_s)).tolist()
    assert trains
    for job in trains:
        cell = [getattr(jobs, name)[job] for name in jobs.CELL]
        own = estimates.workload == jobs.workload[job]
        for name, value in zip(estimates.CELL, cell, strict=True):
            own &= getattr(estimates, name) == value
        known_s = began_s[job] + (MEASURED_ITERATIONS + 1) * true_s[own & np.isfinite(true_s)].max()
        assert measured[own].all() or known_s > snapshot.now_s


def a_history(*events: tuple[JobEvent, float]) -> list[JobEventRecord]:
    """Return the history of a job with these events at these times."""
    state, records = JobState.QUEUED, []
    for event, at_s in events:
        state = advance_state(state, event)
        records.append(JobEventRecord(at_s=at_s, event=event.value, state=state, detail=""))
    return records


def test_a_hold_lasts_until_a_round_or_the_job_itself_ends_it() -> None:
    events = a_history(
        (JobEvent.START, 10.0),
        (JobEvent.RAN, 13.0),
        (JobEvent.SUSPEND, 20.0),
        (JobEvent.GONE, 21.0),
        (JobEvent.START, 30.0),
        (JobEvent.MOVE, 45.0),
        (JobEvent.RAN, 47.0),
        (JobEvent.FINISH, 60.0),
    )
    holds = list(read_holds(events, restart_s=2.0))
    assert [(hold.start_s, hold.ready_s, hold.end_s) for hold in holds] == [
        (10.0, 12.0, 20.0),
        (30.0, 32.0, 45.0),
        (45.0, 47.0, 60.0),
    ]
    assert [hold.is_stopped for hold in holds] == [True, True, False]
    assert [hold.is_short(spacing=4.5) for hold in holds] == [True, False, False]
    assert first_start_s(events) == 10.0


def test_a_hold_that_a_failure_ends_was_not_stopped_by_a_round() -> None:
    events = a_history((JobEvent.START, 0.0), (JobEvent.LOST, 1.0), (JobEvent.GONE, 2.0))
    (hold,) = read_holds(events, restart_s=2.0)
    assert not hold.is_stopped


def test_a_job_that_never_started_has_no_hold_and_no_start() -> None:
    events = a_history((JobEvent.HOLD, 0.0), (JobEvent.CANCEL, 1.0))
    assert list(read_holds(events, restart_s=2.0)) == []
    assert first_start_s(events) == float("inf")


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
