"""Kinds of failures, from real output of Python and of PyTorch's launcher."""

from __future__ import annotations

import signal

import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.service.agent.keeper.failures import (
    MAX_STATEMENT,
    MAX_TEXT,
    STATED_REASONS,
    classify,
    describe,
    read_statement,
)

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


def test_a_program_that_fails_after_its_resumption_blames_the_checkpoint() -> None:
    assert reason_of(TRACEBACK, began=False, resumed=True) is ExitReason.BAD_CHECKPOINT
    assert reason_of(TRACEBACK, began=True, resumed=True) is ExitReason.ERROR
    assert reason_of(OUT_OF_MEMORY, began=False, resumed=True) is ExitReason.OUT_OF_MEMORY
    assert reason_of("", -9, began=False, resumed=True) is ExitReason.KILLED


def test_the_kernel_that_killed_for_memory_comes_before_everything() -> None:
    assert reason_of("", -9, killed_by_kernel=True) is ExitReason.OUT_OF_MEMORY


def test_the_rank_that_failed_first_counts_and_not_those_that_the_launcher_ended() -> None:
    report = REPORT.format(status=1, other=-15)
    assert reason_of(TRACEBACK + report) is ExitReason.ERROR
    outputs = {"rank 0": "step 5\n", "rank 1": TRACEBACK, "launcher 0": report}
    assert describe(1, outputs) == "rank 1 exited with status 1; rank 1 says: ValueError: bad batch"


def test_a_rank_that_was_killed_is_named_with_its_signal() -> None:
    report = REPORT.format(status=-9, other=-15)
    assert reason_of(report) is ExitReason.KILLED
    outputs = {"rank 1": "", "launcher 0": report}
    assert describe(1, outputs) == "rank 1 was killed by SIGKILL, and wrote no message"


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


def test_the_rank_that_ended_first_is_quoted() -> None:
    outputs = {"rank 2": TRACEBACK, "rank 0": "RuntimeError: peer is gone\n"}
    assert describe(1, outputs).endswith("rank 2 says: ValueError: bad batch")


def test_a_long_message_is_cut() -> None:
    assert len(describe(1, {"rank 0": "ValueError: " + "x" * 5000})) < MAX_TEXT + 60


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-(signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_the_end_is_named_by_status_or_signal(status: int, how: str) -> None:
    assert describe(status, {"rank 0": ""}) == f"the program {how}, and wrote no message"


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


def test_only_what_no_other_start_can_change_is_final() -> None:
    final = {reason for reason in ExitReason if reason.is_final}
    assert final == {ExitReason.REFUSED, ExitReason.LOSS_NOT_FINITE}
    assert all("not tried again" in reason.sentence for reason in final)
