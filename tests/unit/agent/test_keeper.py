"""Keepers and their programs: kinds of failures, progress that can be true, tuning, and starts."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.launch import DEFAULT_LAUNCH
from tessera.service.agent.isolation import find_user
from tessera.service.agent.keeper.failures import (
    MAX_STATEMENT,
    MAX_TEXT,
    STATED_REASONS,
    classify,
    describe,
    describe_early_end,
    read_statement,
)
from tessera.service.agent.keeper.measures import MIN_STALL_S, PAIRS, ProgressMeter
from tessera.service.agent.keeper.reporting import LEAST_PART_S, MemberReporter, divide_start
from tessera.service.agent.keeper.spec import KeeperSpec, LaunchArguments, spec_from_plain
from tessera.service.agent.keeper.tuning import MAX_PLAN_CHARS, TuningWatch
from tests.support.launches import WHOLE_LAUNCH
from tests.support.laws import examples

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 4, in <module>
    raise ValueError("bad batch")
ValueError: bad batch
"""


CHAINED = """Traceback (most recent call last):
  File "train.py", line 3, in load
    return open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    raise data.errors.ShardError("cannot load shard 3") from error
data.errors.ShardError: cannot load shard 3
[rank0]:[W1124 07:49:21.5 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called
"""


OUT_OF_MEMORY = """[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 88, in forward
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total \
capacity of 79.11 GiB of which 1.29 GiB is free.
"""


