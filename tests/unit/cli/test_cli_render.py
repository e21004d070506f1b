"""The output of the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from google.protobuf.timestamp_pb2 import Timestamp

from tessera.service.cli import render
from tessera.service.cli.jobview import job_columns, print_warnings, show_job
from tessera.service.cli.options import Output
from tessera.service.cli.roundview import show_round
from tessera.v1 import estimates_pb2, jobs_pb2, launch_pb2, scheduler_pb2

NOW = Timestamp(seconds=1_800_000_000)


def a_job(name: str = "j", **fields: object) -> jobs_pb2.Job:
    job = jobs_pb2.Job(
        name=f"clusters/c/jobs/{name}",
        iterations=1000,
        requested_gpus=8,
        tenant="nlp",
        workload=estimates_pb2.Workload(model="bert", params="1.3B", global_batch=256),
        state=jobs_pb2.QUEUED,
        create_time=Timestamp(seconds=NOW.seconds - 200),
        weight=1.0,
        priority=1,
        max_retries=3,
    )
    job.MergeFrom(jobs_pb2.Job(**fields))  # type: ignore[arg-type] # a test may set any field
    return job


def a_running_job() -> jobs_pb2.Job:
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2)
    shares = [
        jobs_pb2.NodeShare(node="clusters/c/nodes/n0", gpu_indices=[0, 1, 2, 3]),
        jobs_pb2.NodeShare(node="clusters/c/nodes/n1", gpu_indices=[0, 1, 2, 6]),
    ]
    return a_job(
        "runs",
        state=jobs_pb2.RUNNING,
        iterations_done=372.6,
        allocation=jobs_pb2.Allocation(cell=cell, rate=123.4, shares=shares),
    )


def a_waiting_job() -> jobs_pb2.Job:
    reason = jobs_pb2.Reason(
        code="OUTPRICED",
        message="worth 0.5, costs 0.7",
        next_step="raise its weight",
        evidence={"value": "0.5", "price": "0.7"},
        round="clusters/c/rounds/12",
    )
    return a_job("waits", reason=reason)


def show_jobs(output: Output, capsys: pytest.CaptureFixture[str], *jobs: jobs_pb2.Job) -> str:
    response = jobs_pb2.ListJobsResponse(jobs=jobs)
    render.show_list(response, jobs, job_columns(jobs, NOW), output)
    return capsys.readouterr().out


def test_a_table_of_jobs_shows_placements_and_waiting_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, runs, waits = show_jobs(
        Output.TABLE, capsys, a_running_job(), a_waiting_job()
    ).splitlines()
    assert head.split("  ")[0] == "JOB"
    assert head.split() == [
        "JOB",
        "STATE",
        "MODEL",
        "REQUESTED",
        "RUNS",
        "ON",
        "DONE",
        "%",
        "AGE",
        "REASON",
    ]
    expected = [
        "runs",
        "RUNNING",
        "bert/1.3B/256",
        "8",
        "8",
        "x",
        "a100,",
        "pp",
        "2",
        "37.2",
        "3m20s",
    ]
    assert runs.split() == expected
    assert waits.split() == ["waits", "QUEUED", "bert/1.3B/256", "8", "0.0", "3m20s", "OUTPRICED"]


def test_a_wide_table_adds_tenant_priority_weight_deadline_and_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, waits = show_jobs(Output.WIDE, capsys, a_waiting_job()).splitlines()
    for title in ("TENANT", "PRIORITY", "WEIGHT", "DEADLINE", "NEXT STEP"):
        assert title in head
    assert waits.rstrip().endswith("raise its weight")


def test_json_is_proto_json_with_proto_field_names_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = json.loads(show_jobs(Output.JSON, capsys, a_running_job()))
    assert list(output) == ["jobs", "next_page_token"]
    (job,) = output["jobs"]
    assert job["state"] == "RUNNING"
    assert job["requested_gpus"] == 8
    assert job["iterations_done"] == 372.6
    assert job["allocation"]["shares"][1]["gpu_indices"] == [0, 1, 2, 6]
    assert job["retries"] == 0  # zeros are included


def test_an_empty_list_is_still_valid_json_but_no_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert json.loads(show_jobs(Output.JSON, capsys))["jobs"] == []
    assert show_jobs(Output.TABLE, capsys) == ""


def test_yaml_has_the_same_content_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = (a_running_job(), a_waiting_job())
    as_yaml = yaml.safe_load(show_jobs(Output.YAML, capsys, *jobs))
    assert as_yaml == json.loads(show_jobs(Output.JSON, capsys, *jobs))


def test_names_are_full_resource_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_jobs(Output.NAME, capsys, a_running_job()) == "clusters/c/jobs/runs\n"


def test_names_that_look_like_markup_are_printed_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "[red]x[/red] :smile:" in show_jobs(
        Output.WIDE, capsys, a_job(tenant="[red]x[/red] :smile:")
    )


def test_long_values_are_never_cut_or_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    printed = show_jobs(Output.WIDE, capsys, a_job("x" * 100, tenant="t" * 300))
    assert len(printed.splitlines()) == 2
    assert "x" * 100 in printed
    assert "t" * 300 in printed


def test_a_waiting_job_is_shown_with_its_reason_evidence_and_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_job(a_waiting_job(), NOW)
    printed = capsys.readouterr().out
    assert "OUTPRICED: worth 0.5, costs 0.7 (round 12)" in printed
    assert "price: 0.7; value: 0.5" in printed
    assert "raise its weight" in printed
    assert "8 GPUs of any type" in printed


def test_a_rejected_job_is_shown_with_its_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    rejected = a_waiting_job()
    rejected.state, rejected.last_error = jobs_pb2.REJECTED, rejected.reason.message
    show_job(rejected, NOW)
    printed = capsys.readouterr().out
    assert "why rejected" in printed
    assert "why it waits" not in printed
    assert "last error" not in printed


@pytest.mark.parametrize(("most", "shown"), [(0, True), (3, True), (-1, False)])
def test_a_round_says_how_many_changes_were_allowed(
    most: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = scheduler_pb2.RoundOptions(objective="throughput", max_changes=most)
    show_round(scheduler_pb2.Round(name="r", options=options), everything=False, wide=False)
    assert (f"throughput; maximum changes {most}" in capsys.readouterr().out) == shown


def test_a_running_job_is_shown_with_its_gpus_and_no_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_job(a_running_job(), NOW)
    printed = capsys.readouterr().out
    assert "n0 GPU 0-3; n1 GPU 0-2,6" in printed
    assert "37.2 % (372.6 of 1,000 iterations)" in printed
    assert "why it waits" not in printed


def test_a_round_hides_decisions_that_change_nothing_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = scheduler_pb2.Round(
        name="clusters/c/rounds/3",
        status="optimal",
        outcome="committed",
        objective=2.5,
        bound=2.5,
        decisions=[
            scheduler_pb2.Decision(job="clusters/c/jobs/new", kind="start"),
            scheduler_pb2.Decision(job="clusters/c/jobs/old", kind="keep"),
        ],
    )
    show_round(record, everything=False, wide=False)
    shown = capsys.readouterr()
    assert "new" in shown.out
    assert "old" not in shown.out
    assert "1 keep" in shown.err
    show_round(record, everything=True, wide=False)
    assert "old" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (200, "3m20s"),
        (900, "15m"),
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


def test_a_job_is_shown_as_100_percent_done_only_when_it_has_ended() -> None:
    assert render.format_percent(999.9, 1000) == "99.9"
    assert render.format_percent(1000, 1000) == "100.0"
    assert render.format_percent(1, 0) == ""


@pytest.mark.parametrize(
    ("retries", "max_retries", "message"),
    [
        (1, 0, "1; the job is not tried again (max_retries is 0)"),
        (1, 1, "1; the job is tried again once"),
        (2, 3, "2; the job is tried again up to 3 times"),
    ],
)
def test_a_failed_job_shows_its_retries_and_whether_it_is_retried_again(
    capsys: pytest.CaptureFixture[str], retries: int, max_retries: int, message: str
) -> None:
    show_job(a_job(retries=retries, max_retries=max_retries), NOW)
    shown = capsys.readouterr().out
    assert message in shown
    assert " of " not in shown.partition("failures")[2]


def test_a_job_that_has_failed_for_good_is_not_shown_as_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_job(a_job(state=jobs_pb2.FAILED, end_time=NOW, retries=4), NOW)
    shown = capsys.readouterr().out
    assert "failures" in shown
    assert "tried again" not in shown


def test_a_job_in_back_off_shows_when_it_is_retried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = (
        "the job failed 2 times in a row, the last time with: boom; it will be tried again at"
        " 2027-01-15T08:01:00Z"
    )
    reason = jobs_pb2.Reason(code="BACK_OFF", message=message, next_step="see its last error")
    show_job(a_job(reason=reason, retries=2, last_error="boom"), NOW)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"why it waits BACK_OFF: {message}" in shown
    assert "last error boom" in shown


def test_each_warning_is_printed_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        a_job("a", warnings=["mind the deadline"]),
        a_job("b", warnings=["mind the deadline"]),
    )
    print_warnings([first])
    assert capsys.readouterr() == ("", "warning: mind the deadline\n")
    print_warnings([first, second, a_job("c")])
    assert capsys.readouterr() == ("", "warning: 2 jobs: mind the deadline\n")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (estimates_pb2.MEASURED, "2.5 s, measured"),
        (estimates_pb2.REPLAYED, "2.5 s, replayed: nothing is trained"),
    ],
)
def test_a_job_shows_the_time_of_an_iteration_and_if_it_was_only_replayed(
    source: estimates_pb2.EstimateSource.ValueType,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = a_running_job()
    show_job(runs, NOW)
    assert " s, measured" not in capsys.readouterr().out
    runs.allocation.iter_time_s, runs.allocation.iter_time_source = 2.5, source
    show_job(runs, NOW)
    assert shown in " ".join(capsys.readouterr().out.split())


def test_a_job_of_unknown_rate_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    runs = a_running_job()
    runs.allocation.rate = 0.0
    runs.deadline.FromSeconds(NOW.seconds + 100)
    assert "8 x a100, pp 2, unknown rate" in show_jobs(Output.TABLE, capsys, runs)
    show_job(runs, NOW)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rate unknown, as nothing is known of its model" in shown
    assert "not promised, because the job's rate is unknown" in shown


def shown_training(capsys: pytest.CaptureFixture[str], **fields: Any) -> str:
    """Return the view of a job whose program reported these facts."""
    runs = a_running_job()
    runs.training.MergeFrom(jobs_pb2.Training(**fields))
    show_job(runs, NOW)
    return " ".join(capsys.readouterr().out.split())


def test_a_job_shows_its_loss_memory_and_newest_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown_training(
        capsys,
        loss=2.31,
        memory_bytes=3 * 2**29,
        checkpoint_iterations=400,
        checkpoint_time=Timestamp(seconds=NOW.seconds - 35),
        remark="the checkpoint of iteration 405 was passed over",
    )
    assert "training loss 2.31, 1.5 GiB of GPU memory, checkpoint of iteration 400, 35s old" in text
    assert "remark the checkpoint of iteration 405 was passed over" in text
    assert "loss 0, checkpoint of iteration 0" in shown_training(
        capsys, loss=0.0, checkpoint_iterations=0.0
    )


def test_a_job_shows_the_measured_cost_of_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    times = launch_pb2.RestartTimes(stop_s=6, launch_s=20, first_iteration_s=15)
    parts = "the last start: stop 6 s, launch 20 s, first iteration 15 s"
    text = shown_training(capsys, restart_times=times, restart_seconds=41.0)
    assert f"restart costs 41 s, measured ({parts})" in text
    assert f"restart not measured yet ({parts})" in shown_training(capsys, restart_times=times)


def test_a_job_shows_why_it_failed_last_if_that_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown_training(capsys, exit_reason=launch_pb2.EXIT_OUT_OF_MEMORY)
    assert "last failure it ran out of memory" in text
    later = jobs_pb2.Training.FromString(b"\x38\x63")  # reason 99, of a later release
    for training in (jobs_pb2.Training(), later):
        runs = a_running_job()
        runs.training.MergeFrom(training)
        show_job(runs, NOW)
        assert "last failure" not in capsys.readouterr().out
