"""The end of an agent's lease, as every process of its node that holds GPUs reads it.

The agent writes down when a server last recorded one of its messages, for how long that holds, and
the margin after which the server gives the GPUs away. All times are of this machine's boot clock,
which also counts while the machine is suspended, and which nobody can set. No two machines' clocks
are compared.

Keepers and replayed jobs import this module, so it needs only the standard library and ``files.py``.
"""

from __future__ import annotations

import math
import time

from tessera.service.agent.files import read_json, read_trusted

LEASE_S, MARGIN_S = 30.0, 15.0
"""The lease and the margin of a process that has never read them: those of a server's defaults."""

KILL_SHARE, WARDEN_SHARE = 0.4, 0.55
"""The shares of the margin after which a keeper kills its program, and the warden all that is left.

The rest is for the server's clock, which may be set forward by up to 5 s before anybody notices, and
for processes that take time to die.
"""

LEASE_FILE = "lease.json"
"""The file in the agent's data directory. It has a fixed length, so it is replaced on a full disk, too."""

MAX_FILE_BYTES = 65_536


def read_boot_s() -> float:
    """Return the seconds since this machine started, with the time for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return read_trusted("/proc/sys/kernel/random/boot_id").strip()


class LeaseWatch:
    """The lease of the agent that a process works for.

    A file that is missing or damaged changes nothing: the last good one counts, and without any, a
    usual lease from now on. A file of another boot is a lease that is over.
    """

    def __init__(self, path: str) -> None:
        """Read the file at ``path``. If it is "", there is no lease."""
        self._path = path
        self._heard_s = read_boot_s() if path else math.inf
        self.lease_s, self.margin_s = LEASE_S, MARGIN_S
        self._boot = boot_id()
        self._is_known = False  # whether a good file was read
        self._read()

    def left_s(self) -> float:
        """Return the seconds until processes must be asked to stop, negative once that is past."""
        self._read()
        return self._heard_s + self.lease_s - read_boot_s()

    def must_be_dead(self, share: float = KILL_SHARE) -> bool:
        """Return whether ``share`` of the margin is past, too, so that nothing may be alive."""
        return self.left_s() + share * self.margin_s <= 0

    def _read(self) -> None:
        if not self._path:
            return
        try:
            stored = read_json(self._path, MAX_FILE_BYTES) or {}
            boot = str(stored["boot"])
            heard_s, lease_s, margin_s = (
                float(stored[name]) for name in ("heard_s", "lease_s", "margin_s")
            )
        except (KeyError, OSError, TypeError, ValueError):
            return
        if boot != self._boot:
            self._heard_s = self._heard_s if self._is_known else -math.inf
        elif not (0 <= heard_s <= read_boot_s() and lease_s > 0 and margin_s >= 0):
            return
        elif heard_s >= self._heard_s or not self._is_known:
            self._heard_s, self.lease_s, self.margin_s = heard_s, lease_s, margin_s
            self._is_known = True
