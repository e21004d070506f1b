"""Tasks in processes of this machine, or in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing.connection import wait
from typing import Any, Final

from tessera.simulator.sweeps.tasks import ONE_THREAD, Task, TaskOutcome, answer_call

MAX_REPORTED_BYTES: Final = 8000
"""Number of bytes at the end of a failed task's output that are reported."""
_COMMAND: Final = ("-P", "-X", "faulthandler", "-m", "tessera.simulator.sweeps.worker")


def run_each(tasks: Sequence[Task], workers: int) -> Generator[TaskOutcome, None, None]:
    """Yield each task's outcome as it ends. Closing the iterator kills the tasks that run.

    With 0 ``workers``, tasks run one after the other in this process, and an error is raised.
    """
    if workers == 0:
        for task in tasks:
            yield TaskOutcome(task=task, result=answer_call(task.call))
        return
    waiting, idle, running = deque(tasks), list[_Worker](), dict[Any, _Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                worker = idle.pop() if idle else _Worker()
                running[worker.reply_pipe] = worker
                worker.begin(waiting.popleft())
            for pipe in wait(list(running)):
                outcome = running[pipe].wait_for_outcome()
                idle.append(running.pop(pipe))
                if outcome.failure:
                    idle.pop().end()
                yield outcome
    finally:
        for worker in (*idle, *running.values()):
            worker.end()


class _Worker:
    """A fresh interpreter that runs one task after another, in a separate session.

    An interrupt at the terminal therefore reaches only this process, which can end the other with
    everything that it started. A task that fails ends it.
    """

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("the process has pipes for input and output")
        self._calls = self._process.stdin
        self.reply_pipe = self._process.stdout.fileno()
        self._replies = os.fdopen(self.reply_pipe, "rb", closefd=False)

    def begin(self, task: Task) -> None:
        """Start ``task``. No other may be running."""
        self._task = task
        self._output.seek(0)
        self._output.truncate()
        with contextlib.suppress(BrokenPipeError):  # it has already ended; its status says how
            self._calls.write(f"{task.call}\n".encode())

    def wait_for_outcome(self) -> TaskOutcome:
        """Return the outcome once the process has answered or ended."""
        reply = self._replies.readline().decode()
        if reply.endswith("\n"):
            return TaskOutcome(task=self._task, result=reply)
        code = self._process.wait()
        self._output.seek(0)
        output = self._output.read()[-MAX_REPORTED_BYTES:].decode(errors="replace")
        cause = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        hint = " (possibly out of memory)" if code == -signal.SIGKILL else ""
        return TaskOutcome(task=self._task, failure=f"{output}its process ended {cause}{hint}")

    def end(self) -> None:
        """Kill the process with all that it started, unless it has ended, and close its files."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):  # it has ended in the meantime
                os.killpg(self._process.pid, signal.SIGKILL)
        with self._process, self._output:
            pass
