"""The replay runtime: each job is a real process that lasts as long as training would.

The process runs on a faster clock.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeGuard

from tessera.formulation.errors import InvalidInput
from tessera.formulation.runtimes import REPLAY, fail_at
from tessera.service.agent import replay_job
from tessera.service.agent.files import read_json, read_start
from tessera.service.agent.gangs import Gang
from tessera.service.agent.process import Process, python_argv
from tessera.service.agent.runtime import (
    EMPTY_ENVIRONMENT,
    ExitOutcome,
    GangExit,
    GangHandle,
    Progress,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRuntime:
    """A runtime that replays gangs at ``clock_factor`` simulated seconds per real second."""

    clock_factor: float = 1.0
    checkpoint_s: float = 600.0  # simulated seconds between checkpoints; at least one real second

    def __post_init__(self) -> None:
        """Check the clock. Raises InvalidInput."""
        if not (self.clock_factor > 0 and self.checkpoint_s > 0):
            raise InvalidInput("clock_factor, checkpoint_s", "must be above 0")

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = EMPTY_ENVIRONMENT,
    ) -> GangHandle:
        """Start the process. Raises InvalidInput (command is not ``fail-at N``), OSError."""
        if not gang.iter_time_s >= 0:
            raise InvalidInput("iter_time_s", f"must be at least 0, not {gang.iter_time_s}")
        iter_time_s = gang.iter_time_s or UNKNOWN_ITER_TIME_S
        if not gang.iter_time_s:
            log.info(
                "nobody knows the rate of %s, so it is replayed at %g s an iteration",
                gang.job,
                iter_time_s,
                extra={"action": "start"},
            )
        spec = {
            "runtime": REPLAY,
            "directory": str(directory),
            "checkpoints": str(checkpoints),
            "generation": gang.generation,
            "job_number": gang.job_number,
            "iter_time_s": iter_time_s,
            "iterations_total": gang.iterations_total,
            "iterations_done": gang.iterations_done,
            "restart_s": gang.restart_s,
            "fail_at": fail_at(gang.command),
            "clock_factor": self.clock_factor,
            "checkpoint_s": self.checkpoint_s,
        }
        argv = python_argv(Path(replay_job.__file__))
        return ReplayHandle.spawn(argv, spec, directory, environment)

    def adopt(self, directory: Path) -> GangHandle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive.

        If there is no such process, return None.
        """
        return ReplayHandle.adopt(directory)


log = logging.getLogger(__name__)

UNKNOWN_ITER_TIME_S: Final = 1.0
"""Simulated seconds of an iteration of a replayed job whose rate is unknown."""

MAX_AMOUNT: Final = 1e18
"""The bound above which numbers of iterations and seconds mean nothing."""

MAX_FILE_BYTES: Final = 65_536
"""The largest number of bytes that are read from a file of a job's process."""


class ReplayHandle:
    """A replayed job's process and the files that it leaves in its gang's directory.

    The agent carries on whatever the process leaves there. A file that cannot be read counts as
    empty, and this is logged once.
    """

    def __init__(self, process: Process, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._complained: set[str] = set()

    @classmethod
    def spawn(
        cls,
        argv: list[str],
        spec: Mapping[str, object],
        directory: Path,
        environment: Mapping[str, str],
    ) -> Self:
        """Start the process, which reads ``spec``. Raises OSError."""
        process = Process.spawn(
            argv,
            json.dumps(spec),
            identity=directory / "process.json",
            errors=directory / "errors.log",
            blocked=replay_job.STOP_SIGNALS,
            environment=environment,
        )
        return cls(process, directory)

    @classmethod
    def adopt(cls, directory: Path) -> Self | None:
        """Return the process that an earlier agent started there, dead or alive, or None."""
        try:
            process = Process.adopt(directory / "process.json")
        except (OSError, TypeError, ValueError) as error:
            log.warning("cannot adopt %s: %s", directory.name, error, extra={"action": "adopt"})
            return None
        return cls(process, directory) if process else None

    async def begun(self) -> None:
        """Return once the process reports that it runs, or is dead.

        For an adopted process, return only once it is dead.
        """
        await self._process.spoke()

    async def ended(self) -> GangExit:
        """Return how the process ended, from the file that it left or from its exit status."""
        status = await self._process.ended()
        left = self._read("exit.json")
        if left.get("outcome") in list(ExitOutcome):
            return GangExit(outcome=ExitOutcome(left["outcome"]), error=str(left.get("error", "")))
        return GangExit(outcome=ExitOutcome.FAILED, error=self._sudden_end(status))

    def progress(self) -> Progress | None:
        """Return the progress that the process wrote last, or None if none can be read."""
        written = self._read("progress.json")
        if not written:
            return None
        values = [written.get(name) for name in ("iterations", "iter_time_s")]
        numbers = [float(v) for v in values if _is_amount(v)]
        if len(numbers) < len(values):
            self._complain("progress.json", f"its values are {values}")
            return None
        runtime = written.get("runtime", "")
        if not isinstance(runtime, str):
            self._complain("progress.json", f"its runtime is {runtime!r}")
            runtime = ""
        return Progress(iterations=numbers[0], iter_time_s=numbers[1], runtime=runtime)

    def stop(self) -> None:
        """Ask the process to write a checkpoint and exit."""
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process immediately."""
        self._process.signal(signal.SIGKILL)

    def _sudden_end(self, status: int | None) -> str:
        if status is None:
            return "the process died while no agent watched it, and left no exit status"
        if status < 0:
            return f"the process was killed by {signal.Signals(-status).name}"
        try:
            path = str(self._directory / "errors.log")
            text = read_start(path, MAX_FILE_BYTES, from_end=True).decode(errors="replace")
        except (OSError, ValueError) as error:
            text = f"its error output cannot be read: {error}"
        last = text.strip().rpartition("\n")[2]
        message = last or f"no message; is there space left in {self._directory}?"
        return f"the process exited with status {status}: {message}"

    def _read(self, name: str) -> dict[str, Any]:
        """Return the contents of one of the process's files, or {} if it cannot be read."""
        try:
            return read_json(str(self._directory / name), MAX_FILE_BYTES) or {}
        except (OSError, ValueError) as error:
            self._complain(name, str(error))
            return {}

    def _complain(self, name: str, problem: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warning(
                "ignored %s of %s: %s",
                name,
                self._directory.name,
                problem,
                extra={"action": "read"},
            )


def _is_amount(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a number that progress may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < MAX_AMOUNT
