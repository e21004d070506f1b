"""The location of published measurements, which are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path


class MissingData(Exception):
    """An error of a run that needs data which is not on this machine. The message names it."""


DATA_VARIABLE = "TESSERA_DATA"
"""The environment variable that names the data folder. If it is unset, the folder is
``../shared/data``, next to the repository."""


def data_dir() -> Path | None:
    """Return the folder of data sets, with one subfolder each.

    If there is no such folder, return None.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get(DATA_VARIABLE) or default)
    return folder if folder.is_dir() else None


def require_data_file(*within: str) -> Path:
    """Return a file of the data folder.

    Raises:
        MissingData: there is no such file.
    """
    place = data_file(None, *within)
    if place is None:
        raise MissingData(f"{'/'.join(within)} does not exist; set TESSERA_DATA to its folder")
    return place


def data_file(given: Path | None, *within: str) -> Path | None:
    """Return ``given``, or a file of the data folder. If that is not a file, return None."""
    folder = data_dir()
    place = given or (folder.joinpath(*within) if folder else None)
    return place if place is not None and place.is_file() else None
