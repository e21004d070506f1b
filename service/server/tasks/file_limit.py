"""The number of files and connections that this process may have open."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

MAX_OPEN_FILES: Final = 65_536
"""Number of open files that is enough: the streams of all agents and watchers, several times."""


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it; return how many.

    The usual limit of 1,024 is for programs that use ``select``. A server has a file for each
    connection, so anybody who opens 1,024 would keep others out.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the limit stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
