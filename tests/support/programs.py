"""Programs of jobs under keepers, for tests of the agent: a bench, and small programs in Python."""

from __future__ import annotations

import asyncio
import math
import os
import pwd
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.formulation.job.launch import LaunchSpec
from tessera.formulation.job.runtimes import COMMAND
from tessera.service.agent.files import make_private, write_json
from tessera.service.agent.isolation import UserRule
from tessera.service.agent.lease import LEASE_FILE, boot_id
from tessera.service.agent.logs import folder_of
from tessera.service.agent.runtimes.programs import LOGS, ProgramRuntime, ProgramSettings
from tessera.service.agent.runtimes.protocol import (
    ExitOutcome,
    Member,
    MemberExit,
    MemberHandle,
)
from tessera.v1 import agents_pb2 as pb
from tests.support.agents import a_gang
from tests.support.patience import PATIENCE_S

TRAIN = """
import json, sys
from tessera import progress
progress.catch_stop()
done = progress.resume_iterations()
if done:
    assert json.loads(progress.resume_path().read_text()) == done
print("begins at", done, flush=True)
while done < progress.iterations_total(10):
    {step}
    done += 1
    progress.report(done, loss=1 / done)
    stops = progress.stop_requested()
    if stops or progress.checkpoint_requested():
        path = progress.checkpoint_path(done)
        path.write_text(json.dumps(done))
        progress.report_checkpoint(done, path)
    if stops:
        break
"""
"""A program that trains by the client. ``step`` is what it does in an iteration."""


def train(step: str = "pass") -> str:
    """Return a program that trains by the client, and does ``step`` in each iteration."""
    return TRAIN.replace("{step}", step)


UNTIL_EXIT: Mapping[str, Any] = {"until_exit": True}
"""The launch of a program that trains nothing: it is done when it exits."""

SUCCESS: Final = MemberExit(outcome=ExitOutcome.SUCCEEDED)
STOPPED: Final = MemberExit(outcome=ExitOutcome.STOPPED)

ENDLESS: Final = 1e9
"""Iterations that no test waits for."""

TWO_NODES: Final[Mapping[str, Any]] = {
    "shares": (("n0", (0,)), ("n1", (0,))),
    "members": ("n0", "n1"),
    "member_gpus": (1, 1),
}
"""The fields of a gang with a GPU on each of two nodes."""


def own_user() -> str:
    """Return the name of the user that runs the tests."""
    return pwd.getpwuid(os.geteuid()).pw_name


class ProgramBench:
    """A node without an agent: it launches members of gangs, and cleans up after them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "checkpoints" / "job-a"
        self.settings = ProgramSettings(
            data_dir=root / "data",
            address="127.0.0.1",
            nodes={"n0": 2, "n1": 2},
            environment=dict(os.environ),
            users=UserRule(default=own_user()),
            python=sys.executable,
            checkpoint_s=0.0,
            grace_s=PATIENCE_S,
        )
        self._handles: list[MemberHandle] = []
        make_private(str(self.settings.data_dir))
        endless = {"heard_s": 0.0, "lease_s": math.inf, "margin_s": 0.0, "boot": boot_id()}
        write_json(str(self.settings.data_dir / LEASE_FILE), endless)

    def gang(
        self,
        program: str | tuple[str, ...],
        generation: int = 1,
        launch: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> pb.DesiredGang:
        """Return a gang whose command is a Python program, or the words of ``program``."""
        words = (sys.executable, "-c", program) if isinstance(program, str) else program
        values: dict[str, Any] = {
            "runtime": COMMAND,
            "command": words,
            "iterations_total": 10.0,
            "global_batch": 8,
            "launch": LaunchSpec(**(launch or {})),
        }
        return a_gang(generation=generation, **(values | fields))

    def member(self, gang: pb.DesiredGang, node: str = "n0") -> Member:
        """Return a member with its directory."""
        key = f"{gang.job}@{gang.generation}"
        directory = self.settings.data_dir / "gangs" / key / f"member-{node}"
        directory.mkdir(parents=True, exist_ok=True)
        return Member(gang=gang, node=node, directory=directory, store=self.store)

    def start(self, gang: pb.DesiredGang, node: str = "n0", **settings: Any) -> MemberHandle:
        """Launch a member of ``gang``."""
        runtime = ProgramRuntime(
            name=gang.launch.runtime, settings=replace(self.settings, **settings)
        )
        member = self.member(gang, node)
        handle = runtime.launch(member)
        self._handles.append(handle)
        return handle

    def output(self, generation: int = 1, rank: str = "rank-0") -> str:
        """Return the output of a rank that is kept."""
        folder = folder_of(self.settings.data_dir / LOGS, "a", generation)
        files = sorted(folder.glob(f"{rank}.*.log"), key=lambda path: int(path.suffixes[-2][1:]))
        return "".join(path.read_text() for path in files)

    async def clean(self) -> None:
        """End everything that was started."""
        for handle in self._handles:
            handle.kill()
        await asyncio.gather(*(end_of(handle) for handle in self._handles), return_exceptions=True)


async def end_of(handle: MemberHandle) -> MemberExit:
    """Return how a member ended."""
    async with asyncio.timeout(PATIENCE_S):
        await handle.begun()
        return await handle.ended()


def observed(handle: MemberHandle) -> pb.ObservedGang:
    """Return the progress of a member, which it must have reported."""
    progress = handle.observe()
    assert progress is not None
    return progress.report


async def stop(handle: MemberHandle) -> None:
    """Stop a member, and wait for its end, which must not be a failure."""
    handle.stop()
    async with asyncio.timeout(PATIENCE_S):
        assert await handle.ended() == STOPPED


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ProgramBench]:
    """Yield a bench, and end everything that was started on it."""
    program_bench = ProgramBench(tmp_path / "node")
    yield program_bench
    await program_bench.clean()
