"""Our own measurements of plans on single GPUs, as files hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(__file__).parent / "measured"
RUNS_H200: Final = _FOLDER / "offload_h200.jsonl"
RUNS_H100: Final = _FOLDER / "iterations_h100.jsonl"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the plans that a program timed, with what it measured.

    The file has them after two lines on where, when and how it ran. The program that it names is in
    the repository's history until commit 72cf7696.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[2:]]
