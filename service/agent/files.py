"""The one module of the agent and its keepers that opens, makes, changes or removes what has a path.

Both may run as root, next to programs of other users. So that no such user decides what is touched:

* A path is walked by descriptors from the root, and no link is followed. It is absolute.
* Files are written only into directories of our own. A file has its owner and its mode before it
  has its name, and one that exists is ours and has no other name.
* What is below a directory of another user is only read or removed, and each step is a descriptor.

The jobs' processes import this module too, so it stays light. A job's process writes files that its
agent reads, so nothing found there may stop the agent. A link, a pipe, an endless file or one
without meaning is an error of that file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import contextmanager

TYPE_CHECKING = False  # importing typing would be a sixth of a job's start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

PASSAGE = 0o711
"""The mode of a directory that other users may pass through, without looking around."""

MAX_BYTES = 64 * 2**20
"""The largest number of bytes that are read: a gang's description with all of its members."""

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_json(
    path: str, value: dict[str, Any], *, durable: bool = False, mode: int = 0o600
) -> None:
    """Replace the file at ``path`` in one step. If ``durable``, it survives a power failure."""
    write_text(path, json.dumps(value), durable=durable, mode=mode)


def overwrite_json(path: str, value: dict[str, Any], length: int) -> None:
    """Write the object over the file at ``path``, padded to ``length`` bytes, in one call.

    It needs no space on a full disk once the file exists. A reader may see a mixture of the old and
    the new text, which it must recognize. Raises OSError.
    """
    descriptor = open_private(path, keep=True)
    try:
        os.pwrite(descriptor, json.dumps(value).ljust(length).encode(), 0)
        os.ftruncate(descriptor, length)  # what another program wrote may be longer
    finally:
        os.close(descriptor)


def write_text(
    path: str,
    text: str,
    *,
    durable: bool = False,
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
) -> None:
    """Replace the file at ``path`` in one step, with a mode and an owner (user and group).

    If ``durable``, it survives a power failure. Raises OSError.
    """
    with _own_parent(path) as (folder, name):
        temporary = f"{name}.{os.getpid()}.tmp"
        _unlink(temporary, folder)  # of an earlier process with this id
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(descriptor, mode)
                if owner is not None:
                    os.fchown(descriptor, *owner)
                if durable:
                    os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            _unlink(temporary, folder)  # on a full disk it would only take space
            raise
        if durable:
            os.fsync(folder)


def open_private(path: str, *, keep: bool = False) -> int:
    """Return a descriptor of a new or emptied file of our own, for reading and writing.

    If ``keep``, what the file holds stays. Raises OSError, also for a file that is another user's
    or has another name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _own_parent(path) as (folder, name):
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise PermissionError(errno.EPERM, "not a regular file with one name; remove it", path)
        _require_ours(status, path)
        os.fchmod(descriptor, 0o600)
        if not keep:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def write_setting(path: str, text: str) -> None:
    """Write to a file of the kernel, such as one of a cgroup. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(text)


def make_private(path: str, mode: int = 0o700) -> None:
    """Make a directory that only its user may use, and the missing ones above. It may exist.

    Directories that are made get ``mode`` under any umask. Raises OSError, also if what exists is
    not a directory of ours.
    """
    current, is_new = os.open("/", _STEP), False
    try:
        for name in _names(path):
            try:
                inner = _enter(name, current, path)
            except FileNotFoundError:
                inner, is_new = _make(name, current, path, mode), True
            os.close(current)
            current = inner
            if is_new:  # nobody else may have been faster
                _require_ours(os.fstat(current), path)
        _require_ours(os.fstat(current), path)
    finally:
        os.close(current)


def give_folder(path: str, uid: int, gid: int) -> None:
    """Make a directory for another user in one of ours, unless it exists. Raises OSError."""
    with _own_parent(path) as (folder, name):
        descriptor = _make(name, folder, path, 0o700, _FOLDER)
    try:
        os.fchown(descriptor, uid, gid)
    finally:
        os.close(descriptor)


