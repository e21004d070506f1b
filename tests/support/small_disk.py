"""A disk that is soon full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 512 KiB, or skip the test if it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tessera-test", str(place)]
    try:
        result = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a full disk needs the program mount")
    if result.returncode:
        pytest.skip(f"a full disk can be mounted only by root: {result.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill_disk(path: Path) -> None:
    """Write until there is no space left."""
    with path.open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while rest.write(bytes(4096)):
            continue
