"""A process that carries out calls, one for each line of JSON, until its input ends.

``python -m tessera.simulator.sweeps.worker`` answers on its original standard output. The output of
tasks goes to standard error. A task that raises an error ends the process. The process also ends if
its parent has ended.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TextIO

from tessera.simulator.sweeps.tasks import answer_call


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", closefd=False)
    # The copy closes with the process, so that a reader that sees its end has all the output.
    os.dup2(2, 1)
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    # Processes that tasks start must not read the calls.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(asked, calls, busy), daemon=True).start()
    while call := calls.get():
        busy.set()
        reply = answer_call(call)
        busy.clear()
        replies.write(reply + "\n")
        replies.flush()


def _read(asked: TextIO, calls: queue.SimpleQueue[str], busy: threading.Event) -> None:
    """Pass the calls on, and an empty one at the end. End the process if a task still runs."""
    for call in asked:
        calls.put(call)
    calls.put("")
    if busy.is_set():
        os._exit(1)


if __name__ == "__main__":
    main()
