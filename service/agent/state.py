"""The state that an agent keeps on disk, so that its restart changes nothing for its gangs."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Final
from urllib.parse import quote
from uuid import uuid4

from tessera.formulation.base.errors import InvalidInput, NotAllowed
from tessera.service.agent.files import (
    PASSAGE,
    change_mode,
    make_private,
    move_folder,
    open_private,
    overwrite_json,
    read_json,
    remove_tree,
    write_json,
)
from tessera.service.agent.gangs import GangKey, gang_from_json, gang_to_json, key_of
from tessera.service.agent.lease import LEASE_FILE, boot_id
from tessera.service.agent.process import read_identity
from tessera.service.agent.strays import kill_keeper, kill_marked
from tessera.v1 import agents_pb2 as pb

log = logging.getLogger(__name__)

REMOVED: Final = "removed"
"""The folder of what is being deleted, in the agent's data directory."""

LEASE_BYTES: Final = 256
"""The length of the file of the lease: more than any that is written."""


class StateDir:
    """The agent's directory: ``gangs/JOB@GENERATION/``, ``lease.json`` and ``agent.lock``."""

    def __init__(self, root: Path, checkpoints: Path) -> None:
        self._root = root
        self._checkpoints = checkpoints
        self._lock: int | None = None

    def claim(self) -> None:
        """Claim the directory for this process until it ends; only its user may look into it.

        Raises:
            InvalidInput: another user could write there, or root's checkpoints would be in a place
                that another user controls.
            NotAllowed: another agent runs on it.
            OSError: it cannot be made.
        """
        _make_private(self._root)
        _make_private(self._root / "gangs")
        if os.geteuid() == 0:
            _require_safe_way("--checkpoint-dir", self._checkpoints)
        self._lock = open_private(str(self._root / "agent.lock"), keep=True)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotAllowed(
                f"another agent runs on {self._root}; stop it, or choose another --data-dir"
            ) from None
        for left in (self._root / REMOVED).glob("*"):  # by an agent that ended meanwhile
            _clear_apart(left)

    def release(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def directory(self, key: GangKey) -> Path:
        """Return the gang's own directory."""
        job, generation = key
        return self._root / "gangs" / f"{quote(job, safe='')}@{generation}"

    def checkpoints(self, job: str) -> Path:
        """Return the directory of the job's checkpoints, which its nodes share."""
        return self._checkpoints / f"job-{quote(job, safe='')}"

    def add(self, gang: pb.DesiredGang) -> Path:
        """Record that ``gang`` is here; return its empty directory."""
        self.remove(key_of(gang))
        directory = self.directory(key_of(gang))
        make_private(str(directory))
        write_json(str(directory / "gang.json"), gang_to_json(gang))
        return directory

    def member_directory(self, gang: pb.DesiredGang, node: str) -> Path:
        """Return the directory of a member of the gang. The leader's is the gang's own."""
        directory = self.directory(key_of(gang))
        return directory if node == gang.leader else directory / f"member-{quote(node, safe='')}"

    def make_member_directory(self, gang: pb.DesiredGang, node: str) -> Path:
        """Return the directory of a member of a gang that was added. It exists from now on."""
        directory = self.member_directory(gang, node)
        make_private(str(directory))
        return directory

    def write_part(self, key: GangKey, part: pb.GangNetwork) -> Path:
        """Write a gang's part in the network plan for its processes to read; return the file."""
        path = self.directory(key) / "network.json"
        plain = {
            "level": part.level,
            "levels": part.levels,
            "dscp": part.dscp,
            "routes": [[route.source, route.target, [*route.via]] for route in part.routes],
        }
        write_json(str(path), plain, mode=0o644)  # for its programs, whoever their user is
        return path

    def remove(self, key: GangKey) -> None:
        """Forget a gang. A thread deletes its files, because a program may have left millions."""
        directory = self.directory(key)
        if not os.path.lexists(directory):
            return
        aside = self._root / REMOVED / f"{directory.name}.{uuid4().hex}"
        try:
            make_private(str(aside.parent))
            move_folder(str(directory), str(aside))
        except OSError:  # e.g. a full disk
            _clear(directory)
            return
        _clear_apart(aside)

    def gangs(self) -> Iterator[pb.DesiredGang]:
        """Yield the recorded gangs.

        Directories that were never finished, or that no agent made, are cleared.
        """
        for directory in sorted((self._root / "gangs").iterdir()):
            gang = None
            if not directory.is_symlink() and directory.is_dir():
                gang = _written_down(directory)
            if gang is not None and self.directory(key_of(gang)) == directory:
                yield gang
            else:
                _end_stray(directory)
                _clear(directory)

    @property
    def lease_file(self) -> Path:
        """Return the file of the lease, which ``tessera.service.agent.lease`` describes."""
        return self._root / LEASE_FILE

    def save_lease(self, heard_s: float, lease_s: float, margin_s: float) -> None:
        """Record when a server was last heard, by the boot clock, and for how long that holds.

        Raises:
            OSError: it cannot be written, so others find an older moment, or none.
        """
        value = {"heard_s": heard_s, "lease_s": lease_s, "margin_s": margin_s, "boot": boot_id()}
        overwrite_json(str(self.lease_file), value, LEASE_BYTES)

    def load_lease(self) -> tuple[float, float] | None:
        """Return the moment and the lease that ``save_lease`` wrote in this boot, or None.

        None also stands for a damaged file. Processes that run then count from what they read before.
        """
        try:
            stored = read_json(str(self.lease_file))
            if stored is None or stored["boot"] != boot_id():
                return None
            return float(stored["heard_s"]), float(stored["lease_s"])
        except (KeyError, OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot read the lease on disk", extra={"event": "lease_unread", "error": error}
            )
            return None


def _make_private(path: Path) -> None:
    """Make a directory that only its user may use, or check that one is.

    Raises:
        InvalidInput: another user could write there, or decide what is there.
        OSError: it cannot be made.
    """
    _require_safe_way("--data-dir", path)
    try:
        make_private(str(path))
    except (NotADirectoryError, PermissionError) as error:
        raise InvalidInput(
            "--data-dir", f"{path} cannot be used ({error.strerror}); choose another directory"
        ) from error
    status = path.lstat()
    if stat.S_IMODE(status.st_mode) != PASSAGE:  # programs of other users may run below
        change_mode(str(path), 0o700)


def _require_safe_way(option: str, path: Path) -> None:
    """Check that no user but ours and root decides what is at ``path``. It need not exist yet.

    For an agent that is root, that includes the owners and groups of all directories above.
    """
    for parent in (path, *path.parents):
        try:
            status = parent.stat()
        except FileNotFoundError:
            continue
        mode = status.st_mode
        is_shared = mode & stat.S_ISVTX and parent != path  # in /tmp none renames another's files
        if mode & stat.S_IWOTH and not is_shared:
            raise InvalidInput(
                option,
                f"every user may write to {parent} (mode {stat.S_IMODE(mode):o}), and thus decide what runs"
                f" here; run `chmod o-w {parent}`, or choose another directory",
            )
        if os.geteuid() != 0:
            continue
        if status.st_uid != 0:
            raise InvalidInput(
                option,
                f"{parent} belongs to another user ({status.st_uid}), who decides what is below it; run"
                " the agent as that user, or choose another directory",
            )
        if mode & stat.S_IWGRP and status.st_gid != 0 and not is_shared and parent != path:
            raise InvalidInput(
                option,
                f"the group {status.st_gid} may write to {parent} (mode {stat.S_IMODE(mode):o}), and thus"
                f" decide what runs here; run `chmod g-w {parent}`, or choose another directory",
            )


def _written_down(directory: Path) -> pb.DesiredGang | None:
    """Return the gang that is recorded in its directory.

    Return None if no gang is recorded there, or not in an agent's format.
    """
    try:
        stored = read_json(str(directory / "gang.json"))
        return gang_from_json(stored) if stored is not None else None
    except (OSError, ValueError) as error:
        log.warning(
            "cannot read a gang; its process is ended and the directory is removed",
            extra={"event": "gang_unread", "gang": directory.name, "error": error},
        )
        return None


def _end_stray(directory: Path) -> None:
    """End the processes of a gang whose description is gone, as nobody could ask it to stop."""
    if directory.is_symlink() or not directory.is_dir():
        return
    for identity in (directory / "process.json", *directory.glob("member-*/process.json")):
        try:
            keeper = read_identity(identity)
        except (OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot find a process",
                extra={"event": "process_unknown", "file": identity, "error": error},
            )
            continue
        if keeper is not None:
            kill_keeper(keeper)
        kill_marked(identity.parent)


def _clear_apart(path: Path) -> None:
    """Remove what is at ``path`` in a thread of its own, however long that takes."""
    Thread(target=_clear, args=(path,), name="removal", daemon=True).start()


def _clear(path: Path) -> None:
    """Remove what is at ``path``, without following a link. Failures are logged."""
    try:
        remove_tree(str(path))
    except OSError as error:
        log.warning(
            "cannot remove a file of the agent's state",
            extra={"event": "state_not_removed", "file": path, "error": error},
        )
