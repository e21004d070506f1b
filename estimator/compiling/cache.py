"""Cache of compiled steps. A file is named by a hash of the lowered step, the mesh and versions."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tessera.estimator.compiling.compiled import CompiledStep, from_json, to_json

READER_VERSION = "2"
"""Version of the reader of compiled text. A new version ignores the files of older ones."""


def default_folder() -> Path:
    """Return the default folder for compiled steps."""
    from platformdirs import user_cache_path  # noqa: PLC0415 - analytic estimates do without it

    return user_cache_path("tessera") / "compiled"


def key_of(text: str, facts: Sequence[object]) -> str:
    """Return the name of a lowered step that was compiled with these facts (mesh, versions)."""
    return hashlib.sha256(repr((READER_VERSION, *facts, text)).encode()).hexdigest()


def look_up_step(folder: Path, key: str) -> CompiledStep | None:
    """Return a stored step. If it is missing or its file is incomplete, return None."""
    path = folder / f"{key}.json"
    if not path.exists():
        return None
    try:
        return from_json(path.read_text(), cached=True)
    except ValueError:
        return None


def store_step(folder: Path, key: str, compiled: CompiledStep) -> None:
    """Write a step atomically, so that a reader sees all of it or nothing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        file.write(to_json(compiled))
    os.replace(file.name, folder / f"{key}.json")
