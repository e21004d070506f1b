"""The database that comes with Tessera: PostgreSQL from a wheel, on a Unix socket, for who names no other."""

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

from tessera.db import pgserver
from tessera.formulation.errors import Unavailable

_used: dict[Path, IO[bytes]] = {}
"""What this process uses: by data directory, the open file whose shared lock says so.

The lock goes with the process, however it ends, so nobody waits for one that was killed.
"""


HOME = "TESSERA_HOME"
"""Variable of the environment with the folder for all data that nobody has named a folder for."""


def default_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the embedded database keeps its files; TESSERA_HOME names another folder.

    For root not below a home: the server then runs as a user of its own, who must be able to reach its
    files, so the permissions of every directory above them are loosened.
    """
    if home := environment.get(HOME):
        return Path(home).expanduser().absolute() / "pg"
    if os.geteuid() == 0:
        return Path("/var/lib/tessera/pg")
    return platformdirs.user_data_path("tessera") / "pg"


def start(directory: Path | None = None) -> str:
    """Start PostgreSQL on ``directory``, unless it runs already, and return its URL.

    Any number of processes may do so, again and again; the last to exit stops the server.

    Raises:
        Unavailable: it does not start.
    """
    place = _absolute(directory)
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _turn(place):
            url = pgserver.ensure_running(place)
            if place not in _used:
                _used[place] = _open_mark(place, "users")
                fcntl.flock(_used[place], fcntl.LOCK_SH)
        return url
    except (Unavailable, OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"the embedded database in {place} does not start ({error}); see {place / 'log'}, free the"
            " directory, or name another database in TESSERA_DATABASE_URL"
        ) from error


def stop(directory: Path | None = None) -> None:
    """Let go of the server before the process ends; it stops if no other process uses it.

    Raises:
        Unavailable: it does not stop.
    """
    place = _absolute(directory)
    if place in _used:
        with _used.pop(place) as ours:
            if place.exists():  # else it ends by itself
                with _turn(place):
                    _stop_unless_used(place, ours)


def delete(directory: Path) -> None:
    """Stop the server on ``directory`` and delete its files.

    Raises:
        Unavailable: another process uses it, or it does not stop.
    """
    place = _absolute(directory)
    if place in _used:
        stop(place)
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
            pgserver.stop(place)
            shutil.rmtree(place)


@atexit.register
def _stop_all() -> None:
    for place in list(_used):
        stop(place)


os.register_at_fork(after_in_child=_used.clear)  # a forked child shares the lock and is no user


def _stop_unless_used(place: Path, ours: IO[bytes]) -> None:
    try:
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    pgserver.stop(place)


@contextmanager
def _turn(place: Path) -> Iterator[None]:
    """Hold off every other start and stop of the server on ``place``."""
    with _open_mark(place, "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_mark(place: Path, what: str) -> IO[bytes]:
    """Open the file next to the directory that processes lock; nobody else's, and no link.

    Raises:
        Unavailable: another user made it.
    """
    path = place.with_name(f".{place.name}.{what}")
    number = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    file = os.fdopen(number, "ab")
    if os.fstat(number).st_uid != os.geteuid():
        file.close()
        raise Unavailable(f"{path} is another user's; remove it, or choose a directory of your own")
    return file


def _absolute(directory: Path | None) -> Path:
    return (directory or default_directory()).expanduser().resolve()
