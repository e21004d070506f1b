"""The view of an explanation: what is shown of each part, and what is left out without it."""

from __future__ import annotations

import json

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner

from tessera.service.cli.explain import MAX_SPANS_SHOWN, show_explanation
from tessera.service.cli.main import app
from tessera.service.cli.render import as_json
from tessera.v1 import jobs_pb2

JOB = "clusters/c/jobs/weak"


def an_answer(**changes: object) -> jobs_pb2.ExplainJobResponse:
    values: dict[str, object] = {
        "job": JOB,
        "round": "clusters/c/rounds/7",
        "round_time": Timestamp(seconds=1_800_000_000),
        "kind": "wait",
        "reason": jobs_pb2.Reason(
            code="OUTPRICED", message="too dear", next_step="wait", evidence={"offer": "2 x a100"}
        ),
        "cause": "capacity",
        "complete": True,
    }
    return jobs_pb2.ExplainJobResponse(**(values | changes))  # type: ignore[arg-type]


def test_reason_displacers_steps_and_rounds_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answer = an_answer(
        displaced_by=[
            jobs_pb2.Displacement(
                job="clusters/c/jobs/strong", gpu_type="a100", gpus=2, by="VALUE", value_per_gpu=0.5
            ),
            jobs_pb2.Displacement(gpu_type="a100", gpus=4, by="GUARANTEE"),
        ],
        steps=[jobs_pb2.NextStep(actor="user", message="raise the weight")],
        history=[jobs_pb2.RoundSpan(first_round=3, last_round=7, kind="wait", cause="capacity")],
        value_per_gpu=0.25,
        unit="effective GPUs",
    )
    show_explanation(answer)
    shown = " ".join(capsys.readouterr().out.split())
    assert "7 (2027-01-15T08:00:00Z)" in shown
    assert "OUTPRICED (capacity): too dear" in shown
    assert "0.25 effective GPUs for each GPU" in shown
    assert "strong 2 x a100 higher value 0.5" in shown
    assert "(another tenant) 4 x a100 its guarantee" in shown
    assert "1. user: raise the weight" in shown
    assert "3-7 wait capacity" in shown
    assert "next step" not in shown


def test_without_steps_the_next_step_of_the_reason_and_the_note_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_explanation(an_answer(note="time ended", complete=False, round=""))
    shown = capsys.readouterr()
    assert "as of now" in shown.out
    assert "next step  wait" in shown.out
    assert "note: time ended" in shown.err


def test_many_rounds_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    spans = [jobs_pb2.RoundSpan(first_round=k, last_round=k, kind="wait") for k in range(30)]
    show_explanation(an_answer(history=spans))
    assert f"{30 - MAX_SPANS_SHOWN} earlier entries" in capsys.readouterr().err


def test_the_answer_as_json_has_every_field() -> None:
    plain = json.loads(as_json(an_answer()))
    fields = {field.name for field in jobs_pb2.ExplainJobResponse.DESCRIPTOR.fields}
    assert fields - set(plain) <= {"value_per_gpu"}  # unset if no unit is common


def test_a_negative_round_is_wrong_usage() -> None:
    assert CliRunner().invoke(app, ["explain", "weak", "--round", "-1"]).exit_code == 2
