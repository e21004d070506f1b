"""Snapshots as files, which `tessera solve` and `tessera replay --save-snapshot` exchange, too."""

from __future__ import annotations

from pathlib import Path

from tessera.estimator.files.userfiles import read_bytes
from tessera.formulation.answer.codec import decode, encode
from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.state.snapshot import Snapshot


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in the file ``path``.

    Raises:
        InvalidInput: the file cannot be read, or is not a saved snapshot.
    """
    data = read_bytes(path)
    try:
        saved = decode(data)
        if isinstance(saved, Snapshot):
            saved.traffic.require_readable()
    except InvalidInput as error:
        raise InvalidInput(str(path), f"is not a saved snapshot: {error}") from error
    if not isinstance(saved, Snapshot):
        raise InvalidInput(str(path), f"contains a {type(saved).__name__}, not a snapshot")
    return saved


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write ``snapshot`` to the file ``path``, which is replaced.

    Raises:
        InvalidInput: the file cannot be written.
    """
    try:
        path.write_bytes(encode(snapshot))
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be written: {error.strerror}") from error
