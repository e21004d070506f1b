"""Data directories of embedded PostgreSQL servers, copied from one that was initialised once.

``initdb`` takes a second of a core. A test that is not about new directories uses a copy.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.db.schema import embedded

MakeDataDirectory = Callable[[Path], Path]


@pytest.fixture(scope="session")
def make_data_directory() -> Iterator[MakeDataDirectory]:
    """Return a function that makes an initialised data directory, as a first start leaves it."""
    with tempfile.TemporaryDirectory(prefix="tessera-pg-", ignore_cleanup_errors=True) as folder:
        template = Path(folder) / "pg"
        embedded.start_server(template)
        embedded.stop_server(template)

        def make(place: Path) -> Path:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The owner, which is another user if we are root, and the mode are kept.
            subprocess.run(["cp", "-a", str(template), str(place)], check=True)
            return place

        yield make
