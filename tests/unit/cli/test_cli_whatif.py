"""The command that asks what would happen: its request, its refusals and its view."""

from __future__ import annotations

import re

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.service.cli.main import app
from tessera.service.cli.whatifview import describe_effect, show_answer
from tessera.v1 import estimates_pb2, jobs_pb2, what_if_pb2

J = "clusters/c/jobs/"
MADE = Timestamp(seconds=1_800_000_000)


def a_band(first_s: int, last_s: int) -> jobs_pb2.TimeBand:
    made = MADE.seconds
    return jobs_pb2.TimeBand(
        earliest=Timestamp(seconds=made + first_s), latest=Timestamp(seconds=made + last_s)
    )


def an_answer() -> what_if_pb2.WhatIfResponse:
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2)
    waits = what_if_pb2.JobOutlook(kind="wait", reason=jobs_pb2.Reason(code="OUTPRICED"))
    figure = what_if_pb2.PairedFigure(before=1500, after=720, change=-780, low=-1080, high=-540)
    return what_if_pb2.WhatIfResponse(
        made_time=MADE,
        now=what_if_pb2.RoundDifference(
            before=what_if_pb2.ClusterOutlook(
                running=2, waiting=1, gpus={"a100": 16}, used_gpus={"a100": 16}, effective_gpus=10
            ),
            after=what_if_pb2.ClusterOutlook(
                running=3, gpus={"a100": 24}, used_gpus={"a100": 24}, effective_gpus=15
            ),
            jobs=[
                what_if_pb2.JobDifference(
                    job=f"{J}weak",
                    effect="starts",
                    before=waits,
                    after=what_if_pb2.JobOutlook(kind="start", cell=cell, rate=3.0),
                )
            ],
            other_jobs={"stops": 2},
            same_objective=True,
        ),
        hours=what_if_pb2.HoursDifference(
            horizon=Duration(seconds=21_600),
            futures=16,
            coverage=0.8,
            soon_effective_gpus=figure,
            soon_waiting_jobs=figure,
            mean_wait_seconds=figure,
            work_gpu_hours=figure,
            finished_jobs=figure,
            jobs=[
                what_if_pb2.JobHours(
                    job=f"{J}weak", start_before=a_band(600, 1200), start_after=a_band(0, 60)
                )
            ],
        ),
        notes=["16 of 32 pairs"],
    )


def shown(answer: what_if_pb2.WhatIfResponse, capsys: pytest.CaptureFixture[str]) -> str:
    show_answer(answer)
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def test_now_and_the_next_hours_are_shown_at_a_glance(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(an_answer(), capsys)
    assert "running jobs 2 -> 3" in text
    assert "throughput 10 -> 15 effective GPUs (+50.0%)" in text
    assert "GPUs in use a100 16 of 16 -> 24 of 24" in text
    assert "next 6h 16 pairs of futures; 80% intervals" in text
    assert "throughput soon 1,500 -> 720: -780 (-1,080 to -540) effective GPUs" in text
    assert "waiting soon 1,500 -> 720: -780 (-1,080 to -540)" in text
    assert "mean waiting 25m -> 12m: -13m (-18m to -9m)" in text
    assert "weak starts waits (OUTPRICED) 8 x a100, pp 2" in text
    assert "weak 10m-20m 0s-1m" in text
    assert "other jobs that differ: 2 stops" in text
    assert "note: 16 of 32 pairs" in text


def test_an_added_job_is_shown_with_its_price_and_the_jobs_that_it_displaces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer = what_if_pb2.JobOffer(
        job=f"{J}new",
        cell=estimates_pb2.Cell(gpu_type="a100", gpus=8),
        rate=3.0,
        runner_up=estimates_pb2.Cell(gpu_type="a100", gpus=4),
        runner_up_rate=2.0,
        worse_by=0.5,
        price=1.5,
        value=4.0,
        unit="effective GPUs",
        stopped=[f"{J}old"],
        other_losers=2,
    )
    text = shown(what_if_pb2.WhatIfResponse(made_time=MADE, offers=[offer]), capsys)
    assert "gets now 8 x a100, 3 samples/s" in text
    assert "second best 4 x a100, 2 samples/s; worse by 0.5 effective GPUs" in text
    assert "price 1.5 of its value of 4 effective GPUs" in text
    assert "old would stop; 2 jobs of other tenants would stop or run more slowly" in text


def test_worths_prices_and_a_needed_weight_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answer = what_if_pb2.WhatIfResponse(
        node_worths=[
            what_if_pb2.NodeWorth(gpu_type="a100", gpus=8, effective_gpus_change=5.0, price=2.5)
        ],
        rule_prices=[
            what_if_pb2.RulePrice(rule="queue-order", objective=3.0, unit="GPUs"),
            what_if_pb2.RulePrice(rule="deadlines", why_free="no job has a deadline"),
        ],
        needed_weight=what_if_pb2.NeededWeight(
            job=f"{J}weak",
            weight=1.0,
            step=jobs_pb2.NextStep(
                message="raise it", changes=[jobs_pb2.StepChange(kind="WEIGHT", amount=1.11)]
            ),
        ),
    )
    text = shown(answer, capsys)
    assert re.search(r"8 x a100 \+5 0 \+0 2.5", text)
    assert "queue-order +0 +0 +3 GPUs 0" in text
    assert "deadlines no job has a deadline" in text
    assert "A weight of 1.11 would do, instead of 1. raise it" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "needs a change"),
        (["--worth-of-nodes", "--lose-node", "n"], "a change and --worth-of-nodes cannot be"),
        (["--add-nodes", "h100"], "must be TYPE:COUNT"),
        (["--add-nodes", "h100:2x"], "must be TYPE:COUNT"),
        (["--weight", "2"], "is needed, since --weight is for a job"),
        (["--job", "a"], "needs what to change"),
        (["--tenant", "t"], "needs what to change"),
        (["--quota", "any=4"], "is needed"),
        (["--tenant", "t", "--quota", "any"], "must be TYPE=GPUS"),
        (["--tenant", "t", "--quota", "any=4", "--quota", "any=5"], "has any twice"),
    ],
)
def test_a_wrong_question_is_refused_before_a_server_is_asked(
    arguments: list[str], why: str
) -> None:
    result = CliRunner().invoke(app, ["whatif", "--server", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_the_effect_of_a_change_on_its_job_is_one_sentence() -> None:
    assert describe_effect(an_answer(), f"{J}weak") == (
        "the next round: the job gets 8 x a100, pp 2; without the change it waits (OUTPRICED); it"
        " changes 2 other jobs, too"
    )
    assert describe_effect(an_answer(), f"{J}else") == (
        "the next round: the job gets the same as without the change, but 3 other jobs would change"
    )


def test_a_dry_run_of_what_no_question_can_ask_is_refused_before_a_server_is_asked() -> None:
    result = CliRunner().invoke(
        app, ["update", "j", "--weight", "2", "--label", "a=b", "--dry-run"]
    )
    assert result.exit_code != 0
    assert "--dry-run" in str(result.exception) + result.output
