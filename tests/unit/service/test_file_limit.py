"""A server may open as many files as the system allows."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from tessera.service.file_limit import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised_limit(soft: int, hard: int) -> list[int]:
    """Return the limit that a process with these limits gets, and its limits after that."""
    script = SCRIPT.format(soft=soft, hard=hard)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [int(text) for text in done.stdout.split()]


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows() -> None:
    assert raised_limit(256, 512) == [512, 512, 512]


def test_a_limit_that_cannot_be_raised_stays() -> None:
    assert raised_limit(512, 512) == [512, 512, 512]
