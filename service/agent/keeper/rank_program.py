"""The first program of each rank: it joins the rank to its keeper, and becomes the user's program.

A launcher starts it once for each GPU as ``rank_program.py INBOX OUTBOX PROGRAM ARGUMENT...``,
with the user's interpreter, of Python 3.6 or later. It sends the rank's output into the rank's own pipe, and
writes the process's id, by which the keeper asks the rank to stop.
"""

import os
import sys


def join_keeper(inbox: str, outbox: str) -> None:
    """Send the output to the rank's pipe in ``inbox``, and write the process's id into ``outbox``."""
    rank = os.environ["LOCAL_RANK"]
    pipe = os.open(os.path.join(inbox, f"rank-{rank}.pipe"), os.O_WRONLY)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    path = os.path.join(outbox, f"rank-{rank}.pid")
    temporary = f"{path}.tmp"
    with open(temporary, "w") as file:
        file.write(str(os.getpid()))
    os.rename(temporary, path)


if __name__ == "__main__":
    join_keeper(sys.argv[1], sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606 - the point of it
