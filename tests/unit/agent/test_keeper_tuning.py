"""The tuning that programs report to their keeper: no hang, no part of a start, and a plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.service.agent.keeper.measures import MIN_STALL_S, ProgressMeter
from tessera.service.agent.keeper.reporting import MemberReporter
from tessera.service.agent.keeper.spec import KeeperSpec
from tessera.service.agent.keeper.tuning import MAX_PLAN_CHARS, TuningWatch
from tests.support.laws import examples

PLAN = {"micro_batch": 8, "stages": [{"end": 4, "start": 0}]}
REPORT = {"began_s": 10.0, "ended_s": 70.0, "plan": PLAN, "iteration_s": 0.5}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def test_a_program_that_tunes_hangs_only_after_its_budget_and_the_limit() -> None:
    watch, meter = TuningWatch(600.0), ProgressMeter(100, None)
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 30.0
    watch.feed(11.0, {"began_s": 10.0})
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 640.0
    assert watch.stalls_at_s(meter, 0.0, 0.0) == 610.0 + MIN_STALL_S


def test_the_limit_counts_without_the_tuning_until_the_next_progress() -> None:
    watch, meter = TuningWatch(600.0), ProgressMeter(100, None)
    watch.feed(70.0, REPORT)
    assert watch.tuned_s == 60.0
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 90.0
    meter.feed(80.0, 1)
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 110.0


def test_a_job_that_does_not_tune_cannot_put_off_its_end_by_claims_of_tuning() -> None:
    watch, meter = TuningWatch(0.0), ProgressMeter(100, None)
    watch.feed(71.0, REPORT)
    assert (watch.tuned_s, watch.stalls_at_s(meter, 30.0, 0.0)) == (0.0, 30.0)


@pytest.mark.parametrize(
    ("planned", "sent"),
    [({}, 0.0), ({"planned_s": 0.75}, 0.75), ({"planned_s": None}, None), ({"planned_s": -1}, 0.0)],
)
def test_the_plan_is_passed_on_in_canonical_json_with_its_times(
    planned: dict[str, object], sent: float | None
) -> None:
    watch = TuningWatch(600.0)
    assert watch.to_plain() == {}
    assert watch.feed(70.0, REPORT | planned) == ""
    assert watch.to_plain() == {
        "executed_plan": '{"micro_batch":8,"stages":[{"end":4,"start":0}]}',
        "executed_s": 0.5,
        "planned_s": sent,
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"plan": "dp8"}, "without the seconds of its iteration"),
        ({"iteration_s": 0}, "without the seconds of its iteration"),
        ({"iteration_s": math.nan}, "without the seconds of its iteration"),
        ({"plan": {"x": "x" * MAX_PLAN_CHARS}}, "of more than 32768 characters"),
    ],
)
def test_a_plan_that_cannot_be_one_is_ignored(change: dict[str, object], problem: str) -> None:
    watch = TuningWatch(600.0)
    assert watch.feed(70.0, REPORT | change).endswith(problem)
    assert watch.to_plain() == {}


@given(reports=st.lists(ANYTHING, max_size=4), began=ANYTHING, ended=ANYTHING, plan=ANYTHING)
@examples(100)
def test_no_report_breaks_the_keeper_or_makes_the_tuning_longer_than_the_time_that_passed(
    reports: list[object], began: object, ended: object, plan: object
) -> None:
    watch, meter = TuningWatch(600.0), ProgressMeter(100, None)
    for report in (*reports, {"began_s": began, "ended_s": ended, "plan": plan}):
        watch.feed(100.0, report)
    assert watch.tuned_s >= 0.0
    assert not math.isnan(watch.stalls_at_s(meter, 30.0, 0.0))


def test_the_price_of_a_restart_leaves_the_tuning_out(tmp_path: Path) -> None:
    reporter, meter, watch = (
        MemberReporter(a_spec(tmp_path)),
        ProgressMeter(9, 0),
        TuningWatch(60.0),
    )
    reporter.up_s = 5.0
    watch.feed(70.0, REPORT)
    meter.feed(90.0, 1)
    reporter.write(meter, watch, began_s=1.0)
    written = json.loads((tmp_path / "progress.json").read_text())
    assert written["restart_times"]["launch_s"] == 5.0
    assert written["restart_times"]["first_iteration_s"] == 24.0  # of 84, and 60 were of tuning
    assert written["executed_s"] == 0.5


def a_spec(directory: Path) -> KeeperSpec:
    folder = str(directory)
    return KeeperSpec(
        runtime="command",
        job="a",
        generation=1,
        job_number=0,
        node_rank=0,
        nodes=1,
        ranks=(0,),
        ranks_are_gpus=False,
        directory=folder,
        inbox=folder,
        outbox=folder,
        store=folder,
        logs=folder,
        mark="",
        lease="",
        address="",
        argv=(),
        environment={},
    )
