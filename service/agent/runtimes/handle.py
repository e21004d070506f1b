"""The handle of a member whose process leaves its progress and its end in files."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeGuard

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.execution_plan import read_execution_plan
from tessera.formulation.job.exit_reasons import ExitReason
from tessera.service.agent.files import read_json, read_start
from tessera.service.agent.process import Process
from tessera.service.agent.runtimes.protocol import ExitOutcome, MemberExit, Progress
from tessera.v1 import agents_pb2 as pb
from tessera.v1 import launch_pb2

log = logging.getLogger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM,)
"""Signals that the spawner blocks from the first instruction on, and that the process waits for."""

MAX_AMOUNT: Final = 1e18
"""The bound above which numbers of iterations, seconds and bytes mean nothing."""

MAX_LOSS: Final = 1e300
"""The bound above which a loss means nothing."""

MAX_FILE_BYTES: Final = 65_536
"""The largest number of bytes that are read from a file of a member's process."""

MAX_TEXT_CHARS: Final = 4000

NEEDED_AMOUNTS: Final = ("iterations_done", "iter_time_s")
"""Fields without which a report of progress is ignored."""

RESTART_PARTS: Final = tuple(launch_pb2.RestartTimes.DESCRIPTOR.fields_by_name)


class ProcessHandle:
    """A member's process and the files that it leaves in the member's directory.

    The agent carries on whatever the process leaves there. A file that cannot be read counts as
    empty, and this is logged once.
    """

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self._complained: set[str] = set()

    @classmethod
    def spawn(
        cls,
        argv: list[str],
        spec: Mapping[str, object],
        directory: Path,
        environment: Mapping[str, str],
        blocked: tuple[signal.Signals, ...] = STOP_SIGNALS,
    ) -> Self:
        """Start the process, which reads ``spec`` and waits for the ``blocked`` signals.

        Raises:
            OSError: it could not be started.
        """
        process = Process.spawn(
            argv,
            json.dumps(spec),
            identity=directory / "process.json",
            errors=directory / "errors.log",
            blocked=blocked,
            environment=environment,
        )
        return cls(process, directory)

    @classmethod
    def adopt(cls, directory: Path) -> Self | None:
        """Return the process that an earlier agent started there, dead or alive, or None."""
        try:
            process = Process.adopt(directory / "process.json")
        except (OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot adopt a process",
                extra={"event": "process_not_adopted", "gang": directory.name, "error": error},
            )
            return None
        return cls(process, directory) if process else None

    async def begun(self) -> None:
        """Return once the process reports that it runs, or is dead.

        For an adopted process, return only once it is dead.
        """
        await self.process.spoke()

    async def ended(self) -> MemberExit:
        """Return how the process ended, from the file that it left or from its exit status."""
        status = await self.process.ended()
        left = self._read("exit.json")
        if left.get("outcome") in list(ExitOutcome):
            return MemberExit(
                outcome=ExitOutcome(left["outcome"]),
                error=str(left.get("error", ""))[:MAX_TEXT_CHARS],
                reason=_reason_of(left.get("reason", "")),
            )
        exited = status is not None and status >= 0
        return MemberExit(
            outcome=ExitOutcome.FAILED,
            error=self._sudden_end(status),
            reason=ExitReason.ERROR if exited else ExitReason.KILLED,
        )

    def observe(self) -> Progress | None:
        """Return the progress that the process wrote last, or None if none can be read."""
        written = self._read("progress.json")
        if not written:
            return None
        values = [written.get(name) for name in NEEDED_AMOUNTS]
        if not all(map(_is_amount, values)):
            self._complain("progress.json", f"its values are {values}")
            return None
        report = pb.ObservedGang(memory_bytes=int(_amount(written, "memory_bytes") or 0))
        for name in (*NEEDED_AMOUNTS, "checkpoint_iterations", "resumed_iterations"):
            if (amount := _amount(written, name)) is not None:
                setattr(report, name, amount)
        for name in ("runtime", "remark"):
            if isinstance(text := written.get(name), str):
                setattr(report, name, text[:MAX_TEXT_CHARS])
        if _is_loss(loss := written.get("loss")):
            report.loss = float(loss)
        if isinstance(times := written.get("restart_times"), dict):
            parts = {name: _amount(times, name) or 0.0 for name in RESTART_PARTS}
            report.restart_times.CopyFrom(launch_pb2.RestartTimes(**parts))
        if plan := self._executed_plan(written):
            report.executed_plan = plan
            report.executed_iter_time_s = _amount(written, "executed_iter_time_s") or 0.0
            report.planned_iter_time_s = _planned_s(written)
        return Progress(report=report, checkpoint_s=_amount(written, "checkpoint_s") or 0.0)

    def request_checkpoint(self) -> None:
        """Do nothing: a replayed job writes checkpoints regularly, and a profiling task has none."""

    def stop(self) -> None:
        """Ask the process to write a checkpoint and exit."""
        self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process immediately."""
        self.process.signal(signal.SIGKILL)

    def _executed_plan(self, written: Mapping[str, object]) -> str:
        """Return the canonical JSON of the plan that tuning found, or "" without a valid one."""
        text = written.get("executed_plan")
        if not isinstance(text, str) or not text:
            return ""
        try:
            return read_execution_plan("executed_plan", text).to_json()
        except InvalidInput as error:
            self._complain("progress.json", str(error))
            return ""

    def _sudden_end(self, status: int | None) -> str:
        if status is None:
            return "the process died while no agent watched it, and left no exit status"
        if status < 0:
            return f"the process was killed by {_signal_name(-status)}"
        try:
            path = str(self.directory / "errors.log")
            text = read_start(path, MAX_FILE_BYTES, from_end=True).decode(errors="replace")
        except (OSError, ValueError) as error:
            text = f"its error output cannot be read: {error}"
        last = text.strip().rpartition("\n")[2]
        message = last or f"no message; is there space left in {self.directory}?"
        return f"the process exited with status {status}: {message}"

    def _read(self, name: str) -> dict[str, Any]:
        """Return the contents of one of the process's files, or {} if it cannot be read."""
        try:
            return read_json(str(self.directory / name), MAX_FILE_BYTES) or {}
        except (OSError, ValueError) as error:
            self._complain(name, str(error))
            return {}

    def _complain(self, name: str, problem: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warning(
                "ignored a file of a gang's process",
                extra={
                    "event": "report_ignored",
                    "gang": self.directory.name,
                    "file": name,
                    "error": problem,
                },
            )


def _signal_name(number: int) -> str:
    known = number in list(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"


def _reason_of(value: object) -> ExitReason | None:
    known = isinstance(value, str) and value in list(ExitReason)
    return ExitReason(str(value)) if known else None


def _planned_s(written: Mapping[str, object]) -> float:
    """Return the seconds of the plan that was sent: infinite if it was tried and does not run."""
    value = written.get("planned_iter_time_s", 0.0)
    return math.inf if value is None else _amount(written, "planned_iter_time_s") or 0.0


def _amount(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if _is_amount(value) else None


def _is_amount(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a number that progress may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < MAX_AMOUNT


def _is_loss(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MAX_LOSS < value < MAX_LOSS
