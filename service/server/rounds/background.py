"""Long computations in a process of their own, with a lower priority than the server.

They delay neither rounds nor calls, and end at once when nobody wants them any more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from tessera.formulation.base.errors import TesseraError, Unavailable
from tessera.formulation.base.logs import begin_ids, current_ids, log_as_parent, settings_in_use
from tessera.service.server.rounds.worker import RaisedError

POLL_S: Final = 0.2
"""Seconds between checks whether the result is still wanted."""
FOR_NOBODY: Final = 19
"""The niceness of what nobody waits for. It gets only the time that all others leave."""
FOR_CALLER: Final = 5
"""The niceness of what a caller waits for. Rounds get three times its share of a busy core."""

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would copy other threads' locks

_A = TypeVar("_A")
_R = TypeVar("_R")


def run_in_process(
    work: Callable[[_A], _R],
    order: _A,
    cancelled: Callable[[], bool],
    *,
    name: str,
    niceness: int = FOR_NOBODY,
) -> _R | None:
    """Return ``work(order)`` from a process of its own, or None if it was cancelled. Blocks.

    ``work`` is a function of a module, and it and ``order`` can be pickled.

    Raises:
        TesseraError: what the work raised.
        Unavailable: the work raised another error, or its process died.
    """
    pipe, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(
        target=_serve,
        args=(theirs, name, niceness, settings_in_use(), current_ids()),
        name=f"tessera-{name}",
        daemon=True,
    )
    process.start()
    theirs.close()  # so that the pipe ends with the process
    try:
        pipe.send((work, order))
        while not pipe.poll(POLL_S):
            if cancelled():
                return None
        result: _R | RaisedError = pipe.recv()
    except (EOFError, OSError):
        process.join(1.0)
        raise Unavailable(
            f"the process of the {name} died with exit code {process.exitcode}; if this happens again,"
            " look whether the server's machine has enough memory"
        ) from None
    finally:
        process.kill()
        process.join()
        pipe.close()
    if isinstance(result, RaisedError):
        raise result.error()
    return result


def _serve(
    pipe: Connection, name: str, niceness: int, log_settings: tuple[int, str], ids: dict[str, Any]
) -> None:
    """Do the work that arrives through ``pipe``. Runs in the process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its processes itself
    log_as_parent(log_settings)
    begin_ids(**ids)
    with contextlib.suppress(OSError):  # not allowed in some containers
        os.nice(niceness)
    work, order = pipe.recv()
    result: Any
    try:
        result = work(order)
    except TesseraError as error:
        result = RaisedError.of(error)
    except Exception as error:  # noqa: BLE001 - the outermost guard of this process
        failed = Unavailable(f"the {name} failed: {type(error).__name__}: {error}")
        failed.add_note(traceback.format_exc())
        result = RaisedError.of(failed)
    pipe.send(result)
