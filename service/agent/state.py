"""What an agent keeps on disk, so that its own restart changes nothing for its gangs."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from formulation.errors import NotAllowed
from service.agent.files import read_json, write_json
from service.agent.gangs import Gang, Key, Part, gang_from_json, gang_to_json
from service.agent.process import boot_id


class StateDir:
    """The agent's directory: ``gangs/JOB@GENERATION/``, ``lease.json`` and ``agent.lock``."""

    def __init__(self, root: Path, checkpoints: Path) -> None:
        self._root = root
        self._checkpoints = checkpoints
        self._lock: int | None = None

    def claim(self) -> None:
        """Make the directory this process's own until it ends.

        Raises:
            NotAllowed: another agent runs on it.
        """
        (self._root / "gangs").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._root / "agent.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotAllowed(
                f"another agent runs on {self._root}; stop it, or choose another --data-dir"
            ) from None

    def release(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def directory(self, key: Key) -> Path:
        """Return the gang's own directory."""
        job, generation = key
        return self._root / "gangs" / f"{quote(job, safe='')}@{generation}"

    def checkpoints(self, job: str) -> Path:
        """Return the directory of the job's checkpoints, which its nodes share."""
        return self._checkpoints / f"job-{quote(job, safe='')}"

    def add(self, gang: Gang) -> Path:
        """Write down that ``gang`` is here; return its empty directory."""
        self.remove(gang.key)
        directory = self.directory(gang.key)
        directory.mkdir()
        write_json(str(directory / "gang.json"), gang_to_json(gang))
        return directory

    def tell(self, key: Key, part: Part) -> Path:
        """Write down a gang's part in the network plan, where its processes may read it; return the file."""
        path = self.directory(key) / "network.json"
        write_json(str(path), asdict(part))
        return path

    def remove(self, key: Key) -> None:
        """Forget a gang."""
        directory = self.directory(key)
        if directory.exists():
            shutil.rmtree(directory)

    def gangs(self) -> Iterator[Gang]:
        """Yield the gangs that are written down; clear directories that were never finished."""
        for directory in sorted((self._root / "gangs").iterdir()):
            stored = read_json(str(directory / "gang.json"))
            if stored is None:
                shutil.rmtree(directory)
            else:
                yield gang_from_json(stored)

    def save_lease(self, heard_s: float, lease_s: float) -> None:
        """Write down when, by the monotonic clock, a server was last heard, and for how long that holds."""
        value = {"heard_s": heard_s, "lease_s": lease_s, "boot": boot_id()}
        write_json(str(self._root / "lease.json"), value)

    def load_lease(self) -> tuple[float, float] | None:
        """Return what ``save_lease`` wrote in this boot; None: nothing."""
        stored = read_json(str(self._root / "lease.json"))
        if stored is None or stored["boot"] != boot_id():
            return None
        return stored["heard_s"], stored["lease_s"]
