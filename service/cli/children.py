"""Child processes, each with its own log. They are watched, and stopped in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera.client.settings import VARIABLES as CLIENT_VARIABLES
from tessera.formulation.base.errors import Unavailable
from tessera.service.agent.files import make_private, open_private

TAIL_CHARS: Final = 2000
"""Characters of a log that are shown when its process has ended unexpectedly."""


@dataclass(slots=True, kw_only=True)
class Child:
    """A child process, which may be started again when it has ended."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    keep_open: Sequence[int]
    started: Callable[[str, int], None]
    """A function that is called with the name and number of each new process."""
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start the process. Its output is added to the log."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=self.environment,
                pass_fds=self.keep_open,
            )
        self.started(self.name, self.process.pid)

    def find_ending(self) -> str:
        """Return how the process ended, or "" while it runs."""
        status = self.process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def require_running(self) -> None:
        """Raise Unavailable, with the end of its log, if the process has ended."""
        if how := self.find_ending():
            raise Unavailable(f"{self.name} {how}; {end_of_log(self.log)}")

    def terminate(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def stop(self, grace_s: float) -> None:
        """End the process. It is killed ``grace_s`` after SIGTERM."""
        self.terminate()
        try:
            self.process.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: kill immediately
            self.process.kill()
            self.process.wait()


def end_of_log(log: Path) -> str:
    """Return the path of a log and its last lines, for an error."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{log} cannot be read ({error.strerror})"
    return f"{log} ends with:\n{text[-TAIL_CHARS:].strip()}"


@contextlib.contextmanager
def run_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    grace_s: float,
    environment: Mapping[str, str | None] | None = None,
    keep_open: Sequence[int] = (),
    started: Callable[[str, int], None] = lambda _name, _pid: None,
) -> Iterator[Child]:
    """Run a Python module as a child for the duration of the block, then stop it.

    The child has its own session, so Ctrl-C at the terminal reaches only the parent, which stops
    its children in order. It does not get the variables with which this process calls other servers.
    It gets our variables with those of ``environment``, where None removes one. It is killed
    ``grace_s`` after SIGTERM. It inherits the files ``keep_open``. ``started`` is called with the name
    and number of its process, and again whenever it is started again.
    """
    folder = folder.resolve()
    make_private(str(folder))
    log = folder / f"{name}.log"
    ours = {key: value for key, value in os.environ.items() if key not in CLIENT_VARIABLES}
    inherited = {**ours, **(environment or {})}
    os.close(open_private(str(log)))  # an empty one
    child = Child(
        name=name,
        command=[sys.executable, "-m", module, *arguments],
        environment={key: value for key, value in inherited.items() if value is not None},
        log=log,
        keep_open=keep_open,
        started=started,
    )
    child.start()
    try:
        yield child
    finally:
        child.stop(grace_s)


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
