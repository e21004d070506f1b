"""Embedded PostgreSQL, installed from a wheel and listening on a Unix socket.

It is used when no database URL is configured.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import platformdirs
import psutil

from tessera.db.schema import pgserver
from tessera.formulation.base.errors import Unavailable

_used: dict[Path, IO[bytes]] = {}
"""The servers that this process uses: by data directory, an open file with a shared lock.

The lock ends with the process, however that ends, so nothing waits for a process that was killed.
"""


HOME_VARIABLE = "TESSERA_HOME"
"""Environment variable with the folder for all data for which no other folder is configured."""


def default_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the embedded database's files. TESSERA_HOME names another one.

    For root it is not below a home directory: the server then runs as a separate user.
    """
    if home := environment.get(HOME_VARIABLE):
        return Path(home).expanduser().absolute() / "pg"
    if os.geteuid() == 0:
        return Path("/var/lib/tessera/pg")
    return platformdirs.user_data_path("tessera") / "pg"


def make_private_folder(path: Path) -> None:
    """Make a folder that only its user may use, unless it exists, and the missing ones above.

    ``mkdir(parents=True)`` would leave those above to the umask. Raises OSError.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def start_server(directory: Path | None = None, *, create: bool = True) -> str:
    """Start PostgreSQL on ``directory``, unless it is already running, and return its URL.

    Any number of processes may do so, repeatedly. The last one to exit stops the server. Unless
    ``create`` is set, the directory must have a database: one that has ended is started again.

    Raises:
        Unavailable: it does not start.
    """
    place = _absolute(directory)
    try:
        make_private_folder(place.parent)
        with _turn(place):
            url = pgserver.ensure_running(place, create=create)
            if place not in _used:
                _used[place] = _open_mark(place, "users")
                fcntl.flock(_used[place], fcntl.LOCK_SH)
        return url
    except (Unavailable, OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"the embedded database in {place} does not start ({error}); see {place / 'log'}, correct"
            " the cause, or choose another directory"
        ) from error


def find_process(directory: Path | None = None) -> psutil.Process | None:
    """Return the first process of the server on ``directory``, or None if it has no process."""
    return pgserver.find_postmaster(_absolute(directory))


def is_running(directory: Path | None = None) -> bool:
    """Return whether a server runs on ``directory``. It may be starting or stopping."""
    return is_alive(find_process(directory))


def is_alive(process: psutil.Process | None) -> bool:
    """Return whether a process has neither ended nor left its number to another one."""
    try:
        return (
            process is not None
            and process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def stop_server(directory: Path | None = None) -> None:
    """Release the server before the process ends. It stops if no other process uses it.

    Raises:
        Unavailable: it does not stop.
    """
    place = _absolute(directory)
    if place in _used:
        with _used.pop(place) as ours:
            if place.exists():  # otherwise it ends on its own
                with _turn(place):
                    _stop_unless_used(place, ours)


def delete_server(directory: Path) -> None:
    """Stop the server on ``directory`` and delete its files.

    Raises:
        Unavailable: another process uses it, or it does not stop.
    """
    place = _absolute(directory)
    if place in _used:
        stop_server(place)
    if not place.parent.exists():
        return
    with _turn(place), _open_mark(place, "users") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"the database in {place} is used by another process, such as `tessera serve`; stop"
                " that one first"
            ) from None
        if place.exists():
            pgserver.stop_server(place)
            shutil.rmtree(place)


@atexit.register
def _stop_all() -> None:
    for place in list(_used):
        stop_server(place)


os.register_at_fork(after_in_child=_used.clear)  # a forked child shares the lock but is not a user


def _stop_unless_used(place: Path, ours: IO[bytes]) -> None:
    try:
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    pgserver.stop_server(place)


@contextmanager
def _turn(place: Path) -> Iterator[None]:
    """Exclude every other start and stop of the server on ``place``."""
    with _open_mark(place, "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_mark(place: Path, what: str) -> IO[bytes]:
    """Open the file next to the directory that processes lock. It must be ours and not a link.

    Raises:
        Unavailable: another user created it.
    """
    path = place.with_name(f".{place.name}.{what}")
    number = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    file = os.fdopen(number, "ab")
    if os.fstat(number).st_uid != os.geteuid():
        file.close()
        raise Unavailable(
            f"{path} belongs to another user; remove it, or choose a directory of your own"
        )
    return file


def _absolute(directory: Path | None) -> Path:
    return (directory or default_directory()).expanduser().resolve()
