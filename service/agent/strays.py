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

from tessera.service.agent.files import MAX_BYTES, read_json, read_start
from tessera.service.agent.keeper.children import find_descendants
from tessera.service.agent.lease import boot_id
from tessera.service.agent.process import MAX_STAT_BYTES, ProcessIdentity, identity_of

log = logging.getLogger(__name__)

MARK_VARIABLE: Final = "TESSERA_MEMBER"
"""The variable by which the processes of a member are recognized."""

MARK_FILE: Final = "mark.json"
PROCESSES_FILE: Final = "processes.json"
"""The files in a member's directory with its mark, and with the processes that its keeper knows."""

KILLS: Final = 100
"""Number of times that the processes below a keeper are killed, if they go on starting others."""

PAUSE_S: Final = 0.05
"""Seconds between two looks at processes that were killed and are not dead yet."""

LOOKS: Final = 600
"""Number of looks after which processes that cannot be killed are given up and reported."""


def find_strays(directory: Path) -> list[ProcessIdentity]:
    """Return the living processes of the member whose directory this is.

    They have its mark in their environment, or its keeper has written them down.
    """
    recorded = _recorded_identities(directory / PROCESSES_FILE)
    found = {identity.pid: identity for identity in recorded}
    if mark := find_mark(directory):
        wanted = f"{MARK_VARIABLE}={mark}".encode()
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            try:
                environment = read_start(f"{entry.path}/environ", MAX_BYTES)
            except OSError:  # it has ended, or belongs to another user and is not ours
                continue
            if wanted in environment.split(b"\0") and (identity := identity_of(int(entry.name))):
                found[identity.pid] = identity
    return [identity for identity in found.values() if is_alive(identity)]


def kill_marked(directory: Path) -> list[ProcessIdentity]:
    """Kill the member's processes once; return those that were alive."""
    strays = find_strays(directory)
    for stray in strays:
        _kill(stray)
    return strays


def kill_keeper(keeper: ProcessIdentity) -> None:
    """Kill the processes below a keeper, however it hangs, and then the keeper itself.

    As long as it exists it is the parent of all of them. Later they are only found by what they
    carry, or by what it wrote down.
    """
    for _ in range(KILLS):
        found = [identity_of(pid) for pid in find_descendants(keeper.pid)]
        below = [process for process in found if process is not None and is_alive(process)]
        if not below or not is_alive(keeper):
            break
        for process in below:
            _kill(process)
    if is_alive(keeper):
        _kill(keeper)


def _kill(process: ProcessIdentity) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGKILL)


async def end_strays(directory: Path) -> None:
    """Kill the member's processes, and return once all are dead."""
    for _ in range(LOOKS):
        if not (strays := kill_marked(directory)):
            return
        await asyncio.sleep(PAUSE_S)
    log.error(
        "processes of a member cannot be ended; restart the node",
        extra={
            "event": "processes_left",
            "member": directory.name,
            "pids": [stray.pid for stray in strays],
        },
    )


def find_mark(directory: Path) -> str:
    """Return the mark of the member's processes, or "" if it had none."""
    try:
        stored = read_json(str(directory / MARK_FILE)) or {}
    except (OSError, ValueError) as error:
        log.warning(
            "cannot read the mark of a member",
            extra={"event": "mark_unread", "member": directory.name, "error": error},
        )
        return ""
    mark = stored.get("mark", "")
    return mark if isinstance(mark, str) else ""


def _recorded_identities(recorded: Path) -> list[ProcessIdentity]:
    """Return the processes that the keeper wrote down, as [pid, start in ticks] each."""
    try:
        stored = read_json(str(recorded)) or {}
        pairs = [(int(pid), int(ticks)) for pid, ticks in stored.get("processes", ())]
    except (OSError, TypeError, ValueError) as error:
        log.warning(
            "cannot read the processes of a member",
            extra={"event": "processes_unread", "file": recorded, "error": error},
        )
        return []
    boot = boot_id()
    return [ProcessIdentity(pid=pid, start_ticks=ticks, boot=boot) for pid, ticks in pairs]


def is_alive(identity: ProcessIdentity) -> bool:
    """Return whether the process exists and is no zombie."""
    if identity_of(identity.pid) != identity:
        return False
    try:
        stat = read_start(f"/proc/{identity.pid}/stat", MAX_STAT_BYTES)
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
