"""The data directory of ``tessera up``: its path, its lock and the record of its contents."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

import psutil

from tessera.db.schema import embedded
from tessera.formulation.base.errors import InvalidInput
from tessera.service.agent.files import make_private, open_private
from tessera.service.cli.client import CallFailed, Exit
from tessera.service.cli.options import DEFAULT_CLUSTER

RECORD_FORMAT: Final = 1
"""The version of the record's format. Any other version is refused."""

RECORD_NAME: Final = "up.json"
LOCK_NAME: Final = ".up.lock"
DATABASE_FOLDER: Final = "pg"
OWN_FOLDERS: Final = ("logs", "agents", "checkpoints")
"""Folders that ``up`` makes in its data directory, next to the database's."""

SAME_START_S: Final = 1.0
"""Seconds by which two readings of the start time of one process may differ."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that ``up`` started.

    ``started_s`` distinguishes it from a later process with the same id.
    """

    name: str
    pid: int
    started_s: float

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessRecord:
        """Return a record of the process that now has the id ``pid``."""
        try:
            return cls(name, pid, psutil.Process(pid).create_time())
        except psutil.Error:  # it has ended already
            return cls(name, pid, 0.0)

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        try:
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and abs(process.create_time() - self.started_s) < SAME_START_S
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectoryRecord:
    """The settings with which a data directory was made, and the processes that use it."""

    cluster: str  # the cluster's id
    source: str  # the cluster file as it was named; "" is the example cluster
    description: str  # the cluster file's text
    clock_factor: float = 1.0
    database: str = ""  # URL of an external database, without its password; "" is embedded
    applied: str = ""  # the description in the database; "" before the first
    address: str = ""  # address of the server that was started last
    running: tuple[ProcessRecord, ...] = field(default_factory=tuple)


class DataDirectory:
    """A data directory that only this process uses. :func:`claim` makes it."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path, self._lock = path, lock
        self.record = read_record(path)

    @property
    def lock_fd(self) -> int:
        """Return the open file that children inherit, so that the lock is held as long as they live."""
        return self._lock.fileno()

    @property
    def has_database(self) -> bool:
        """Return whether an embedded database was made here."""
        return (self.path / DATABASE_FOLDER / "PG_VERSION").exists()

    def save(self, record: DataDirectoryRecord) -> None:
        """Write ``record`` atomically."""
        plain = asdict(record) | {"format": RECORD_FORMAT}
        written = self.path / f".{RECORD_NAME}.new"
        with open(open_private(str(written)), "w", encoding="utf-8") as file:
            json.dump(plain, file, indent=2)
        written.replace(self.path / RECORD_NAME)
        self.record = record

    def add_running(self, name: str, pid: int) -> None:
        """Record a process in place of an earlier one of this name, so that a later ``up`` can name it."""
        if self.record is not None:
            others = [process for process in self.record.running if process.name != name]
            self.save(replace(self.record, running=(*others, ProcessRecord.of(name, pid))))

    def clear_running(self) -> None:
        """Forget the processes, which have been stopped."""
        if self.record is not None:
            self.save(replace(self.record, running=(), address=""))

    def is_ours(self) -> bool:
        """Return whether ``up`` made the contents of the directory."""
        return self.record is not None or self.has_database

    def delete(self) -> None:
        """Delete the files that ``up`` made here, and nothing else.

        Raises:
            Unavailable: another process uses the embedded database.
        """
        embedded.delete_server(self.path / DATABASE_FOLDER)
        for name in OWN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / RECORD_NAME).unlink(missing_ok=True)
        self.record = None


@contextlib.contextmanager
def claim_directory(path: Path) -> Iterator[DataDirectory]:
    """Hold the data directory for the duration of the block, and make it if it does not exist.

    Raises:
        CallFailed: another ``tessera up``, or a process that it left behind, uses it.
        InvalidInput: it cannot be written, or its record cannot be read.
    """
    path = path.resolve()
    try:
        make_private(str(path))
        _require_ours(path)
        lock = os.fdopen(open_private(str(path / LOCK_NAME)), "ab")
    except OSError as error:
        raise InvalidInput(
            "--data-dir", f"{path} cannot be written ({error.strerror}); choose another directory"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CallFailed(_in_use(path), Exit.REFUSED) from None
        home = DataDirectory(path, lock)
        try:
            yield home
        finally:
            home.clear_running()


def _require_ours(path: Path) -> None:
    """Check that no other user decides what is in the data directory. Raises InvalidInput."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise InvalidInput(
            "--data-dir", f"{path} belongs to another user; choose a directory of your own"
        )
    if status.st_mode & stat.S_IWOTH:
        raise InvalidInput(
            "--data-dir",
            f"every user may write to {path}; run `chmod o-w {path}`, or choose another directory",
        )


def _in_use(path: Path) -> str:
    """Return a message that names the users of the data directory and says what to do."""
    record = read_record(path)
    alive = [p for p in record.running if p.is_alive()] if record else []
    other = "or start a second one with --data-dir DIR --listen 127.0.0.1:0"
    if (up := next((p for p in alive if p.name == "up"), None)) is not None and record is not None:
        server = f", whose server is {record.address}" if record.address else ""
        return (
            f"the data directory {path} is used by another `tessera up` (process {up.pid}){server}; use that"
            f" one, stop it with Ctrl-C or `kill {up.pid}`, {other}"
        )
    if alive:
        names = ", ".join(f"{p.name} {p.pid}" for p in alive)
        pids = " ".join(str(p.pid) for p in alive)
        return (
            f"the data directory {path} is still used by processes of a `tessera up` that was killed"
            f" ({names}); stop them with `kill {pids}`, {other}"
        )
    return f"the data directory {path} is used by another `tessera up`; wait until it has ended, {other}"


def read_record(path: Path) -> DataDirectoryRecord | None:
    """Return the record of a data directory, or None if it has no record.

    Raises:
        InvalidInput: the record is damaged, or was written by another release.
    """
    file = path / RECORD_NAME
    try:
        plain: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop("format") != RECORD_FORMAT:
            raise InvalidInput(
                str(file),
                "was written by another release; use that release, or choose another --data-dir",
            )
        running = tuple(ProcessRecord(**process) for process in plain.pop("running"))
        return DataDirectoryRecord(**plain, running=running)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InvalidInput(
            str(file), f"cannot be read ({error}); repair it, or choose another --data-dir"
        ) from error


def default_home(
    file: str, text: str, cluster: str, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return a cluster's default data directory. Each file and each cluster id has its own.

    `tessera serve` and `tessera prune` use the database in the example cluster's directory, too.
    """
    root = embedded.default_directory(environment).parent
    if not file and cluster == DEFAULT_CLUSTER:
        return root
    place = text if file == "-" else str(Path(file).resolve()) if file else ""
    key = hashlib.sha256(f"{place}\0{cluster}".encode()).hexdigest()[:8]
    name = Path(file).stem if file else cluster
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return root / "clusters" / f"{stem or 'cluster'}-{key}"
