"""Turns on a host's PCIe link by level: lower levels wait while a higher one transfers.

They are for programs that ask for them: data loaders, offload, checkpoints, and transports that
stage through host memory. Transfers between NICs and GPUs themselves (GPUDirect) take no turns, and
PCIe has no priorities that an agent can set.

There is a lock file for each link and level, in a directory that the host's jobs share (/dev/shm).
A process that dies gives its turn back. Waiting is bounded, so nobody starves. A running transfer
is not interrupted.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tessera.formulation.errors import InvalidInput

TURN_DIRECTORY = Path("/dev/shm/tessera-pcie")  # noqa: S108 - jobs of one host share it on purpose
SHARED_MODE = 0o1777


def make_turn_directory(directory: Path = TURN_DIRECTORY) -> Path:
    """Make the directory for jobs of all users. The agent calls this. Raises OSError.

    Anyone may have put something in its place, so a link is refused and not opened to all users.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != SHARED_MODE:
            os.fchmod(descriptor, SHARED_MODE)  # otherwise another user's agent made it
    finally:
        os.close(descriptor)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTurns:
    """A job's view of the links.

    ``patience_s`` is the longest wait. ``sleep`` is a function such as ``time.sleep``.
    """

    directory: Path
    level: int
    levels: int
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    patience_s: float = 0.01
    poll_s: float = 0.0002

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if not 0 <= self.level < self.levels:
            raise InvalidInput("level", f"must be 0 to {self.levels - 1}, not {self.level}")
        if not (self.patience_s >= 0 and self.poll_s > 0):
            raise InvalidInput("patience_s", "must be at least 0, and poll_s above 0")

    @contextmanager
    def hold(self, link: str) -> Iterator[float]:
        """Hold ``link`` (such as a root port's PCI address); yield the seconds waited.

        Jobs of one level hold it together. Raises OSError: the directory cannot be used.
        """
        higher = [self._open(link, level) for level in range(self.level + 1, self.levels)]
        own = self._open(link, self.level)
        try:
            begun_s = now_s = self.clock()
            while any(map(_busy, higher)) and now_s < begun_s + self.patience_s:
                self.sleep(self.poll_s)
                now_s = self.clock()
            fcntl.flock(own, fcntl.LOCK_SH)
            yield now_s - begun_s
        finally:
            for descriptor in (own, *higher):
                os.close(descriptor)

    def _open(self, link: str, level: int) -> int:
        name = link.replace("/", "_")
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self.directory / f"{name}.{level}", flags, 0o644)


def _busy(descriptor: int) -> bool:
    """Return whether somebody holds the turn of that file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
