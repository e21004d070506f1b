"""Files with tokens and keys: read only if they are closed to other users."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from tessera.client.refusals import ChannelRefused, show_path

MAX_FILE_BYTES: Final = 4 << 20
"""Largest size of a file. The certificates of all public authorities take a quarter of a MiB."""

OTHERS_RIGHTS: Final = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP
"""The rights that nobody but the owner may have. The group may read, as Kubernetes mounts secrets."""


def read_secret(path: Path, what: str) -> str:
    """Return the text of a file that other users can neither read nor change.

    ``what`` describes the file in messages, e.g. ``the login file``.

    Raises:
        ChannelRefused: it cannot be read, or others can read or change it.
        UnicodeDecodeError: it is not text.
    """
    content, mode = read_bytes(path, what)
    if mode & OTHERS_RIGHTS:
        raise ChannelRefused(
            f"{what} {show_path(str(path))}is a secret, but other users can read or change it; run"
            f" chmod 600 {path}"
        )
    return content.decode()


def read_bytes(path: Path, what: str) -> tuple[bytes, int]:
    """Return what a file holds, and its mode. Raises ChannelRefused."""
    shown = f"{what} {show_path(str(path))}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not for a pipe
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            content = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except (OSError, ValueError) as error:  # a ValueError for a path with a null
        cause = error.strerror if isinstance(error, OSError) else "it is not a path"
        raise ChannelRefused(f"{shown}cannot be read: {cause}") from None
    if not stat.S_ISREG(mode):
        raise ChannelRefused(f"{shown}is not a regular file")
    if not content.strip():
        raise ChannelRefused(f"{shown}is empty")
    if len(content) > MAX_FILE_BYTES:
        raise ChannelRefused(f"{shown}has more than {MAX_FILE_BYTES:,} bytes")
    return content, mode
