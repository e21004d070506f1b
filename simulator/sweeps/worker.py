"""A process that carries out calls, one for each line of JSON, until it is killed.

``python -m tessera.simulator.sweeps.worker`` answers on its original standard output. The output of
tasks goes to standard error. A task that raises an error ends the process. The process also ends
soon after its parent.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from tessera.simulator.sweeps.tasks import answer_call

PARENT_CHECK_S: Final = 0.5
"""Seconds between checks of whether the parent still lives."""


def main() -> None:
    """Answer each line of standard input."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    calls, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for call in calls:
        replies.write(answer_call(call) + "\n")
        replies.flush()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
