"""Long computations in a process of their own, with a lower priority than the server.

They delay neither rounds nor calls, and end at once when nobody wants them any more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from tessera.formulation.errors import TesseraError, Unavailable
from tessera.service.worker import RaisedError

OrderT = TypeVar("OrderT")
AnswerT = TypeVar("AnswerT")

POLL_S: Final = 0.2
"""Seconds between checks whether a computation is still wanted."""
FOR_NOBODY: Final = 19
"""The niceness of what nobody waits for. It gets only the time that all others leave."""
FOR_CALLER: Final = 5
"""The niceness of what a caller waits for. Rounds get three times its share of a busy core."""

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks


class ProcessDied(Unavailable):
    """The process of a computation died before it had an answer."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(
            f"the process that computes the answer died with exit code {exit_code}; call again, and if"
            " it dies again, look whether the server's machine has enough memory"
        )
        self.exit_code = exit_code


def compute_in_process(
    compute: Callable[[OrderT], AnswerT],
    order: OrderT,
    cancelled: Callable[[], bool],
    niceness: int,
) -> AnswerT | None:
    """Return ``compute(order)`` from a process of its own, or None if it was cancelled. Blocks.

    Order and answer are pickled, and ``compute`` is a function of a module.

    Raises:
        ProcessDied: there is no answer. TesseraError: what ``compute`` raised.
    """
    pipe, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(
        target=_serve, args=(theirs, compute, niceness), name="tessera-background", daemon=True
    )
    process.start()
    theirs.close()  # so that the pipe ends with the process
    try:
        pipe.send(order)
        while not pipe.poll(POLL_S):
            if cancelled():
                return None
        found: Any = pipe.recv()
    except (EOFError, OSError):
        process.join(1.0)
        raise ProcessDied(process.exitcode) from None
    finally:
        process.kill()
        process.join()
        pipe.close()
    if isinstance(found, RaisedError):
        raise found.error()
    answer: AnswerT = found
    return answer


def _serve(pipe: Connection, compute: Callable[[Any], Any], niceness: int) -> None:
    """Answer the order that arrives through ``pipe``. Runs in the process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its processes itself
    with contextlib.suppress(OSError):  # not allowed in some containers
        os.nice(niceness)
    order = pipe.recv()
    try:
        answer = compute(order)
    except TesseraError as error:
        answer = RaisedError.of(error)
    pipe.send(answer)
