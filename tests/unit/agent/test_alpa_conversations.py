"""A keeper that listens to Alpa's runner: clean conversations, and every fault in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.service.agent.runtimes.arguments import alpa
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, MemberHandle, Progress
from tests.support.agents import until
from tests.support.alpa_conversations import (
    CLEAN,
    REPORT,
    reported,
    write_conversation,
    write_replay,
)
from tests.support.alpa_jobs import an_alpa_gang
from tests.support.programs import ProgramBench, end_of

SUCCESS = MemberExit(outcome=ExitOutcome.SUCCEEDED)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    program_bench = ProgramBench(tmp_path)
    yield program_bench
    await program_bench.clean()


@pytest.fixture
def replayed(bench: ProgramBench, monkeypatch: pytest.MonkeyPatch) -> ProgramBench:
    """Return a bench whose jobs repeat a conversation instead of running Alpa."""
    monkeypatch.setattr(alpa, "RUNNER", str(write_replay(bench.root)))
    return bench


def observed(handle: MemberHandle) -> Progress:
    progress = handle.observe()
    assert isinstance(progress, Progress)
    return progress


async def run(
    bench: ProgramBench, *parts: str, end: str = "0", **fields: Any
) -> tuple[MemberExit, Progress]:
    """Return how a job that says ``parts`` ended, and its progress."""
    write_conversation(bench.root, *parts, end=end)
    handle = bench.start(an_alpa_gang(bench, **fields))
    return await end_of(handle), observed(handle)


async def test_the_recorded_conversation_is_the_runners(bench: ProgramBench) -> None:
    gang = an_alpa_gang(bench, iterations_total=4)
    assert await end_of(bench.start(gang)) == SUCCESS
    assert bench.output() == CLEAN


async def test_a_clean_conversation_is_understood(replayed: ProgramBench) -> None:
    end, progress = await run(replayed, CLEAN, iterations_total=4)
    assert end == SUCCESS
    assert (progress.iterations, progress.loss) == (4, 0.3525390625)
    assert progress.remark == ""


@pytest.mark.parametrize(
    "rubbish",
    [
        "Compiling...\n",
        '{"iterations": 9}\n',
        f"{REPORT}\n",
        f"{REPORT}nonsense\n",
        f"{REPORT}[9]\n",
        f"{REPORT}9\n",
        f"{REPORT}{'[' * 3000}\n",
        f'{REPORT}{{"iterations": 9, "loss": 0.5\n',
        f'{REPORT}{{"steps": 9}}\n',
        f'{REPORT}{{"checkpoint": 9}}\n',
        f'{REPORT}{{"failure": "bad"}}\n',
        "\xff\xfe\x00\r\n",
        "x" * 20_000 + "\n",
        "progress without an end of the line ",
        20_000 * "progress ",
        5_000 * "a line\n",
    ],
)
async def test_rubbish_between_reports_is_left_out(replayed: ProgramBench, rubbish: str) -> None:
    parts = reported(1), rubbish, reported(2, 0.25)
    end, progress = await run(replayed, *parts, iterations_total=2)
    assert end == SUCCESS
    assert (progress.iterations, progress.loss, progress.remark) == (2, 0.25, "")


async def test_a_report_in_two_writes_is_one(replayed: ProgramBench) -> None:
    line = reported(3)
    _, progress = await run(replayed, reported(1), line[:20], line[20:])
    assert progress.iterations == 3


async def test_a_runner_that_dies_within_a_line_leaves_its_earlier_reports(
    replayed: ProgramBench,
) -> None:
    end, progress = await run(replayed, reported(1), reported(2)[:25], end="dies")
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.KILLED)
    assert "SIGKILL" in end.error
    assert progress.iterations == 1


async def test_a_runner_that_dies_between_two_lines_leaves_all_reports(
    replayed: ProgramBench,
) -> None:
    end, progress = await run(replayed, reported(1), reported(2), end="dies")
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.KILLED)
    assert progress.iterations == 2


async def test_a_runner_that_hangs_is_ended(replayed: ProgramBench) -> None:
    write_conversation(replayed.root, reported(1), "waiting for a worker\n", end="hangs")
    gang = an_alpa_gang(replayed, launch={"stall_limit_s": 0.5})
    end = await end_of(replayed.start(gang))
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.STALLED)
    assert "after iteration 1" in end.error


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", 10.0**301, "many", [1], True])
async def test_a_loss_that_is_not_finite_is_named_and_the_iteration_counts(
    replayed: ProgramBench, loss: object
) -> None:
    end, progress = await run(replayed, reported(1), reported(2, loss), iterations_total=2)
    assert end == SUCCESS
    assert (progress.iterations, progress.loss) == (2, 0.5)
    assert "that was ignored" in progress.remark


@pytest.mark.parametrize("iterations", [1, -1, 11, "nan", None, 1e300, [2]])
async def test_iterations_that_go_back_or_cannot_be_are_named(
    replayed: ProgramBench, iterations: object
) -> None:
    _, progress = await run(replayed, reported(2), reported(iterations))
    assert progress.iterations == 2
    assert "that was ignored" in progress.remark


async def test_a_stated_failure_counts_before_the_output(replayed: ProgramBench) -> None:
    line = f'{REPORT}{{"failure": {{"reason": "refused", "message": "no such\\nmethod"}}}}\n'
    end, _ = await run(replayed, line, "ValueError: something else\n", end="1")
    assert (end.reason, end.error) == (ExitReason.REFUSED, "no such method")


async def test_a_checkpoint_elsewhere_is_not_listed(replayed: ProgramBench) -> None:
    report = f'{REPORT}{{"checkpoint": {{"iterations": 1, "path": "/etc"}}}}\n'
    _, progress = await run(replayed, reported(1), report)
    assert progress.checkpoint_iterations is None
    assert progress.remark


async def test_a_job_is_stopped_while_its_runner_is_silent(replayed: ProgramBench) -> None:
    write_conversation(replayed.root, CLEAN, end="hangs")
    handle = replayed.start(an_alpa_gang(replayed))
    await handle.begun()
    await until(lambda: observed(handle).iterations == 4)
    handle.stop()
    assert (await handle.ended()).outcome is ExitOutcome.STOPPED
