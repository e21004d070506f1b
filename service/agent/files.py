"""JSON files that are never seen half written.

The jobs' processes import this module too, so it stays light. A job's process writes files that its
agent reads, so nothing found there may stop the agent. A link, a pipe, an endless file or one
without meaning is an error of that file.
"""

from __future__ import annotations

import errno
import json
import os
import stat

TYPE_CHECKING = False  # importing typing would be a sixth of a job's start
if TYPE_CHECKING:
    from typing import Any

PASSAGE = 0o711
"""The mode of a directory that other users may pass through, without looking around."""

MAX_BYTES = 64 * 2**20
"""The largest number of bytes that are read: a gang's description with all of its members."""


def write_json(path: str, value: dict[str, Any], *, durable: bool = False) -> None:
    """Replace the file at ``path`` in one step. If ``durable``, it survives a power failure."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(open_private(temporary), "w", encoding="utf-8") as file:
            json.dump(value, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)  # on a full disk it would only take space
        raise
    if durable:
        _sync_directory(os.path.dirname(path))


def overwrite_json(path: str, value: dict[str, Any], length: int) -> None:
    """Write the object over the file at ``path``, padded to ``length`` bytes, in one call.

    It needs no space on a full disk once the file exists. A reader may see a mixture of the old and
    the new text, which it must recognize. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.pwrite(descriptor, json.dumps(value).ljust(length).encode(), 0)
        os.ftruncate(descriptor, length)  # what another program wrote may be longer
    finally:
        os.close(descriptor)


def make_private(path: str) -> None:
    """Make a directory that only its user may use, unless it exists, and the missing ones above.

    ``os.makedirs`` would leave those above to the umask. Raises OSError.
    """
    above = os.path.dirname(path)
    if above and above != path and not os.path.isdir(above):
        make_private(above)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_private(path: str) -> int:
    """Return a descriptor of a new or emptied file of our own, which is not a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def read_json(path: str, most_bytes: int = MAX_BYTES) -> dict[str, Any] | None:
    """Return the object that ``write_json`` wrote, or None if there is no such file.

    Raises:
        ValueError: it is not a regular file of at most ``most_bytes`` that holds a JSON object, so
            something else wrote it.
        OSError: it cannot be read.
    """
    try:
        text = read_start(path, most_bytes + 1)
    except FileNotFoundError:
        return None
    if len(text) > most_bytes:
        raise ValueError(f"{path} holds more than {most_bytes:,} bytes; remove it")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold JSON ({error}); remove it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; remove it")
    return value


def read_start(path: str, most_bytes: int, *, from_end: bool = False) -> bytes:
    """Return the first ``most_bytes`` of a regular file, or its last ones if ``from_end``.

    Raises:
        ValueError: it is a link, a pipe or another thing that is not a regular file.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link; remove it") from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file; remove it")
        if from_end:
            file.seek(max(0, status.st_size - most_bytes))
        return file.read(most_bytes)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it was never made, or cannot be removed either


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