def change_mode(path: str, mode: int) -> None:
    """Give a directory of ours another mode. Raises OSError."""
    descriptor = open_folder(path)
    try:
        status = os.fstat(descriptor)
        _require_ours(status, path)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def make_pipe(path: str, owner: tuple[int, int] | None) -> int:
    """Make a named pipe that only ``owner`` (user and group) may use; return both of its ends.

    They do not block, and never report that the pipe is closed. Raises OSError.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with _own_parent(path) as (folder, name):
        os.mkfifo(name, 0o600, dir_fd=folder)
        descriptor = os.open(name, flags, dir_fd=folder)
    if owner is not None:
        os.fchown(descriptor, *owner)
    return descriptor


def point_link(path: str, target: str) -> None:
    """Let the link at ``path`` lead to ``target`` from now on, in one step. Raises OSError."""
    with _own_parent(path) as (folder, name):
        temporary = f"{name}.{os.getpid()}.tmp"
        _unlink(temporary, folder)
        os.symlink(target, temporary, dir_fd=folder)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def move_folder(path: str, target: str) -> None:
    """Move what is at ``path`` into another directory of ours. Raises OSError."""
    with _own_parent(path) as (folder, name), _own_parent(target) as (other, new):
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=other)


def remove_file(path: str) -> bool:
    """Remove a file or a link; return whether there was one. Raises OSError."""
    try:
        with _parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def remove_folder(path: str) -> None:
    """Remove an empty directory. Raises OSError, FileNotFoundError without one."""
    with _parent(path) as (folder, name):
        os.rmdir(name, dir_fd=folder)


def remove_tree(path: str) -> None:
    """Remove what is at and below ``path``, however deep, without following links.

    Raises OSError: something cannot be removed. Everything else is removed all the same.
    """
    problem: OSError | None = None
    for folder, name, status in _walk(path):
        try:
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def measure_tree(path: str) -> tuple[int, int]:
    """Return the number of files at and below ``path``, and their bytes. Links are not followed.

    Raises OSError: something there was moved meanwhile.
    """
    files = size_bytes = 0
    for _, _, status in _walk(path):
        if not stat.S_ISDIR(status.st_mode):
            files, size_bytes = files + 1, size_bytes + status.st_size
    return files, size_bytes


def enter_folder(path: str) -> None:
    """Make ``path`` the working directory. Call it once the process has its user. Raises OSError."""
    os.chdir(path)


def open_folder(path: str) -> int:
    """Return a descriptor of a directory, reached without following links. Raises OSError."""
    with _parent(path) as (folder, name):
        return _enter(name, folder, path, _FOLDER)


def open_regular(path: str, folder: int | None = None) -> IO[bytes]:
    """Return a regular file for reading: at ``path``, or of this name in the directory ``folder``.

    Raises:
        ValueError: it is a link, a pipe or another thing that is not a regular file.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link; remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file; remove it")
    return open(descriptor, "rb")


def read_json(
    path: str, most_bytes: int = MAX_BYTES, owner: int | None = None
) -> dict[str, Any] | None:
    """Return the object that ``write_json`` wrote, or None if there is no such file.

    Half of a surrogate pair, which no message can hold, becomes a question mark.

    Raises:
        ValueError: it is not a regular file of at most ``most_bytes`` that holds a JSON object, so
            something else wrote it. Or it does not belong to the user ``owner``.
        OSError: it cannot be read.
    """
    try:
        text = read_start(path, most_bytes + 1, owner=owner)
    except FileNotFoundError:
        return None
    if len(text) > most_bytes:
        raise ValueError(f"{path} holds more than {most_bytes:,} bytes; remove it")
    try:
        value = json.loads(text.decode())  # of bytes it accepts other encodings, and surrogates
        if b"\\u" in text:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold JSON ({error}); remove it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; remove it")
    return value


