"""A process that carries out calls, a line of JSON each, until there are no more.

``python -m benchmarks.sweeps.worker`` answers on the standard output that it was given; what tasks
print goes to standard error. A task that raises ends the process.
"""

from __future__ import annotations

import os
import sys

from benchmarks.sweeps.tasks import answer


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", closefd=False)
    os.dup2(2, 1)  # the copy ends with the process: who sees its end has all that was said before
    for call in sys.stdin:
        replies.write(answer(call) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
