"""The end of a server's process, which is certain whatever its threads do."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Final

log = logging.getLogger(__name__)

ABANDON_AFTER_S: Final = 0.4
"""Seconds after the grace period at which calls that still run are abandoned."""

EXIT_AFTER_S: Final = 0.9
"""Seconds after the grace period at which the process ends, even if closing takes longer."""


def end_by(
    grace_s: float, running: Callable[[], Iterable[str]], closings: Iterable[Callable[[], object]]
) -> threading.Event:
    """Ensure that this process ends within a second after ``grace_s``.

    Return the event that calls this off. A thread that Python cannot interrupt would keep the
    process alive for as long as it runs. After the grace period, the calls that still run are
    logged and ``closings`` are called. Then the process ends with code 0, because it was asked to
    end. This may fail because a thread holds the interpreter's lock or a closing takes too long. In
    that case the process ends with code 1 and prints the stacks of all threads on stderr.
    """
    off = threading.Event()
    faulthandler.dump_traceback_later(grace_s + EXIT_AFTER_S, exit=True)

    def leave() -> None:
        if off.wait(grace_s + ABANDON_AFTER_S):
            return
        names = sorted(running())
        log.warning(
            "the grace period is over; abandoning the calls that are still running",
            extra={"event": "calls_abandoned", "grace_s": grace_s, "calls": names},
        )
        for closing in closings:
            try:
                closing()
            except Exception:  # the outermost guard: all closings must run
                log.exception(
                    "cannot close a part of the server", extra={"event": "closing_failed"}
                )
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=leave, name="ending", daemon=True).start()
    return off


def end_in_order(off: threading.Event) -> None:
    """Call off what ``end_by`` began, because everything is closed."""
    off.set()
    faulthandler.cancel_dump_traceback_later()
