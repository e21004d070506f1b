"""Rounds, explanations and what-if answers as the command line shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from tessera.service.cli.jobs.explain import MAX_SPANS_SHOWN, show_explanation
from tessera.service.cli.render import as_json
from tessera.service.cli.rounds.roundoptions import read_round_options
from tessera.service.cli.rounds.roundview import show_round
from tessera.service.cli.rounds.whatifview import describe_effect, show_answer
from tessera.v1 import estimates_pb2, jobs_pb2, scheduler_pb2, what_if_pb2
from tests.support.shown import NOW, later

JOBS = "clusters/c/jobs"


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that returns what a view prints, with single spaces."""

    def show(view: Callable[..., None], *arguments: Any, **options: Any) -> str:
        view(*arguments, **options)
        output = capsys.readouterr()
        return " ".join((output.out + output.err).split())

    return show


@pytest.fixture
def round_text(shown: Callable[..., str]) -> Callable[..., str]:
    """Return a function that returns how a round with these fields is shown."""

    def show(*, everything: bool = False, **fields: Any) -> str:
        record = scheduler_pb2.Round(
            name="clusters/c/rounds/3", status="optimal", outcome="committed", bound=2.5
        )
        record.MergeFrom(scheduler_pb2.Round(**fields))
        return shown(show_round, record, everything=everything, wide=False)

    return show


def a_decision(job: str, kind: str, **fields: Any) -> scheduler_pb2.Decision:
    return scheduler_pb2.Decision(job=f"{JOBS}/{job}", kind=kind, **fields)


def test_a_round_shows_its_scheduler_its_limits_and_greedys_answer(
    round_text: Callable[..., str],
) -> None:
    deep = read_round_options(scheduler="arena", scheduler_parameters="depth=5")
    assert "the published scheduler arena (depth=5)" in round_text(solver="arena", options=deep)
    endless = round_text(options=read_round_options(scheduler="fcfs"), bound=math.inf, gap=math.inf)
    assert "the published scheduler fcfs" in endless
    assert "no bound is known" in endless
    assert "greedy" not in endless
    for most, text in ((0, "; maximum changes 0"), (3, "; maximum changes 3")):
        assert text in round_text(options=read_round_options(objective="jct", max_changes=most))
    unlimited = scheduler_pb2.RoundOptions(objective="jct", max_changes=-1)
    assert "maximum changes" not in round_text(options=unlimited)
    assert "8 (2 less)" in round_text(objective=10.0, greedy_objective=8.0)
    worse = "11 (1 more, but worse in an earlier goal)"
    assert worse in round_text(objective=10.0, greedy_objective=11.0)


def test_a_round_hides_decisions_that_change_nothing_by_default(
    round_text: Callable[..., str],
) -> None:
    decisions = [a_decision("new", "start", opportunistic=True), a_decision("old", "keep")]
    text = round_text(decisions=decisions)
    assert "start (opportunistic)" in text
    assert "old" not in text
    assert "1 keep" in text
    assert "old" in round_text(decisions=decisions, everything=True)


def an_explanation(**changes: Any) -> jobs_pb2.ExplainJobResponse:
    values: dict[str, Any] = {
        "job": f"{JOBS}/weak",
        "round": "clusters/c/rounds/7",
        "round_time": NOW,
        "kind": "wait",
        "reason": jobs_pb2.Reason(
            code="OUTPRICED", message="too dear", next_step="wait", evidence={"offer": "2 x a100"}
        ),
        "cause": "capacity",
        "complete": True,
    }
    return jobs_pb2.ExplainJobResponse(**(values | changes))


def test_an_explanation_shows_reason_displacers_steps_and_rounds(shown: Callable[..., str]) -> None:
    strong = jobs_pb2.Displacement(
        job=f"{JOBS}/strong", gpu_type="a100", gpus=2, rule="VALUE", value_per_gpu=0.5
    )
    answer = an_explanation(
        displaced_by=[strong, jobs_pb2.Displacement(gpu_type="a100", gpus=4, rule="GUARANTEE")],
        steps=[jobs_pb2.NextStep(actor="user", message="raise the weight")],
        history=[jobs_pb2.RoundSpan(first_round=3, last_round=7, kind="wait", cause="capacity")],
        value_per_gpu=0.25,
        unit="effective GPUs",
    )
    text = shown(show_explanation, answer)
    for part in (
        "7 (2027-01-15T08:00:00Z)",
        "OUTPRICED (capacity): too dear",
        "0.25 effective GPUs for each GPU",
        "strong 2 x a100 higher value 0.5",
        "(another tenant) 4 x a100 its guarantee",
        "1. user: raise the weight",
        "3-7 wait capacity",
    ):
        assert part in text
    assert "next step" not in text
    fields = {field.name for field in jobs_pb2.ExplainJobResponse.DESCRIPTOR.fields}
    plain = json.loads(as_json(an_explanation()))
    # Unset if no unit is common, and if no start is promised or reserved.
    assert fields - set(plain) <= {"value_per_gpu", "start_by", "planned_start"}