REPORT = """E1124 07:49:21.600000 28053 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: {status}) local_rank: 1 (pid: 28119) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
t.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-24_07:49:21
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 28118)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 28118
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-24_07:49:21
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {status} (pid: 28119)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
"""The report of torchrun of PyTorch 2, which lists the rank that failed first at the end."""


def reason_of(text: str, status: int = 1, **facts: bool) -> ExitReason:
    """Return the kind of a failure that began to train, unless ``facts`` say otherwise."""
    usual = {"began": True, "resumed": False, "killed_by_kernel": False}
    return ExitReason(classify(status, text, **(usual | facts)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TRACEBACK, ExitReason.ERROR),
        (OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY),
        (
            "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes",
            ExitReason.OUT_OF_MEMORY,
        ),
        ("Traceback:\nMemoryError\n", ExitReason.OUT_OF_MEMORY),
        ("I recovered from a MemoryError\n", ExitReason.ERROR),
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            ExitReason.GPU_FAILED,
        ),
        ("NVRM: GPU 3 has Fallen Off The Bus.", ExitReason.GPU_FAILED),
        ("", ExitReason.ERROR),
    ],
)
def test_the_output_of_a_program_that_trained_names_the_kind(text: str, reason: ExitReason) -> None:
    assert reason_of(text) is reason


@pytest.mark.parametrize(
    "text",
    [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "python3: can't open file '/x/train.py': [Errno 2] No such file or directory",
        "RuntimeError: The server socket has failed to listen ... EADDRINUSE",
        "torch.distributed.DistNetworkError: The client socket has timed out",
    ],
)
def test_what_kept_a_program_from_its_first_iteration_is_no_error_later(text: str) -> None:
    assert reason_of(text, began=False) is ExitReason.NOT_STARTED
    assert reason_of(text, began=True) is ExitReason.ERROR


@pytest.mark.parametrize(
    ("text", "status", "facts", "reason"),
    [
        (TRACEBACK, 1, {"began": False, "resumed": True}, ExitReason.BAD_CHECKPOINT),
        (TRACEBACK, 1, {"resumed": True}, ExitReason.ERROR),
        (OUT_OF_MEMORY, 1, {"began": False, "resumed": True}, ExitReason.OUT_OF_MEMORY),
        ("", -9, {"began": False, "resumed": True}, ExitReason.KILLED),
        ("", -9, {"killed_by_kernel": True}, ExitReason.OUT_OF_MEMORY),
        ("bye", 0, {"resumed": True}, ExitReason.ENDED_EARLY),
        (OUT_OF_MEMORY, 0, {"resumed": True}, ExitReason.OUT_OF_MEMORY),
    ],
)
def test_the_facts_of_a_start_name_the_kind_unless_the_output_does(
    text: str, status: int, facts: dict[str, bool], reason: ExitReason
) -> None:
    assert reason_of(text, status, **facts) is reason


@pytest.mark.parametrize(
    ("done", "output", "text"),
    [
        (
            0,
            "hello",
            " before it had reported any of its 5 iterations; let it report them (tessera.progress,"
            " or --progress-pattern), or submit the job with --until-exit; rank 0 says: hello",
        ),
        (
            4,
            "",
            " after 4 of 5 iterations, and wrote no message; if the program decides when it is done,"
            " submit the job with --until-exit",
        ),
    ],
)
def test_an_early_end_says_what_to_do(done: int, output: str, text: str) -> None:
    described = describe_early_end(done, 5.0, {"rank 0": output})
    assert described == f"the program exited with status 0{text}"


def test_the_rank_that_failed_first_counts_and_not_those_that_the_launcher_ended() -> None:
    report = REPORT.format(status=1, other=-15)
    assert reason_of(TRACEBACK + report) is ExitReason.ERROR
    outputs = {"rank 0": "step 5\n", "rank 1": TRACEBACK, "launcher 0": report}
    assert describe(1, outputs) == "rank 1 exited with status 1; rank 1 says: ValueError: bad batch"
    report = REPORT.format(status=-9, other=-15)
    assert reason_of(report) is ExitReason.KILLED
    outputs = {"rank 1": "", "launcher 0": report}
    assert describe(1, outputs) == "rank 1 was killed by SIGKILL, and wrote no message"
    nameless = signal.SIGRTMIN + 3
    silent = describe(-nameless, {"rank 0": ""})
    assert silent == f"the program was killed by signal {nameless}, and wrote no message"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, "ValueError: bad batch"),
        (CHAINED, "data.errors.ShardError: cannot load shard 3"),
        (
            OUT_OF_MEMORY,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total"
            " capacity of 79.11 GiB of which 1.29 GiB is free.",
        ),
        ("starting\nno such bucket\n\n", "no such bucket"),
    ],
)
def test_the_last_error_is_the_message_or_else_the_last_line(text: str, line: str) -> None:
    assert describe(1, {"rank 0": text}) == f"the program exited with status 1; rank 0 says: {line}"


def test_the_rank_that_ended_first_is_quoted_and_a_long_message_is_cut() -> None:
    outputs = {"rank 2": TRACEBACK, "rank 0": "RuntimeError: peer is gone\n"}
    assert describe(1, outputs).endswith("rank 2 says: ValueError: bad batch")
    assert len(describe(1, {"rank 0": "ValueError: " + "x" * 5000})) < MAX_TEXT + 60


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, None),
        ({}, None),
        ({"reason": "refused"}, None),
        ({"reason": "refused", "message": " \n"}, None),
        ({"reason": "refused", "message": 3}, None),
        ({"reason": "refused", "message": "two\n words"}, ("refused", "two words")),
        ({"reason": "stalled", "message": "not its own to say"}, ("error", "not its own to say")),
        ({"reason": ["refused"], "message": "a list"}, ("error", "a list")),
        ({"message": "no reason"}, ("error", "no reason")),
    ],
)
def test_a_program_states_its_end_by_one_of_the_reasons_that_are_its_own(
    stated: dict[str, object] | None, expected: tuple[str, str] | None
) -> None:
    assert read_statement(stated) == expected


def test_a_long_statement_is_cut_and_every_reason_of_a_program_is_known_to_servers() -> None:
    assert read_statement({"message": "x" * 5000}) == ("error", "x" * MAX_STATEMENT)
    assert {ExitReason(reason).value for reason in STATED_REASONS} == STATED_REASONS
    final = {reason for reason in ExitReason if reason.is_final}
    assert final == {ExitReason.REFUSED, ExitReason.LOSS_NOT_FINITE}
    assert all("not tried again" in reason.sentence for reason in final)


REPORTABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(0, 120),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(["1e400", "nan", "-inf", "7", "1_0"]),
)


@pytest.mark.parametrize("stated", [7, 7.9, "7", " 7.0 "])
def test_whole_iterations_are_taken_from_numbers_and_texts(stated: object) -> None:
    meter = ProgressMeter(100, 0)
    assert meter.feed(1.0, stated)
    assert meter.iterations == 7


def test_one_source_may_be_behind_another_but_none_goes_back() -> None:
    meter = ProgressMeter(100, 10)
    meter.feed(1.0, 20, source="file")
    assert not meter.feed(2.0, 15, source="output")
    assert meter.remark == ""
    meter.feed(3.0, 12, source="output")
    assert "12 iterations after 15" in meter.remark
    meter.feed(4.0, 5, source="trainer")
    assert "5 iterations, but was to go on from iteration 10" in meter.remark
    assert meter.iterations == 20


def test_the_iteration_time_is_a_median_of_the_latest_pairs() -> None:
    meter, now_s = ProgressMeter(10_000, 0), 0.0
    for step, step_s in enumerate([9.0] * 40 + [2.0] * (PAIRS - 1) + [50.0], start=1):
        now_s += step_s
        meter.feed(now_s, step)
    assert meter.iter_time_s == 2.0


def test_iterations_have_equal_parts_of_the_times_that_the_program_may_state() -> None:
    meter = ProgressMeter(100, 10)
    meter.feed(100.0, 20)  # includes the start, so it is not timed
    assert meter.iter_time_s == 0.0
    meter.feed(130.0, 40)
    assert meter.iter_time_s == 1.5
    meter = ProgressMeter(100, 0)
    meter.feed(10.0, 1, done_s=9.0)
    meter.feed(12.0, 2, done_s=9.5)
    assert meter.iter_time_s == 0.5
    meter.feed(20.0, 3, done_s=1e9)  # that is absurd
    assert meter.iter_time_s == 10.5  # of the pairs 0.5 and 10.5


@pytest.mark.parametrize("known", [None, 60])
def test_a_program_begins_where_its_checkpoint_or_else_its_first_report_says(
    known: int | None,
) -> None:
    meter = ProgressMeter(100, known)
    meter.feed(5.0, 60)
    assert [meter.resumed, meter.iterations, meter.first_s] == [60, 60, None]
    meter.feed(7.0, 61)
    assert [meter.resumed, meter.first_s] == [60, 7.0]
    assert meter.iter_time_s == (2.0 if known is None else 0.0)


def test_a_stall_counts_from_the_last_progress_or_from_the_start_if_its_limit_is_stated() -> None:
    meter = ProgressMeter(100, 0)
    assert meter.stalls_at_s(0.0, 5.0) == math.inf
    assert meter.stalls_at_s(3.0, 5.0) == 8.0
    meter.feed(10.0, 1)
    assert meter.stalls_at_s(3.0, 5.0) == 13.0
    assert meter.stalls_at_s(0.0, 5.0) == 610.0
    meter.feed(110.0, 2)
    assert meter.stalls_at_s(0.0, 5.0) == 110.0 + 20 * 100.0
    meter.feed(500.0, 2)  # a repeated report is no progress
    assert meter.stalls_at_s(3.0, 5.0) == 113.0


def test_the_largest_memory_and_the_latest_loss_count() -> None:
    meter = ProgressMeter(10, 0)
    meter.feed(1.0, 1, loss="0.5", memory_bytes=9)
    meter.feed(2.0, 2, loss=-0.25, memory_bytes=7)
    meter.feed(3.0, 3, loss=math.inf, memory_bytes=-1)
    assert (meter.loss, meter.memory_bytes) == (-0.25, 9)
    assert meter.remark == "the program reported the loss inf; that was ignored"


@examples(300)
@given(st.lists(st.tuples(*4 * [REPORTABLE]), max_size=5), st.booleans())
def test_whatever_is_reported_the_measures_are_possible(
    reports: list[tuple[object, object, object, object]], knows_start: bool
) -> None:
    meter = ProgressMeter(100, 3 if knows_start else None)
    before = meter.iterations
    for now_s, report in enumerate(reports):
        meter.feed(float(now_s), *report)
        assert before <= meter.iterations <= 100
        assert meter.is_complete is (meter.iterations == 100)
        assert 0 <= meter.iter_time_s < math.inf
        assert meter.loss is None or math.isfinite(meter.loss)
        assert 0 <= meter.memory_bytes <= 1 << 60
        before = meter.iterations


PLAN = {"micro_batch": 8, "stages": [{"end": 4, "start": 0}]}


TUNING_REPORT = {"began_s": 10.0, "ended_s": 70.0, "plan": PLAN, "iteration_s": 0.5}


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
    watch.feed(70.0, TUNING_REPORT)
    assert watch.tuned_s == 60.0
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 90.0
    meter.feed(80.0, 1)
    assert watch.stalls_at_s(meter, 30.0, 0.0) == 110.0
    claims, meter = TuningWatch(0.0), ProgressMeter(100, None)  # of a job that does not tune
    claims.feed(71.0, TUNING_REPORT)
    assert (claims.tuned_s, claims.stalls_at_s(meter, 30.0, 0.0)) == (0.0, 30.0)


@pytest.mark.parametrize(
    ("planned", "sent"),
    [({}, 0.0), ({"planned_s": 0.75}, 0.75), ({"planned_s": None}, None), ({"planned_s": -1}, 0.0)],
)
def test_the_plan_is_passed_on_in_canonical_json_with_its_times(
    planned: dict[str, object], sent: float | None
) -> None:
    watch = TuningWatch(600.0)
    assert watch.to_plain() == {}
    assert watch.feed(70.0, TUNING_REPORT | planned) == ""
    assert watch.to_plain() == {
        "executed_plan": '{"micro_batch":8,"stages":[{"end":4,"start":0}]}',
        "executed_iter_time_s": 0.5,
        "planned_iter_time_s": sent,
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
    assert watch.feed(70.0, TUNING_REPORT | change).endswith(problem)
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
    watch.feed(70.0, TUNING_REPORT)
    meter.feed(90.0, 1)
    reporter.write(meter, watch, began_s=1.0)
    written = json.loads((tmp_path / "progress.json").read_text())
    assert written["restart_times"]["launch_s"] == 5.0
    assert written["restart_times"]["first_iteration_s"] == 24.0  # of 84, and 60 were of tuning
    assert written["executed_iter_time_s"] == 0.5


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
        launch=DEFAULT_LAUNCH,
        arguments=LaunchArguments(argv=()),
        user=find_user(os.geteuid()),
        directory=folder,
        store=folder,
        logs=folder,
        mark="",
        lease="",
        address="",
    )


def test_a_specification_survives_json(tmp_path: Path) -> None:
    arguments = LaunchArguments(argv=("a", "b"), environment={"A": "b"}, stdin="text")
    spec = replace(a_spec(tmp_path), launch=WHOLE_LAUNCH, arguments=arguments, cores=(1, 2))
    assert spec_from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


@pytest.mark.parametrize(
    ("up_s", "first_s", "launch_s"),
    [(2.0, 5.0, 2.0), (2.0, 1.5, 1.5 - LEAST_PART_S), (2.0, 2.0, 2.0 - LEAST_PART_S)],
)
def test_a_start_is_divided_where_the_ranks_run_and_no_part_is_0(
    up_s: float, first_s: float, launch_s: float
) -> None:
    assert divide_start(up_s, first_s) == pytest.approx((launch_s, first_s - launch_s))
    for times in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, -1.0)):
        assert min(divide_start(*times)) > 0
