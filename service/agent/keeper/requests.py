"""The requests to a keeper, which come as signals and wake it at once."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

STOP, CHECKPOINT = signal.SIGTERM, signal.SIGUSR1
SIGNALS = (STOP, CHECKPOINT)

MAX_WAITING = 256
"""The number of signals that are taken at a time. They ask for the same again."""


class Requests:
    """The signals that have come since they were last taken."""

    def __init__(self) -> None:
        """Catch the signals, which the spawner has blocked, from now on."""
        self.descriptor, writer = os.pipe()
        for end in (self.descriptor, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def take(self) -> set[int]:
        """Return the numbers of the signals that have come. ``descriptor`` is readable before."""
        try:
            return set(os.read(self.descriptor, MAX_WAITING))
        except BlockingIOError:
            return set()


def _note(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal's number is in the pipe already."""
