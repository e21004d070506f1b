"""The ranks of a node, which both launchers start in the same way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def run_ranks(words: Sequence[str], first_rank: int, count: int, world: int) -> int:
    """Run a program on each GPU of a node, and return the first status that is not 0, or 0."""
    processes = [
        subprocess.Popen(
            words,
            env={
                **os.environ,
                "RANK": str(first_rank + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
            },
        )
        for local in range(count)
    ]
    return next(filter(None, [process.wait() for process in processes]), 0)
