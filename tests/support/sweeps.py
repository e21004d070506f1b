"""Functions for sweeps to run in other processes, and tasks that call them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tessera.simulator.sweeps.tasks import Task
from tests.support.waiting import until


def a_task(name: str, function: str = "drawn", **options: Any) -> Task:
    return Task(name=name, function=f"{__name__}:{function}", options=options)


def drawn(seed: int, count: int = 3) -> dict[str, Any]:
    """Return numbers that depend only on the seed, including values that JSON cannot express."""
    numbers = np.random.default_rng(seed).normal(size=count)
    matrix = np.outer(numbers, numbers)
    return {
        "numbers": tuple(float(n) for n in numbers),
        "trace": float(np.trace(matrix @ matrix)),
        "nothing": None,
        "by number": {1: "one"},
        "no bound": float("inf"),
    }


def counted(file: str, seed: int) -> dict[str, Any]:
    """Add a line to ``file``, whose lines count the calls."""
    with Path(file).open("a") as lines:
        lines.write(f"{seed}\n")
    return {"seed": seed}


def needs(file: str, seed: int) -> dict[str, Any]:
    """Return the text of ``file``, or fail if it does not exist."""
    print(f"looking for {Path(file).name}")
    return {"text": Path(file).read_text(), "seed": seed}


def length(file: str) -> dict[str, Any]:
    return {"length": len(Path(file).read_text())}


def leaves(status: int) -> dict[str, Any]:
    """End the process without an exception."""
    os._exit(status)


def killed() -> dict[str, Any]:
    """End like a process that took too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def interrupts(pid: int, kept: str) -> dict[str, Any]:
    """Interrupt a process like Ctrl-C once a result is in the folder ``kept``, and never end."""
    until(lambda: list(Path(kept).glob("*.json")), "a result is in the folder")
    os.kill(pid, signal.SIGINT)
    signal.pause()
    return {}


def hangs(file: str) -> dict[str, Any]:
    """Write the process id into ``file``, and never end."""
    Path(f"{file}.partial").write_text(str(os.getpid()))
    Path(f"{file}.partial").rename(file)
    signal.pause()
    return {}


def noisy(seed: int) -> dict[str, Any]:
    """Print to the stream of answers, from Python and as a C library would, and read from stdin."""
    assert os.read(0, 100) == b""
    print("one\ntwo")
    os.write(1, b'{"fake": 1}\n')
    sys.stderr.write("three\n")
    return {"seed": seed}


def a_list() -> list[int]:
    return [1]
