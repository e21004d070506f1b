"""The processes of a member that are left when its keeper has died: they are found and killed.

A living keeper ends all of its descendants itself. If it was killed, they go on under the machine's
first process. They are known by a mark in their environment, and by the identities that the keeper
has written down, because some programs overwrite their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Final

from tessera.service.agent.files import read_json
from tessera.service.agent.process import ProcessIdentity, boot_id, identity_of

log = logging.getLogger(__name__)

MARK_VARIABLE: Final = "TESSERA_MEMBER"
"""The variable by which the processes of a member are recognized."""

MARK_FILE: Final = "mark.json"
PROCESSES_FILE: Final = "processes.json"
"""Files in a member's directory: its mark, and the processes that its keeper has written down."""

PAUSE_S: Final = 0.05
"""Seconds between two looks at processes that were killed and are not dead yet."""

LOOKS: Final = 600
"""Number of looks after which processes that cannot be killed are given up and reported."""


def find_strays(mark: str, recorded: Path) -> list[ProcessIdentity]:
    """Return the living processes with ``mark`` in their environment, or in the file ``recorded``."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = {identity.pid: identity for identity in _recorded_identities(recorded)}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user and is not ours
            continue
        if wanted in environment.split(b"\0") and (identity := identity_of(int(entry.name))):
            found[identity.pid] = identity
    return [identity for identity in found.values() if _is_alive(identity)]


async def end_strays(mark: str, recorded: Path) -> None:
    """Kill the member's processes, and return once all are dead."""
    for _ in range(LOOKS):
        strays = find_strays(mark, recorded)
        if not strays:
            return
        _kill(strays)
        await asyncio.sleep(PAUSE_S)
    log.error(
        "processes %s of a member cannot be ended; restart the node",
        ", ".join(str(stray.pid) for stray in strays),
        extra={"action": "kill"},
    )


def read_mark(directory: Path) -> str:
    """Return the mark of the member with this directory, or "" if none was written there."""
    try:
        stored = read_json(str(directory / MARK_FILE)) or {}
    except (OSError, ValueError) as error:
        log.warning("cannot read the mark of a member: %s", error, extra={"action": "read"})
        return ""
    mark = stored.get("mark")
    return mark if isinstance(mark, str) else ""


def kill_member(directory: Path) -> None:
    """Kill the processes below the keeper of a member, whose description is damaged."""
    if mark := read_mark(directory):
        _kill(find_strays(mark, directory / PROCESSES_FILE))


def _kill(strays: list[ProcessIdentity]) -> None:
    for stray in strays:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(stray.pid, signal.SIGKILL)


def _recorded_identities(recorded: Path) -> list[ProcessIdentity]:
    """Return the processes that the keeper wrote down, as [pid, start in ticks] each."""
    try:
        stored = read_json(str(recorded)) or {}
        pairs = [(int(pid), int(ticks)) for pid, ticks in stored.get("processes", ())]
    except (OSError, TypeError, ValueError) as error:
        log.warning("cannot read %s: %s", recorded, error, extra={"action": "read"})
        return []
    boot = boot_id()
    return [ProcessIdentity(pid=pid, start_ticks=ticks, boot=boot) for pid, ticks in pairs]


def _is_alive(identity: ProcessIdentity) -> bool:
    """Return whether the process exists and is no zombie."""
    if identity_of(identity.pid) != identity:
        return False
    try:
        state = Path(f"/proc/{identity.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")
