"""Reader of the files that users name. Whatever is wrong with one is one sentence with its path."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput

MAX_BYTES: Final = 2**30
"""Largest size of a file. None that we read is near it."""

_CHUNK: Final = 65_536


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file, or of a pipe that somebody writes to.

    Raises:
        InvalidInput: it cannot be read, or has more than ``most`` bytes; names the path.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            mode, size = os.fstat(descriptor).st_mode, os.fstat(descriptor).st_size
            if not stat.S_ISREG(mode) or size <= most:  # else it need not be read
                start = _wait_for_writer(descriptor, path) if stat.S_ISFIFO(mode) else b""
                os.set_blocking(descriptor, True)
                data = bytearray(start)
                while len(data) <= most and (part := file.read(_CHUNK)):
                    data += part
                size = len(data)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # the path has a NUL
        raise InvalidInput(repr(str(path)), "is not the path of a file") from error
    if size > most:
        raise InvalidInput(str(path), f"must have at most {most:,} bytes; shorten it, or split it")
    return bytes(data)


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises InvalidInput, which names the path."""
    data = read_bytes(path, most)
    try:
        return to_text("", data)
    except InvalidInput as error:
        raise InvalidInput(
            str(path), f"is not UTF-8 text, so it cannot be read:{error.field} {error.problem}"
        ) from error


def to_text(source: str, data: bytes) -> str:
    """Return UTF-8 text, without a byte order mark. Raises InvalidInput for other bytes and NUL."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{source} line {line}", "must be UTF-8 text") from None
    if (at := text.find("\0")) >= 0:
        line = text.count("\n", 0, at) + 1
        raise InvalidInput(f"{source} line {line}", "must be text without NUL characters")
    return text


def _wait_for_writer(descriptor: int, path: str | Path) -> bytes:
    """Return the first bytes of a pipe, or b"" if its writer has written nothing yet."""
    try:
        start = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return b""
    if not start:
        raise InvalidInput(str(path), "is a pipe that nobody writes to; start the writer first")
    return start
