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


def require_data_file(given: Path | None, *within: str) -> Path:
    """Return ``given``, or a file of the data folder. Raises MissingData where that is no file."""
    place = _place(given, within)
    if place is None or not place.is_file():
        raise MissingData(f"{place or within[-1]} is absent: pass it, or set TESSERA_DATA")
    return place


def data_file(given: Path | None, *within: str) -> Path | None:
    """Return ``given``, or a file of the data folder; None where that is no file."""
    place = _place(given, within)
    return place if place is not None and place.is_file() else None


def _place(given: Path | None, within: tuple[str, ...]) -> Path | None:
    folder = data_dir()
    return given or (folder.joinpath(*within) if folder else None)
