"""Child processes, each with its own log. They are watched, and stopped in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.client.settings import VARIABLES as CLIENT_VARIABLES
from tessera.formulation.errors import Unavailable
from tessera.service.agent.files import make_private, open_private

TAIL_CHARS: Final = 2000
"""Characters of a log that are shown when its process has ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running child process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def require_running(self) -> None:
        """Raise Unavailable, with the end of its log, if the process has ended."""
        if (status := self.process.poll()) is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:].strip()
            raise Unavailable(
                f"{self.name} ended with status {status}; {self.log} ends with:\n{tail}"
            )


@contextlib.contextmanager
def run_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    grace_s: float,
    environment: Mapping[str, str | None] | None = None,
    keep_open: Sequence[int] = (),
) -> Iterator[Child]:
    """Run a Python module as a child for the duration of the block, then stop it.

    The child has its own session, so Ctrl-C at the terminal reaches only the parent, which stops
    its children in order. It does not get the variables with which this process calls other servers.
    It gets our variables with those of ``environment``, where None removes one. It is killed
    ``grace_s`` after SIGTERM. It inherits the files ``keep_open``.
    """
    folder = folder.resolve()
    make_private(str(folder))
    log = folder / f"{name}.log"
    ours = {key: value for key, value in os.environ.items() if key not in CLIENT_VARIABLES}
    inherited = {**ours, **(environment or {})}
    with os.fdopen(open_private(str(log)), "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={key: value for key, value in inherited.items() if value is not None},
            pass_fds=keep_open,
        )
    try:
        yield Child(name, process, log)
    finally:
        process.terminate()
        try:
            process.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: kill immediately
            process.kill()
            process.wait()


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
