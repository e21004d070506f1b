"""Where published measurements are looked for; they are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path


class MissingData(Exception):
    """What was asked for cannot run here; the message says what is missing."""


VARIABLE = "TESSERA_DATA"
"""Environment variable with the folder; else ``../shared/data`` beside the repository."""


def data_dir() -> Path | None:
    """Return the folder of data sets (one subfolder each); None where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get(VARIABLE) or beside)
    return folder if folder.is_dir() else None


def data_file(given: Path | None, *within: str) -> Path | None:
    """Return ``given``, or a file of the data folder; None where that is no file."""
    folder = data_dir()
    found = given or (folder.joinpath(*within) if folder else None)
    return found if found is not None and found.is_file() else None
