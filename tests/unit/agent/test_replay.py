"""The replay runtime: real processes that advance, resume, stop, fail and finish."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.formulation.job.runtimes import fail_at
from tessera.service.agent import checkpoint
from tessera.service.agent.process import Process, python_argv
from tessera.service.agent.runtimes import replay_job
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, MemberHandle, Progress
from tessera.service.agent.runtimes.replay import ReplayRuntime
from tessera.service.agent.runtimes.replay_job import elapsed_s_at, iterations_at
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang, is_running, launch_leader, process_of, until
from tests.support.programs import end_of


class ReplayBench:
    """A data directory in which jobs are started without an agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "checkpoints"
        self.pids: list[int] = []

    def directory(self, gang: pb.DesiredGang) -> Path:
        return self.root / "gangs" / f"{gang.job}@{gang.generation}"

    def start(
        self, gang: pb.DesiredGang, clock_factor: float, checkpoint_s: float = 1e9
    ) -> MemberHandle:
        self.directory(gang).mkdir(parents=True)
        runtime = ReplayRuntime(clock_factor=clock_factor, checkpoint_s=checkpoint_s)
        handle = launch_leader(runtime, gang, self.directory(gang), self.store)
        self.pids.append(process_of(self.root, gang.job, gang.generation))
        return handle


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ReplayBench]:
    replay_bench = ReplayBench(tmp_path)
    yield replay_bench
    for pid in replay_bench.pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


async def test_a_job_runs_to_completion(
    bench: ReplayBench, caplog: pytest.LogCaptureFixture
) -> None:
    gang = a_gang(iter_time_s=0.0, iterations_total=1000)
    with caplog.at_level(logging.INFO):
        handle = bench.start(gang, clock_factor=10_000)
    assert await end_of(handle) == MemberExit(outcome=ExitOutcome.SUCCEEDED)
    assert handle.observe() == Progress(
        report=pb.ObservedGang(iterations_done=1000, iter_time_s=1.0, runtime="replay")
    )
    assert checkpoint.open_generation(str(bench.store), 1, 0) == 1000
    assert "nobody knows the rate of" in caplog.text  # so it takes a second an iteration


async def test_a_job_resumes_at_the_servers_progress_if_that_is_further(bench: ReplayBench) -> None:
    handle = bench.start(a_gang(iterations_done=500.0, iterations_total=1e9), clock_factor=1e-3)
    await handle.begun()
    assert handle.observe() == Progress(
        report=pb.ObservedGang(iterations_done=500, iter_time_s=0.0, runtime="replay")
    )


async def test_a_job_makes_progress_only_after_its_restart_time(bench: ReplayBench) -> None:
    handle = bench.start(a_gang(restart_s=1e9, iterations_total=1.0), clock_factor=1.0)
    begun = asyncio.create_task(handle.begun())
    await until((bench.store / "fence.json").exists)
    assert handle.observe() is None
    assert not begun.done()
    handle.stop()
    await begun
    assert await handle.ended() == MemberExit(outcome=ExitOutcome.STOPPED)


async def test_an_older_generation_ends_with_the_reason(bench: ReplayBench) -> None:
    checkpoint.open_generation(str(bench.store), 5, 0)
    end = await end_of(bench.start(a_gang(generation=4), clock_factor=1.0))
    assert end.outcome is ExitOutcome.FAILED
    assert "generation 5 has taken it over" in end.error


async def test_a_checkpoint_of_another_job_is_named_with_what_to_do(bench: ReplayBench) -> None:
    checkpoint.open_generation(str(bench.store), 1, 0)
    checkpoint.save_checkpoint(str(bench.store), 1, 10**13, 0)
    end = await end_of(bench.start(a_gang(generation=2), clock_factor=1.0))
    assert end.outcome is ExitOutcome.FAILED
    assert "it belongs to another job" in end.error
    assert "remove it" in end.error


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}")],
)
async def test_a_killed_job_is_reported_with_its_signal_unless_it_was_adopted(
    bench: ReplayBench, number: int, name: str
) -> None:
    gang = a_gang()
    handle = bench.start(gang, clock_factor=1.0)
    await handle.begun()
    adopted = ReplayRuntime().adopt(bench.directory(gang))
    assert adopted is not None
    os.kill(bench.pids[0], number)
    assert await end_of(handle) == MemberExit(
        outcome=ExitOutcome.FAILED,
        error=f"the process was killed by {name}",
        reason=ExitReason.KILLED,
    )
    assert "died while no agent watched it" in (await end_of(adopted)).error
    handle.stop()  # harmless


async def test_a_failing_program_is_reported_with_its_last_output(bench: ReplayBench) -> None:
    gang = a_gang(iterations_total=math.inf)
    bench.directory(gang).mkdir(parents=True)
    handle = launch_leader(ReplayRuntime(), gang, bench.directory(gang), bench.store)
    end = await end_of(handle)
    assert end == MemberExit(
        outcome=ExitOutcome.FAILED,
        error="the process exited with status 1: OverflowError: cannot convert float infinity to integer",
        reason=ExitReason.ERROR,
    )


async def test_a_process_whose_agent_died_before_recording_it_does_nothing(tmp_path: Path) -> None:
    process = Process.spawn(
        python_argv(Path(replay_job.__file__)),
        "",
        identity=tmp_path / "process.json",
        errors=tmp_path / "errors.log",
    )
    assert await process.ended() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors.log", "process.json"]
    assert (tmp_path / "errors.log").read_text() == ""


async def test_a_process_that_reuses_a_dead_ones_id_is_not_adopted(bench: ReplayBench) -> None:
    gang = a_gang()
    bench.directory(gang).mkdir(parents=True)
    own_identity = f'{{"pid": {os.getpid()}, "start_ticks": 1, "boot": "another"}}'
    (bench.directory(gang) / "process.json").write_text(own_identity)
    adopted = ReplayRuntime().adopt(bench.directory(gang))
    assert adopted is not None
    adopted.kill()  # would kill this test itself
    end = await end_of(adopted)
    assert end.error == "the process died while no agent watched it, and left no exit status"


@pytest.mark.parametrize("command", [("python", "train.py"), ("fail-at",), ("fail-at", "-1")])
def test_other_commands_are_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="submit the job with the runtime 'command'"):
        fail_at(command)


@pytest.mark.parametrize("iter_time_s", [-1.0, math.nan])
def test_a_gang_with_a_meaningless_iteration_time_is_refused(
    tmp_path: Path, iter_time_s: float
) -> None:
    with pytest.raises(InvalidInput, match="iter_time_s"):
        launch_leader(ReplayRuntime(), a_gang(iter_time_s=iter_time_s), tmp_path, tmp_path)


@pytest.mark.parametrize("iterations", [7, 8, 1000])
def test_time_and_iterations_are_inverse(iterations: int) -> None:
    spec: dict[str, Any] = {"clock_factor": 60.0, "restart_s": 30.0, "iter_time_s": 0.3}
    at_s = elapsed_s_at(spec, 7, iterations)
    assert iterations_at(spec, 7, at_s + 1e-9) == iterations
    assert iterations_at(spec, 7, at_s - 1e-9) == max(7, iterations - 1)
