"""The warden of a node: it ends what holds GPUs when nobody else is left to do so.

An agent has one warden. Processes of jobs stop at the end of the agent's lease on their own. If
they cannot, because they hang, are stopped, or lost their keeper to SIGKILL, the warden kills them
before the server gives their GPUs to others.

It is run by path as ``python -S -E -s warden.py`` and reads the agent's data directory as JSON from
standard input. Its standard output is a pipe that only the agent reads, so it notices the agent's
end. It goes on until no process is left, or until the next agent has started another warden.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # without site, the checkout or site-packages must be named
    here = os.path.abspath(__file__)  # ROOT/tessera/service/agent
    sys.path[0] = here.rsplit(os.sep, 4)[0]

from tessera.service.agent.lease import LEASE_FILE, WARDEN_SHARE, LeaseWatch
from tessera.service.agent.process import ProcessIdentity, read_identity
from tessera.service.agent.strays import is_alive, kill_keeper, kill_marked

WARDEN_FILE = "warden.json"
"""The file in the agent's data directory with the identity of its present warden."""

TICK_S, TICK_SHARE = 1.0, 0.1
"""Seconds between two looks at the lease, and the share of a short margin that they may take."""

LEAST_TICK_S = 0.05


def guard(root: Path) -> None:
    """Guard the processes of the agent whose data directory is ``root``, until that is over."""
    lease = LeaseWatch(str(root / LEASE_FILE))
    output = select.poll()
    output.register(1, 0)  # an error means that nobody reads it any more
    has_agent, is_done = True, False
    while not _is_replaced(root):
        is_over = lease.must_be_dead(WARDEN_SHARE)
        if not has_agent or (is_over and not is_done):
            is_done = not end_members(root, lease)
            if is_done and not has_agent:
                return
        is_done = is_done and is_over  # nothing starts while the lease is over
        tick_s = min(TICK_S, max(LEAST_TICK_S, TICK_SHARE * lease.margin_s))
        if has_agent:
            has_agent = not output.poll(tick_s * 1000)
        else:
            time.sleep(tick_s)


def end_members(root: Path, lease: LeaseWatch) -> int:
    """Kill what nobody governs; return the number of members of which something was alive.

    These are the processes that a dead keeper has left and, once the lease is over, all others.
    """
    alive = 0
    for directory in find_members(root):
        process = _recorded(directory / "process.json")
        lives = process is not None and is_alive(process)
        # After the file was read: an agent renews its lease before it starts a process.
        is_over = lease.must_be_dead(WARDEN_SHARE)
        if lives and is_over and process is not None:
            kill_keeper(process)
        if (is_over or not lives) and kill_marked(directory):
            lives = True
        alive += lives
    return alive


def find_members(root: Path) -> Iterator[Path]:
    """Yield the directories of the members whose processes an agent has started."""
    for pattern in ("gangs/*/process.json", "gangs/*/member-*/process.json"):
        for identity in root.glob(pattern):
            yield identity.parent


def _is_replaced(root: Path) -> bool:
    """Return whether the next agent has started a warden of its own."""
    warden = _recorded(root / WARDEN_FILE)
    return warden is not None and warden.pid != os.getpid()


def _recorded(file: Path) -> ProcessIdentity | None:
    try:
        return read_identity(file)
    except (OSError, TypeError, ValueError):
        return None  # the agent says what is wrong with it


if __name__ == "__main__":
    if text := sys.stdin.read():
        guard(Path(json.loads(text)["root"]))
