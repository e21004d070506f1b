"""Tasks in processes of this machine, or in this process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

from tessera.simulator.sweeps.tasks import ONE_THREAD, Task, TaskOutcome, answer_call

MAX_REPORTED_BYTES: Final = 8000
"""Number of bytes at the end of a failed task's standard error that are reported."""
EXIT_TIMEOUT_S: Final = 10.0
"""Seconds that a process without work may take to end before it is killed."""


def process_outcomes(tasks: Sequence[Task], workers: int) -> Generator[TaskOutcome, None, None]:
    """Yield each task's outcome as it ends. Closing the iterator kills the tasks that run."""
    processes = [_Worker() for _ in range(max(1, min(workers, len(tasks))))]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def run(task: Task) -> TaskOutcome:
        worker = idle.get()
        try:
            return worker.run(task)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(max_workers=len(processes))
    left = len(tasks)
    try:
        for done in as_completed([pool.submit(run, task) for task in tasks]):
            left -= 1
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            if left:
                process.kill()
        pool.shutdown(wait=True)
        for process in processes:
            process.close()


def inline_outcomes(tasks: Sequence[Task]) -> Generator[TaskOutcome, None, None]:
    """Yield each task's outcome, one after the other in this process.

    An error of a task is raised.
    """
    for task in tasks:
        yield TaskOutcome(task=task, result=answer_call(task.call))


class _Worker:
    """A process that runs one task after another, and is replaced if a task ends it.

    It is a fresh interpreter in a separate session. An interrupt at the terminal therefore reaches
    only this process, which can end the worker together with everything that it started.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._killed = False
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker

    def run(self, task: Task) -> TaskOutcome:
        """Run ``task`` and wait for it."""
        self._stderr.seek(0)
        self._stderr.truncate()
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the process has pipes for input and output")
        reply = ""
        with contextlib.suppress(
            BrokenPipeError
        ):  # the process ended before it read; its status says how
            process.stdin.write(task.call + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        if reply.endswith("\n"):
            return TaskOutcome(task=task, result=reply)
        code = self._end()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_REPORTED_BYTES))
        output = self._stderr.read().decode(errors="replace")
        return TaskOutcome(task=task, failure=f"{output}its process ended {_how(code)}")

    def kill(self) -> None:
        """End the process with all that it started, and do not start another."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                _kill(self._process)

    def close(self) -> None:
        """Wait for the process to end, and release its resources. No task may be running."""
        if self._process is not None:
            self._end()
        self._stderr.close()

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._killed:
                raise RuntimeError("the sweep was stopped")
            if self._process is None:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-X",
                        "faulthandler",
                        "-m",
                        "tessera.simulator.sweeps.worker",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                    env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            return self._process

    def _end(self) -> int:
        """Wait for the process to end, and return its exit status."""
        with self._lock:
            process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError("the process exists and has pipes for input and output")
        with contextlib.suppress(BrokenPipeError):  # the process has not read all calls
            process.stdin.close()
        try:
            code = process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            code = process.wait()
        process.stdout.close()
        return code


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        os.killpg(process.pid, signal.SIGKILL)


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit status {code}"
    name = signal.Signals(-code).name
    return f"by {name}" + (" (possibly out of memory)" if name == "SIGKILL" else "")