def test_an_explanation_without_steps_has_a_next_step_and_one_of_many_rounds_is_cut(
    shown: Callable[..., str],
) -> None:
    text = shown(show_explanation, an_explanation(note="time ended", complete=False, round=""))
    for part in ("as of now", "next step wait", "note: time ended"):
        assert part in text
    spans = [jobs_pb2.RoundSpan(first_round=k, last_round=k, kind="wait") for k in range(30)]
    text = shown(show_explanation, an_explanation(history=spans))
    assert f"{30 - MAX_SPANS_SHOWN} earlier entries" in text


def a_band(first_s: int, last_s: int) -> jobs_pb2.TimeBand:
    return jobs_pb2.TimeBand(earliest=later(first_s), latest=later(last_s))


def an_answer() -> what_if_pb2.WhatIfResponse:
    """Return an answer that 8 GPUs more let the job ``weak`` start."""
    cell = estimates_pb2.Cell(gpu_type="a100", gpus=8, pipeline_degree=2)
    waits = what_if_pb2.JobOutlook(kind="wait", reason=jobs_pb2.Reason(code="OUTPRICED"))
    starts = what_if_pb2.JobOutlook(kind="start", cell=cell, rate=3.0)
    figure = what_if_pb2.PairedFigure(before=1500, after=720, change=-780, low=-1080, high=-540)
    before, after = (
        what_if_pb2.ClusterOutlook(
            running=running,
            waiting=3 - running,
            gpus={"a100": gpus},
            used_gpus={"a100": gpus},
            effective_gpus=gpus,
        )
        for running, gpus in ((2, 16), (3, 24))
    )
    return what_if_pb2.WhatIfResponse(
        create_time=NOW,
        now=what_if_pb2.RoundDifference(
            before=before,
            after=after,
            jobs=[
                what_if_pb2.JobDifference(
                    job=f"{JOBS}/weak", effect="starts", before=waits, after=starts
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
                    job=f"{JOBS}/weak", start_before=a_band(600, 1200), start_after=a_band(0, 60)
                )
            ],
        ),
        notes=["16 of 32 pairs"],
    )


def test_an_added_job_is_shown_with_its_price_and_the_jobs_that_it_displaces(
    shown: Callable[..., str],
) -> None:
    offer = what_if_pb2.JobOffer(
        job=f"{JOBS}/new",
        cell=estimates_pb2.Cell(gpu_type="a100", gpus=8),
        rate=3.0,
        runner_up=estimates_pb2.Cell(gpu_type="a100", gpus=4),
        runner_up_rate=2.0,
        worse_by=0.5,
        price=1.5,
        value=4.0,
        unit="effective GPUs",
        stopped=[f"{JOBS}/old"],
        other_losers=2,
    )
    text = shown(show_answer, what_if_pb2.WhatIfResponse(create_time=NOW, offers=[offer]))
    assert "gets now 8 x a100, 3 samples/s" in text
    assert "second best 4 x a100, 2 samples/s; worse by 0.5 effective GPUs" in text
    assert "price 1.5 of its value of 4 effective GPUs" in text
    assert "old would stop; 2 jobs of other tenants would stop or run more slowly" in text


def test_the_effect_of_a_change_on_its_job_is_one_sentence() -> None:
    assert describe_effect(an_answer(), f"{JOBS}/weak") == (
        "the next round: the job gets 8 x a100, pp 2; without the change it waits (OUTPRICED); it"
        " changes 2 other jobs, too"
    )
    assert describe_effect(an_answer(), f"{JOBS}/else") == (
        "the next round: the job gets the same as without the change, but 3 other jobs would change"
    )