def read_start(
    path: str, most_bytes: int, *, from_end: bool = False, owner: int | None = None
) -> bytes:
    """Return the first ``most_bytes`` of a regular file, or its last ones if ``from_end``.

    Name the ``owner`` of a file in a directory of another user, who could give it a file of ours by
    a second name.

    Raises:
        ValueError: it is a link, a pipe or another thing that is not a regular file, or another
            user's.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if owner is not None and status.st_uid != owner:
            raise ValueError(f"{path} belongs to the user {status.st_uid}; remove it")
        if from_end:
            file.seek(max(0, status.st_size - most_bytes))
        return file.read(most_bytes)


def read_trusted(path: str | os.PathLike[str]) -> str:
    """Return the text of a file that no job can write: the kernel's, ours, or an operator's.

    An operator's may be a link or a pipe. Raises OSError, ValueError.
    """
    with open(path, encoding="utf-8") as file:
        return file.read()


def _names(path: str) -> list[str]:
    """Return the names on the way from the root to ``path``."""
    if not os.path.isabs(path):
        raise ValueError(f"{path} is not an absolute path")
    return os.path.normpath(path).strip("/").split("/")


def _enter(name: str, folder: int, path: str, flags: int = _STEP) -> int:
    """Return a descriptor of a directory in ``folder``, on the way to ``path``."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            problem = f"{name!r} is a symbolic link or a file, not a directory; remove it"
            raise NotADirectoryError(errno.ENOTDIR, problem, path) from error
        raise type(error)(error.errno, error.strerror, path) from error


def _make(name: str, folder: int, path: str, mode: int, flags: int = _STEP) -> int:
    """Return a descriptor of a directory in ``folder``, which is made with ``mode`` if it is missing."""
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        return _enter(name, folder, path, flags)
    if mode != 0o700:
        descriptor = _enter(name, folder, path, _FOLDER)
        try:
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
    return _enter(name, folder, path, flags)


@contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the directory above ``path``, reached without links, and the last name."""
    *above, last = _names(path)
    current = os.open("/", _FOLDER)
    try:
        for depth, name in enumerate(above, 1):
            inner = _enter(name, current, path, _FOLDER if depth == len(above) else _STEP)
            os.close(current)
            current = inner
        yield current, last
    finally:
        os.close(current)


@contextmanager
def _own_parent(path: str) -> Iterator[tuple[int, str]]:
    """Yield what ``_parent`` yields. The directory must be ours."""
    with _parent(path) as (folder, name):
        _require_ours(os.fstat(folder), os.path.dirname(path))
        yield folder, name


def _require_ours(status: os.stat_result, path: str) -> None:
    """Refuse what another user owns. Raises PermissionError."""
    if status.st_uid != os.geteuid():
        problem = (
            f"belongs to another user ({status.st_uid}), so nothing is written there; use it as that user,"
            " or remove it"
        )
        raise PermissionError(errno.EPERM, problem, path)


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return  # it was never made, or cannot be removed either


def _walk(path: str) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield what is at and below ``path``: its directory, its name in there, and its status.

    A directory comes after its contents. One that cannot be entered comes as if it were empty. One
    descriptor is open at a time, so the depth does not matter. Raises OSError if a directory was
    moved meanwhile.
    """
    try:
        with _parent(path) as (folder, top):
            current = os.dup(folder)
    except FileNotFoundError:
        return
    names = [[top]]  # at each depth, those that are left
    entered: list[tuple[str, os.stat_result]] = []  # each with the status of the directory above
    try:
        while True:
            if names[-1]:
                name = names[-1].pop()
                try:
                    status = os.stat(name, dir_fd=current, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                inner = _enter_if_possible(name, current, status)
                if inner is None:
                    yield current, name, status
                    continue
                entered.append((name, os.fstat(current)))
                os.close(current)
                current = inner
                names.append(os.listdir(current))
                continue
            names.pop()
            if not entered:
                return
            name, above = entered.pop()
            status, outer = os.fstat(current), os.open("..", _FOLDER, dir_fd=current)
            os.close(current)
            current = outer
            if not os.path.samestat(os.fstat(current), above):
                raise OSError(errno.EBUSY, "was moved while it was read", name)
            yield current, name, status
    finally:
        os.close(current)


def _enter_if_possible(name: str, folder: int, status: os.stat_result) -> int | None:
    if not stat.S_ISDIR(status.st_mode):
        return None
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError:  # it may not be read, or is a link by now
        return None
