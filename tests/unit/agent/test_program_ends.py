"""The ends of programs that exit with status 0: which are a success, and what the others say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.exit_reasons import ExitReason
from tessera.formulation.runtimes import COMMAND, JAX
from tessera.service.agent.keeper.failures import classify, describe_early_end
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    MemberExit,
    MemberHandle,
    Progress,
)
from tests.support.agents import until
from tests.support.patience import PATIENCE_S
from tests.support.programs import UNTIL_EXIT, ProgramBench, end_of, train

SUCCESS = MemberExit(outcome=ExitOutcome.SUCCEEDED)
STOPPED = MemberExit(outcome=ExitOutcome.STOPPED)
ENDLESS = 1e9
WAIT = "import time; time.sleep(0.02)"
REPORTED = "from tessera import progress\nprogress.report({done})\nprint('bye')\n"
PATTERN = {"progress_pattern": r"it (?P<iteration>\d+)"}
TWO_NODES: dict[str, Any] = {
    "shares": (("n0", (0,)), ("n1", (0,))),
    "members": ("n0", "n1"),
    "member_gpus": (1, 1),
}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    program_bench = ProgramBench(tmp_path)
    yield program_bench
    await program_bench.clean()


def observed(handle: MemberHandle) -> Progress:
    progress = handle.observe()
    assert progress is not None
    return progress


async def signal_program(bench: ProgramBench, handle: MemberHandle) -> MemberExit:
    """Send SIGTERM to a program of the job "a" as somebody else would; return its end."""
    recorded = bench.member(bench.gang("")).directory / "processes.json"
    await until(lambda: recorded.exists() and json.loads(recorded.read_text())["processes"])
    ((pid, _), *_) = json.loads(recorded.read_text())["processes"]
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        return await handle.ended()


async def test_a_program_that_reports_no_iterations_has_failed_with_the_next_step(
    bench: ProgramBench,
) -> None:
    handle = bench.start(bench.gang("print('hello')", iterations_total=100_000.0))
    assert await end_of(handle) == MemberExit(
        outcome=ExitOutcome.FAILED,
        reason=ExitReason.ENDED_EARLY,
        error="the program exited with status 0 before it had reported any of its 100,000 iterations;"
        " let it report them (tessera.progress, or --progress-pattern), or submit the job with"
        " --until-exit; rank 0 says: hello",
    )
    assert observed(handle).iterations == 0


@pytest.mark.parametrize("done", [9, 10])
@pytest.mark.parametrize("runtime", [COMMAND, JAX])
async def test_a_program_is_done_once_it_has_reported_all_iterations(
    bench: ProgramBench, runtime: str, done: int
) -> None:
    program = REPORTED.format(done=done)
    script = bench.root / "train.py"
    script.write_text(program)
    command = program if runtime == COMMAND else (str(script),)
    handle = bench.start(bench.gang(command, runtime=runtime))
    end = await end_of(handle)
    assert observed(handle).iterations == done
    if done == 10:
        assert end == SUCCESS
        return
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.ENDED_EARLY)
    assert end.error == (
        "the program exited with status 0 after 9 of 10 iterations; if the program decides when it is"
        " done, submit the job with --until-exit; rank 0 says: bye"
    )


async def test_a_program_that_somebody_else_stops_has_failed_and_goes_on_from_its_checkpoint(
    bench: ProgramBench,
) -> None:
    first = bench.start(bench.gang(train(WAIT), iterations_total=ENDLESS))
    await first.begun()
    await until(lambda: observed(first).iterations > 3)
    end = await signal_program(bench, first)
    assert (end.outcome, end.reason) == (ExitOutcome.FAILED, ExitReason.ENDED_EARLY)
    done = observed(first).iterations
    assert f"exited with status 0 after {done:,.0f} of 1,000,000,000 iterations" in end.error
    second = bench.start(bench.gang(train(), 2, iterations_total=done + 5))
    assert await end_of(second) == SUCCESS
    assert observed(second).resumed_iterations == done
    assert observed(second).iterations == done + 5


async def test_a_program_that_decides_its_end_has_succeeded_without_an_invented_count(
    bench: ProgramBench,
) -> None:
    silent = bench.start(bench.gang("print('hello')", launch=UNTIL_EXIT))
    assert await end_of(silent) == SUCCESS
    assert observed(silent) == Progress(iterations=0, iter_time_s=0, runtime="command")


@pytest.mark.parametrize("done", [7, 10, 25])
async def test_a_program_that_decides_its_end_may_do_fewer_or_more_iterations_than_expected(
    bench: ProgramBench, done: int
) -> None:
    program = train().replace("progress.iterations_total(10)", str(done))
    save = f"path = progress.checkpoint_path({done})\npath.touch()\n"
    save += f"open(path, 'w').write('1')\nprogress.report_checkpoint({done}, path)"
    handle = bench.start(bench.gang(f"{program}\n{save}", launch=UNTIL_EXIT))
    assert await end_of(handle) == SUCCESS
    assert (observed(handle).iterations, observed(handle).remark) == (done, "")
    assert observed(handle).checkpoint_iterations == done


async def test_a_program_that_decides_its_end_and_was_asked_to_stop_is_not_done(
    bench: ProgramBench,
) -> None:
    program = train(WAIT).replace("progress.iterations_total(10)", "10**9")
    handle = bench.start(bench.gang(program, launch=UNTIL_EXIT))
    await handle.begun()
    await until(lambda: observed(handle).iterations > 10)  # more than was expected
    handle.stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await handle.ended() == STOPPED
    assert observed(handle).checkpoint_iterations == observed(handle).iterations


async def test_a_program_that_resumes_at_its_last_iteration_is_done_at_once(
    bench: ProgramBench,
) -> None:
    await end_of(bench.start(bench.gang(train("assert done < 10").replace("stops or", "True or"))))
    again = bench.start(bench.gang(train("1 / 0"), 2))
    assert await end_of(again) == SUCCESS
    assert (observed(again).iterations, observed(again).resumed_iterations) == (10, 10)


async def test_a_listed_checkpoint_proves_its_iterations(bench: ProgramBench) -> None:
    program = """
