"""The state that an agent keeps on disk, so that its restart changes nothing for its gangs."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from tessera.formulation.errors import InvalidInput, NotAllowed
from tessera.service.agent.files import PASSAGE, make_private, read_json, write_json
from tessera.service.agent.gangs import Gang, GangKey, NetworkPart, gang_from_json, gang_to_json
from tessera.service.agent.process import Process, boot_id
from tessera.service.agent.strays import kill_marked

log = logging.getLogger(__name__)


class StateDir:
    """The agent's directory: ``gangs/JOB@GENERATION/``, ``lease.json`` and ``agent.lock``."""

    def __init__(self, root: Path, checkpoints: Path) -> None:
        self._root = root
        self._checkpoints = checkpoints
        self._lock: int | None = None

    def claim(self) -> None:
        """Claim the directory for this process until it ends; only its user may look into it.

        Raises:
            InvalidInput: another user could write there.
            NotAllowed: another agent runs on it.
            OSError: it cannot be made.
        """
        _make_private(self._root)
        _make_private(self._root / "gangs")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self._root / "agent.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotAllowed(
                f"another agent runs on {self._root}; stop it, or choose another --data-dir"
            ) from None

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

    def add(self, gang: Gang) -> Path:
        """Record that ``gang`` is here; return its empty directory."""
        self.remove(gang.key)
        directory = self.directory(gang.key)
        make_private(str(directory.parent))  # somebody may have removed it
        directory.mkdir(mode=0o700)
        write_json(str(directory / "gang.json"), gang_to_json(gang))
        return directory

    def member_directory(self, gang: Gang, node: str) -> Path:
        """Return the directory of a member of the gang. The leader's is the gang's own."""
        directory = self.directory(gang.key)
        return directory if node == gang.leader else directory / f"member-{quote(node, safe='')}"

    def make_member_directory(self, gang: Gang, node: str) -> Path:
        """Return the directory of a member of a gang that was added. It exists from now on."""
        directory = self.member_directory(gang, node)
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def write_part(self, key: GangKey, part: NetworkPart) -> Path:
        """Write a gang's part in the network plan for its processes to read; return the file."""
        path = self.directory(key) / "network.json"
        write_json(str(path), asdict(part))
        return path

    def remove(self, key: GangKey) -> None:
        """Forget a gang."""
        _clear(self.directory(key))

    def gangs(self) -> Iterator[Gang]:
        """Yield the recorded gangs.

        Directories that were never finished, or that no agent made, are cleared.
        """
        for directory in sorted((self._root / "gangs").iterdir()):
            gang = None
            if not directory.is_symlink() and directory.is_dir():
                gang = _written_down(directory)
            if gang is not None and self.directory(gang.key) == directory:
                yield gang
            else:
                _end_stray(directory)
                _clear(directory)

    def save_lease(self, heard_s: float, lease_s: float) -> None:
        """Record when a server was last heard, by the monotonic clock, and for how long that holds.

        Raises:
            OSError: it cannot be written, so a restart would find an older moment, or none.
        """
        value = {"heard_s": heard_s, "lease_s": lease_s, "boot": boot_id()}
        write_json(str(self._root / "lease.json"), value)

    def load_lease(self) -> tuple[float, float] | None:
        """Return what ``save_lease`` wrote in this boot, or None if it wrote nothing.

        A broken file counts as a lease that is over.
        """
        try:
            stored = read_json(str(self._root / "lease.json"))
            if stored is None or stored["boot"] != boot_id():
                return None
            return float(stored["heard_s"]), float(stored["lease_s"])
        except (KeyError, OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot read the lease on disk, so it counts as over",
                extra={"event": "lease_unread", "error": error},
            )
            return -math.inf, 1.0


def _make_private(path: Path) -> None:
    """Make a directory that only its user may use, or check that one is.

    Raises:
        InvalidInput: another user could write there, or decide what is there.
        OSError: it cannot be made.
    """
    make_private(str(path))
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidInput(
            "--data-dir", f"{path} is a symbolic link; remove it, or name its target"
        )
    if status.st_uid != os.geteuid():
        raise InvalidInput(
            "--data-dir",
            f"{path} belongs to another user ({status.st_uid}); run the agent as that user, or choose"
            " another directory",
        )
    for parent in (path, *path.parents):
        mode = parent.stat().st_mode
        shared = (
            mode & stat.S_ISVTX and parent != path
        )  # like /tmp, where no user can rename another's files
        if mode & stat.S_IWOTH and not shared:
            raise InvalidInput(
                "--data-dir",
                f"every user may write to {parent} (mode {stat.S_IMODE(mode):o}), and thus decide what runs"
                f" here; run `chmod o-w {parent}`, or choose another directory",
            )
    if stat.S_IMODE(status.st_mode) != PASSAGE:  # programs of other users may run below
        path.chmod(0o700)


def _written_down(directory: Path) -> Gang | None:
    """Return the gang that is recorded in its directory.

    Return None if no gang is recorded there, or not in an agent's format.
    """
    try:
        stored = read_json(str(directory / "gang.json"))
        return gang_from_json(stored) if stored is not None else None
    except (KeyError, OSError, TypeError, ValueError) as error:
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
            process = Process.adopt(identity)
        except (OSError, TypeError, ValueError) as error:
            log.warning(
                "cannot find a process",
                extra={"event": "process_unknown", "file": identity, "error": error},
            )
            continue
        if process is not None:
            process.signal(signal.SIGKILL)
        kill_marked(identity.parent)


def _clear(path: Path) -> None:
    """Remove what is at ``path``, without following a link. Failures are logged."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        log.warning(
            "cannot remove a file of the agent's state",
            extra={"event": "state_not_removed", "file": path, "error": error},
        )
