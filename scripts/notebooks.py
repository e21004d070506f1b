"""Strip the outputs of notebooks, so that a change of one shows its text and code alone.

``python scripts/notebooks.py`` strips them, and ``--check`` fails where a notebook has outputs.
``tests/integration/test_notebooks.py`` runs their cells.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "notebooks"
COMMAND: Final = "python scripts/notebooks.py"
LANGUAGE: Final = {"language_info": {"name": "python"}}


def strip_outputs(text: str) -> str:
    """Return a notebook as it is kept: without outputs, counts and settings of whoever ran it."""
    notebook = json.loads(text)
    kept: dict[str, Any] = {
        "cells": [_strip_cell(cell) for cell in notebook["cells"]],
        "metadata": LANGUAGE,
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"


def _strip_cell(cell: dict[str, Any]) -> dict[str, Any]:
    source = "".join(cell["source"]).splitlines(keepends=True)
    kept = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": source}
    if cell["cell_type"] == "code":
        kept |= {"execution_count": None, "outputs": []}
    return kept


def main(arguments: list[str]) -> int:
    """Strip or check every notebook, and return the exit code."""
    changed = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if (kept := strip_outputs(text)) == text:
            continue
        changed += 1
        if "--check" in arguments:
            sys.stdout.write(f"{path.relative_to(ROOT)} has outputs; run {COMMAND}\n")
        else:
            path.write_text(kept, encoding="utf-8")
    return int(bool(changed and "--check" in arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
