"""Jobs as the command line shows them: lists for people and programs, and all details of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from google.protobuf.duration_pb2 import Duration

from tessera.formulation.records.forecasts import Band, JobForecast
from tessera.service.cli import render
from tessera.service.cli.jobs.forecastview import STALE_S, band_span, forecast_facts, listed_band
from tessera.service.cli.jobs.jobview import job_columns, print_warnings, show_job, show_jobs
from tessera.service.cli.jobs.workflow import fold_arrays
from tessera.service.cli.options import Output
from tessera.service.server.convert.jobs import of_forecast
from tessera.v1 import estimates_pb2, jobs_pb2, launch_pb2
from tests.support.launches import WHOLE_MESSAGE
from tests.support.shown import (
    NOW,
    a_running_job,
    a_shown_job,
    a_waiting_job,
    later,
    some_array_jobs,
)

Capture = pytest.CaptureFixture[str]
Details = Callable[[jobs_pb2.Job], str]


def list_text(capsys: Capture, output: Output, *jobs: jobs_pb2.Job, expand: bool = True) -> str:
    show_jobs(jobs, NOW, output, expand=expand)
    return capsys.readouterr().out


@pytest.fixture
def details(capsys: Capture) -> Details:
    """Return a function that returns the details of a job, with single spaces."""

    def show(job: jobs_pb2.Job) -> str:
        show_job(job, NOW)
        return " ".join(capsys.readouterr().out.split())

    return show


def test_a_table_of_jobs_shows_placements_and_waiting_reasons(capsys: Capture) -> None:
    table = list_text(capsys, Output.TABLE, a_running_job(), a_waiting_job())
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "JOB STATE MODEL REQUESTED RUNS ON DONE % AGE REASON",
        "runs RUNNING bert/1.3B/256 8 8 x a100, pp 2 37.2 3m20s",
        "waits QUEUED bert/1.3B/256 8 0.0 3m20s OUTPRICED",
    ]


def test_a_wide_table_adds_columns_and_shows_long_texts_and_markup_as_they_are(
    capsys: Capture,
) -> None:
    tenant = f"[red]{'t' * 300}[/red] :smile:"
    table = list_text(capsys, Output.WIDE, a_waiting_job("x" * 100, tenant=tenant))
    head, row = table.splitlines()
    for title in ("TENANT", "PRIORITY", "WEIGHT", "DEADLINE", "NEXT STEP"):
        assert title in head
    assert "x" * 100 in row
    assert tenant in row
    assert row.rstrip().endswith("raise its weight")


def test_json_is_proto_json_with_proto_field_names_and_yaml_and_names_say_the_same(
    capsys: Capture,
) -> None:
    jobs = (a_running_job(), a_waiting_job())
    output = json.loads(list_text(capsys, Output.JSON, *jobs))
    assert list(output) == ["jobs", "next_page_token"]
    running = output["jobs"][0]
    assert (running["state"], running["requested_gpus"]) == ("RUNNING", 8)
    assert running["iterations_done"] == 372.6
    assert running["allocation"]["shares"][1]["gpu_indices"] == [0, 1, 2, 6]
    assert running["retries"] == 0  # zeros are included
    assert yaml.safe_load(list_text(capsys, Output.YAML, *jobs)) == output
    assert list_text(capsys, Output.NAME, a_running_job()) == "clusters/c/jobs/runs\n"
    assert json.loads(list_text(capsys, Output.JSON))["jobs"] == []
    assert list_text(capsys, Output.TABLE) == ""


def test_an_array_is_one_line_of_a_list_for_people_and_programs_see_every_job(
    capsys: Capture,
) -> None:
    members = some_array_jobs("RRQQ")
    for member in members[:2]:
        member.iterations_done = 500.0
    jobs = [a_shown_job("alone"), *members]
    folded = fold_arrays(jobs)
    assert [job.name for job in folded.jobs] == ["clusters/c/jobs/alone", "clusters/c/arrays/sweep"]
    assert folded.states == {"clusters/c/arrays/sweep": "2 RUNNING, 2 QUEUED"}
    assert (folded.jobs[1].iterations, folded.jobs[1].iterations_done) == (4000, 1000.0)
    assert len(list_text(capsys, Output.NAME, *jobs, expand=False).splitlines()) == 5
    assert "2 RUNNING, 2 QUEUED" in list_text(capsys, Output.TABLE, *jobs, expand=False)
    assert "sweep.3" in list_text(capsys, Output.TABLE, *jobs)


def test_a_waiting_job_shows_why_and_a_rejected_one_that_reason_once(details: Details) -> None:
    text = details(a_waiting_job())
    assert "8 GPUs of any type" in text
    assert "why it waits OUTPRICED: worth 0.5, costs 0.7 (round 12)" in text
    assert "price: 0.7; value: 0.5" in text
    assert "raise its weight" in text
    rejected = a_waiting_job(state=jobs_pb2.REJECTED, last_error="worth 0.5, costs 0.7")
    text = details(rejected)
    assert "why rejected" in text
    assert "why it waits" not in text
    assert "last error" not in text


def test_a_waiting_job_shows_its_planned_and_its_promised_start(details: Details) -> None:
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2)
    start = jobs_pb2.PlannedStart(start_time=later(5400), cell=cell)
    text = details(a_waiting_job(start_by=later(7200), planned_start=start))
    assert "planned start 2027-01-15T09:30:00Z (in 1h30m) on 8 x a100, pp 2" in text
    assert "promised start by 2027-01-15T10:00:00Z (in 2h)" in text
    late_text = details(a_waiting_job(start_by=later(-60)))
    assert "promised start by 2027-01-15T07:59:00Z (1m ago)" in late_text
    for absent in ("planned start", "promised start"):
        assert absent not in details(a_waiting_job())


def test_a_running_job_shows_its_gpus_and_the_time_of_an_iteration(details: Details) -> None:
    running = a_running_job(deadline=later(100))
    text = details(running)
    assert "n0 GPU 0-3; n1 GPU 0-2,6" in text
    assert "37.2 % (372.6 of 1,000 iterations)" in text
    for absent in ("why it waits", " s, measured", "GPU types", "node selector", "longest run"):
        assert absent not in text
    held = running.allocation
    held.iter_time_s, held.iter_time_source = 2.5, estimates_pb2.MEASURED
    assert "2.5 s, measured" in details(running)
    held.iter_time_source = estimates_pb2.REPLAYED
    assert "2.5 s, replayed: nothing is trained" in details(running)
    held.rate = 0.0
    text = details(running)
    assert "rate unknown, as nothing is known of its model" in text
    assert "not promised, because the job's rate is unknown" in text


def test_a_job_shows_where_it_may_run_and_for_how_long(details: Details) -> None:
    text = details(
        a_shown_job(
            requested_gpu_type="a100",
            pinned_gpu_type=True,
            avoid_nodes=["clusters/c/nodes/n7"],
            allowed_gpu_types=["h100", "a100"],
            node_selector="zone=a",
            preferred_labels="rack!=b",
            longest_run=Duration(seconds=7200),
            run_seconds=3600.0,
            preemptible=True,
            opportunistic=True,
            service_gpu_seconds=7200.0,
        )
    )
    for part in (
        "8 x a100, pinned to the type",
        "preemptible yes",
        "avoids n7",
        "GPU types h100, a100",
        "node selector zone=a",
        "prefers nodes with rack!=b",
        "longest run 2h in total, of which it has run 1h",
        "2 GPU-hours, started ahead of a blocked job",
    ):
        assert part in text


def test_a_job_shows_its_failures_and_whether_it_is_tried_again(details: Details) -> None:
    again = "; the job is tried again"
    text = details(a_shown_job(retries=2, last_error="boom"))
    assert f"failures 2{again} up to 3 times" in text
    assert "last error boom" in text
    assert f"failures 1{again} once" in details(a_shown_job(retries=1, max_retries=1))
    never = "1; the job is not tried again (max_retries is 0)"
    assert never in details(a_shown_job(retries=1, max_retries=0))
    text = details(a_shown_job(state=jobs_pb2.FAILED, end_time=NOW, retries=4))
    assert "failures 4" in text
    assert "tried again" not in text


def test_a_job_shows_what_its_program_has_reported(details: Details) -> None:
    def trained(**training: Any) -> str:
        return details(a_running_job(training=jobs_pb2.Training(**training)))

    text = trained(
        loss=2.31,
        memory_bytes=3 * 2**29,
        checkpoint_iterations=400,
        checkpoint_time=later(-35),
        remark="it was passed over",
    )
    assert "loss 2.31, 1.5 GiB of GPU memory, checkpoint of iteration 400, 35s old" in text
    assert "remark it was passed over" in text
    zeros = trained(loss=0.0, checkpoint_iterations=0.0)
    assert "loss 0, checkpoint of iteration 0" in zeros
    times = launch_pb2.RestartTimes(stop_s=6, launch_s=20, first_iteration_s=15)
    parts = "the last start: stop 6 s, launch 20 s, first iteration 15 s"
    known = trained(restart_times=times, restart_seconds=41.0)
    assert f"restart costs 41 s, measured ({parts})" in known
    assert f"restart not measured yet ({parts})" in trained(restart_times=times)
    failed = trained(exit_reason=launch_pb2.EXIT_OUT_OF_MEMORY)
    assert "last failure it ran out of memory" in failed
    of_a_later_release = jobs_pb2.Training.FromString(b"\x38\x63")  # the reason 99
    for training in (jobs_pb2.Training(), of_a_later_release):
        assert "last failure" not in details(a_running_job(training=training))


def a_job_until_exit(done: float) -> jobs_pb2.Job:
    launch = launch_pb2.Launch(runtime="command", until_exit=True)
    return a_shown_job(state=jobs_pb2.SUCCEEDED, iterations_done=done, launch=launch)


def test_the_shown_count_of_iterations_is_the_reported_one(details: Details) -> None:
    text = details(a_job_until_exit(30.0))
    assert "30 iterations (1,000 expected)" in text
    assert "done when its program exits with status 0" in text
    assert "no iterations reported (1,000 expected)" in details(a_job_until_exit(0.0))


@pytest.mark.parametrize(
    ("job", "percent"),
    [
        (a_shown_job(iterations_done=999.9), "99.9"),
        (a_shown_job(iterations_done=1000.0), "100.0"),
        (a_job_until_exit(30.0), "3.0"),
        (a_job_until_exit(1200.0), "100.0"),
        (a_job_until_exit(0.0), "-"),
    ],
)
def test_a_list_shows_the_share_of_iterations_that_is_done(job: jobs_pb2.Job, percent: str) -> None:
    (column,) = (column for column in job_columns([job], NOW) if column.title == "DONE %")
    assert column.value(job) == percent
    assert render.format_percent(1, 0) == ""


def test_a_job_shows_what_was_stated_of_its_program(details: Details) -> None:
    job = a_shown_job(command=["train.py", "--name", "a b"], launch=WHOLE_MESSAGE)
    job.launch.env["LONG"] = "x" * 1000
    job.launch.env["URL"] = "postgresql://ana:" + "pass" + "@host/db"
    text = details(job)
    for fact in (
        "runtime torchrun",
        "command train.py --name 'a b'",
        f"env EMPTY='', GREETING='a b=ü', LONG={80 * 'x'}..., NCCL_DEBUG=INFO,"
        " URL='postgresql://ana:***" + "@host/db'",
        "secrets WANDB_API_KEY from wandb",
        "starts in /srv/train",
        "staging cp -r '/data/a b' /scratch",
        "runs as ana",
        f"progress pattern {WHOLE_MESSAGE.progress_pattern}",
        "stall limit 30m stop grace 1m30s",
    ):
        assert fact in text
    bare = details(a_shown_job(launch=launch_pb2.Launch(runtime="replay")))
    assert "runtime replay" in bare
    for name in ("command", "env", "secrets", "starts in", "stall limit", "runs as"):
        assert name not in bare


def test_each_warning_is_printed_to_stderr_once(capsys: Capture) -> None:
    jobs = [a_shown_job(name, warnings=["mind the deadline"]) for name in "ab"]
    print_warnings(jobs[:1])
    assert capsys.readouterr() == ("", "warning: mind the deadline\n")
    print_warnings([*jobs, a_shown_job("c")])
    assert capsys.readouterr() == ("", "warning: 2 jobs: mind the deadline\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (59, "59s"),
        (60, "1m"),
        (200, "3m20s"),
        (7260, "2h1m"),
        (86400, "1d"),
        (90000, "1d1h"),
        (20 * 86400 + 3600, "20d"),
    ],
)
def test_spans_have_at_most_two_units(seconds: float, text: str) -> None:
    assert render.format_span(seconds) == text


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 7], "0,2-3,7")]
)
def test_gpu_indices_are_shown_as_ranges(values: list[int], text: str) -> None:
    assert render.format_indices(values) == text


def a_forecast_job(created_s: float = -60.0) -> jobs_pb2.Job:
    """Return a waiting job that starts in 10 to 90 minutes, and whose finish is too far away."""
    now_s = float(NOW.seconds)
    forecast = JobForecast(
        job="a",
        created_s=now_s + created_s,
        coverage=0.8,
        position=3,
        start=Band(low_s=now_s + 600.0, median_s=now_s + 1800.0, high_s=now_s + 5400.0),
        finish=Band(low_s=now_s + 86_400.0, median_s=math.inf, high_s=math.inf),
    )
    return jobs_pb2.Job(name="clusters/c/jobs/a", forecast=of_forecast(forecast))


def test_a_forecast_states_spans_times_and_coverage() -> None:
    job = a_forecast_job()
    assert not job.forecast.finish.HasField("median")
    assert dict(forecast_facts(job, NOW)) == {
        "position": "3, by expected start",
        "starts": "in 10m-1h30m: 2027-01-15T08:10:00Z to 2027-01-15T09:30:00Z (80%)",
        "finishes": "after 1d: not before 2027-01-16T08:00:00Z (90%)",
        "forecast": "made 1m ago",
    }
    assert band_span(job.forecast.start, later(1200)) == "0s-1h10m"
    titles = {column.title for column in job_columns([job], NOW)}
    assert titles - {column.title for column in job_columns([jobs_pb2.Job()], NOW)} == {
        "POSITION",
        "STARTS IN",
        "FINISHES IN",
    }


def test_a_stale_forecast_and_one_without_bands_are_shown_as_such() -> None:
    stale = a_forecast_job(created_s=-STALE_S - 60.0)
    assert listed_band(stale, "start", NOW) == "10m-1h30m, 16m old"
    assert "out of date" in dict(forecast_facts(stale, NOW))["forecast"]
    forecast = JobForecast(job="a", created_s=NOW.seconds, coverage=0.8, why_not="nobody knows")
    job = jobs_pb2.Job(forecast=of_forecast(forecast))
    facts = {name: text for name, text in forecast_facts(job, NOW) if text}
    assert facts == {"forecast": "none: nobody knows"}
    assert listed_band(job, "finish", NOW) == ""
