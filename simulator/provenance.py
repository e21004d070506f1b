"""The commit that a reported number comes from, and the conversion of numbers to JSON."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


def json_number(value: float | str) -> float | str | None:
    """Return ``value``, or None for a number that JSON does not have, such as an infinite gap."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def commit() -> str:
    """Return the commit that is measured, with "+" if the tree differs from it.

    Outside git, return "unknown".
    """

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
