"""Functions that sweeps run in other processes, and tasks that call them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tessera.simulator.sweeps.tasks import Task


def a_task(name: str, function: str = "drawn", **options: Any) -> Task:
    return Task(name=name, function=f"{__name__}:{function}", options=options)


def drawn(seed: int, count: int = 3) -> dict[str, Any]:
    """Return numbers that depend on the seed alone, as values that JSON has no word for, too."""
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
    """Add a line to ``file``, which says how often this ran."""
    with Path(file).open("a") as lines:
        lines.write(f"{seed}\n")
    return {"seed": seed}


def needs(file: str, seed: int) -> dict[str, Any]:
    """Fail unless ``file`` is there."""
    print(f"looking for {Path(file).name}")
    return {"text": Path(file).read_text(), "seed": seed}


def length(file: str) -> dict[str, Any]:
    return {"length": len(Path(file).read_text())}


def leaves(status: int) -> dict[str, Any]:
    """End the process without an exception."""
    os._exit(status)


def killed() -> dict[str, Any]:
    """End as a process does that took too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def interrupts(pid: int, kept: str) -> dict[str, Any]:
    """Interrupt a process as Ctrl-C does, once a result is in the folder ``kept``; never end."""
    while not list(Path(kept).glob("*.json")):
        os.sched_yield()
    os.kill(pid, signal.SIGINT)
    signal.pause()
    return {}


def hangs(file: str) -> dict[str, Any]:
    """Write the number of the process into ``file``, and never end."""
    Path(f"{file}.partial").write_text(str(os.getpid()))
    Path(f"{file}.partial").rename(file)
    signal.pause()
    return {}


def noisy(seed: int) -> dict[str, Any]:
    """Print where the answer is written, as Python and as a library in C would; read where calls come."""
    assert os.read(0, 100) == b""
    print("one\ntwo")
    os.write(1, b'{"fake": 1}\n')
    sys.stderr.write("three\n")
    return {"seed": seed}


def a_list() -> list[int]:
    return [1]
