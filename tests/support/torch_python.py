"""An interpreter that has PyTorch, or more packages, for tests that start programs of users."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "torch" / "bin" / "python"
"""The interpreter that ``scripts/torch_env.py`` makes."""


@cache
def _missing_modules(python: str, modules: tuple[str, ...]) -> str:
    """Return the modules that an interpreter lacks, or that it does not start."""
    code = (
        "import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if not u.find_spec(m)])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", code, *modules], capture_output=True, text=True, env=environment
        )
    except OSError as error:
        return f"a program that can be started ({error})"
    return (
        done.stdout.strip() if done.returncode == 0 else f"a working Python ({done.stderr[-200:]})"
    )


def find_torch_python(*modules: str) -> str:
    """Return an interpreter that has PyTorch and ``modules``. Skip the test without one.

    It is the one of TESSERA_TORCH_PYTHON, or this one, or the one that ``scripts/torch_env.py``
    made.
    """
    needed = ("torch", *modules)
    named = os.environ.get("TESSERA_TORCH_PYTHON")
    candidates = [named] if named else [sys.executable, *([str(MADE)] if MADE.exists() else [])]
    missing = ""
    for python in candidates:
        missing = _missing_modules(python, needed)
        if not missing:
            return python
    pytest.skip(
        f"{candidates[-1]} lacks {missing}; run `python scripts/torch_env.py --with-transformers`, or name"
        " an interpreter in TESSERA_TORCH_PYTHON"
    )