from tessera import progress
progress.report(3)
path = progress.checkpoint_path(10)
path.write_text("state")
progress.report_checkpoint(10, path)
"""
    handle = bench.start(bench.gang(program))
    assert await end_of(handle) == SUCCESS
    assert observed(handle).iterations == 10


async def test_the_last_line_counts_although_no_newline_ends_it(bench: ProgramBench) -> None:
    handle = bench.start(bench.gang("print('it 4\\nit 10', end='')", launch=PATTERN))
    assert await end_of(handle) == SUCCESS


async def test_the_leader_decides_for_its_gang(bench: ProgramBench) -> None:
    program = """
import os, time
from tessera import progress
here = progress.job_dir() / os.environ["TESSERA_GENERATION"]
if os.environ["TESSERA_NODE_RANK"] == "1":
    here.touch()
else:
    while not here.exists(): time.sleep(0.01)  # the other node must have met this one
    progress.report({done})
"""
    for generation, done in enumerate((9, 10), 1):
        gang = bench.gang(program.format(done=done), generation, **TWO_NODES)
        leader, follower = (bench.start(gang, node) for node in ("n0", "n1"))
        ends = await end_of(leader), await end_of(follower)
        assert [end.reason for end in ends] == [ExitReason.ENDED_EARLY if done < 10 else None, None]
        assert ends[1] == SUCCESS


def test_an_early_end_has_the_kind_that_its_output_tells() -> None:
    facts = {"began": True, "resumed": True, "killed_by_kernel": False}
    assert classify(0, "bye", **facts) == "ended_early"
    assert classify(0, "torch.OutOfMemoryError: CUDA out of memory", **facts) == "out_of_memory"


def test_an_early_end_without_output_says_so() -> None:
    text = describe_early_end(0, 5.0, {"rank 0": ""})
    assert text.startswith(
        "the program exited with status 0 before it had reported any of its 5 iterations,"
        " and wrote no message; let it report"
    )
