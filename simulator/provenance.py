"""The commit that a reported number comes from, and the conversion of numbers to JSON."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

NOT_CODE: Final = tuple(f":(exclude){path}" for path in ("*.md", "docs", "benchmarks/results"))
"""What may differ from the commit without any effect on a figure."""


def json_number(value: float | str) -> float | str | None:
    """Return ``value``, or None for a number that JSON does not have, such as an infinite gap."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measured_commit(root: Path = ROOT) -> str:
    """Return the commit that is measured, with "+" if the tree's code differs.

    Documents and stored runs are not code. A new file is code if it is Python. Outside git, return
    "unknown".
    """

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changes = git("status", "--porcelain", "--untracked-files=all", "--", ".", *NOT_CODE) or ""
    is_changed = any(
        not line.startswith("??") or line.endswith(".py") for line in changes.splitlines()
    )
    return head + ("+" if is_changed else "")
