"""The replay runtime: a real process for each job that takes as long as training would, by a faster clock."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from formulation.errors import InvalidInput
from service.agent import replay_job
from service.agent.files import read_json
from service.agent.gangs import Gang
from service.agent.process import Process, python_argv
from service.agent.runtime import NOTHING, Exit, Handle, Outcome, Progress

FAIL_AT = "fail-at"
"""The only command that a replayed job knows: ``fail-at N`` fails once N iterations are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRuntime:
    """Replays gangs with ``clock_factor`` simulated seconds a real second."""

    clock_factor: float = 1.0
    checkpoint_s: float = 600.0  # simulated seconds between checkpoints, but never below a real one

    def __post_init__(self) -> None:
        """Check the clock. Raises InvalidInput."""
        if not (self.clock_factor > 0 and self.checkpoint_s > 0):
            raise InvalidInput("clock_factor, checkpoint_s", "must be above 0")

    def start(
        self, gang: Gang, directory: Path, checkpoints: Path,
        environment: Mapping[str, str] = NOTHING,
    ) -> Handle:  # fmt: skip
        """Start the job's process. Raises InvalidInput (another command than ``fail-at N``), OSError."""
        if not gang.iter_time_s > 0:
            raise InvalidInput("iter_time_s", f"must be above 0, not {gang.iter_time_s}")
        spec = {
            "directory": str(directory), "checkpoints": str(checkpoints),
            "generation": gang.generation, "iter_time_s": gang.iter_time_s,
            "iterations_total": gang.iterations_total, "iterations_done": gang.iterations_done,
            "restart_s": gang.restart_s, "fail_at": fail_at(gang.command),
            "clock_factor": self.clock_factor, "checkpoint_s": self.checkpoint_s,
        }  # fmt: skip
        argv = python_argv(Path(replay_job.__file__))
        return ReplayHandle.spawn(argv, spec, directory, environment)

    def adopt(self, directory: Path) -> Handle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive."""
        return ReplayHandle.adopt(directory)


class ReplayHandle:
    """A replayed job's process and the files that it leaves in its gang's directory."""

    def __init__(self, process: Process, directory: Path) -> None:
        self._process = process
        self._directory = directory

    @classmethod
    def spawn(
        cls, argv: list[str], spec: Mapping[str, object], directory: Path,
        environment: Mapping[str, str],
    ) -> Self:  # fmt: skip
        """Start the process, which reads ``spec``. Raises OSError."""
        process = Process.spawn(
            argv, json.dumps(spec), identity=directory / "process.json",
            errors=directory / "errors.log", blocked=replay_job.STOP, environment=environment,
        )  # fmt: skip
        return cls(process, directory)

    @classmethod
    def adopt(cls, directory: Path) -> Self | None:
        """Return the process that an earlier agent started there, dead or alive; None: there is none."""
        process = Process.adopt(directory / "process.json")
        return cls(process, directory) if process else None

    async def begun(self) -> None:
        """Return once it says that it runs, or is dead; of an adopted process: once it is dead."""
        await self._process.spoke()

    async def ended(self) -> Exit:
        """Return how it ended, from the file that it left, else from its exit status."""
        status = await self._process.ended()
        left = read_json(str(self._directory / "exit.json"))
        if left is not None:
            return Exit(outcome=Outcome(left["outcome"]), error=left["error"])
        return Exit(outcome=Outcome.FAILED, error=self._sudden_end(status))

    def progress(self) -> Progress | None:
        """Return what it wrote last."""
        written = read_json(str(self._directory / "progress.json"))
        if written is None:
            return None
        return Progress(iterations=written["iterations"], iter_time_s=written["iter_time_s"])

    def stop(self) -> None:
        """Ask it to write a checkpoint and exit."""
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._process.signal(signal.SIGKILL)

    def _sudden_end(self, status: int | None) -> str:
        if status is None:
            return "the process died while no agent watched it, and left no exit status"
        if status < 0:
            return f"the process was killed by {signal.Signals(-status).name}"
        lines = (self._directory / "errors.log").read_text(errors="replace").splitlines()
        return f"the process exited with status {status}: {lines[-1] if lines else 'no message'}"


def fail_at(command: tuple[str, ...]) -> int | None:
    """Return the iteration at which ``command`` asks to fail; None: it asks for nothing.

    Raises:
        InvalidInput: the replay runtime knows no such command.
    """
    if not command:
        return None
    if len(command) == 2 and command[0] == FAIL_AT and command[1].isdecimal():
        return int(command[1])
    raise InvalidInput(
        "command",
        f"the replay runtime runs nothing but '{FAIL_AT} N', not {' '.join(command)!r};"
        " submit the job without a command",
    )
