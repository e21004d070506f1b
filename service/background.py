"""Work in a process of its own with the lowest priority, which delays neither rounds nor calls."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from tessera.formulation.clock import SystemClock
from tessera.formulation.errors import Unavailable

POLL_S: Final = 0.2
"""Seconds between checks whether the result is still wanted."""
LOWEST_PRIORITY: Final = 19

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks
_CLOCK: Final = SystemClock()

_A = TypeVar("_A")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that the work raised."""

    summary: str
    where: str


def run_in_process(
    work: Callable[[_A], _R],
    order: _A,
    cancelled: Callable[[], bool],
    *,
    name: str,
    limit_s: float = math.inf,
) -> _R | None:
    """Return ``work(order)`` from a process of its own, or None if it was cancelled. Blocks.

    ``work`` is a function of a module, and it and ``order`` can be pickled.

    Raises:
        Unavailable: the work raised an error, its process died, or it took longer than ``limit_s``.
    """
    end_s = _CLOCK.monotonic_s() + limit_s
    pipe, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs,), name=f"tessera-{name}", daemon=True)
    process.start()
    theirs.close()  # so that the pipe ends with the process
    try:
        pipe.send((work, order))
        while not pipe.poll(POLL_S):
            if cancelled():
                return None
            if _CLOCK.monotonic_s() > end_s:
                raise Unavailable(f"the {name} took longer than {limit_s:.0f} s and was ended")
        result: _R | _Failure = pipe.recv()
    except (EOFError, OSError):
        process.join(1.0)
        raise Unavailable(
            f"the process of the {name} died with the exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
        pipe.close()
    if isinstance(result, _Failure):
        failed = Unavailable(f"the {name} failed: {result.summary}")
        failed.add_note(result.where)
        raise failed
    return result


def _serve(pipe: Connection) -> None:
    """Do the work that arrives through ``pipe``. Runs in the process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its processes itself
    with contextlib.suppress(OSError):  # not allowed in some containers
        os.nice(LOWEST_PRIORITY)
    work, order = pipe.recv()
    result: Any
    try:
        result = work(order)
    except Exception as error:  # noqa: BLE001 - the outermost guard of this process
        result = _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send(result)
