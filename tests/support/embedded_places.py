"""Directories for the embedded database servers of tests, which are stopped at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tessera.db.schema import embedded
from tests.support.data_directories import MakeDataDirectory
from tests.support.waiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that can be opened to the server's user. Pytest closes those of ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="tessera-pg-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def new_place(folder: Path) -> Iterator[Path]:
    """Yield the path of a server's directory, and check that no process is left there at the end."""
    yield folder / "pg"
    embedded.stop_server(folder / "pg")
    until(lambda: not processes_in(folder / "pg"), "all processes have ended")


@pytest.fixture
def place(new_place: Path, make_data_directory: MakeDataDirectory) -> Path:
    """Return the initialised directory of a server that does not run yet."""
    return make_data_directory(new_place)


def processes_in(place: Path) -> list[psutil.Process]:
    """Return the processes that work in a directory."""
    return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(place)]
