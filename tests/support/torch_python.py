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


FIND_MISSING = """
import importlib.util, sys
def is_missing(module):
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of a package above it
        return True
print(*filter(is_missing, sys.argv[1:]))
"""
"""A program that prints which of the modules that follow its name are missing."""


@cache
def _missing_modules(python: str, modules: tuple[str, ...]) -> str:
    """Return the modules that an interpreter lacks, or the reason why it does not start."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", FIND_MISSING, *modules], capture_output=True, text=True, env=environment
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
        f"{candidates[-1]} lacks {missing}; `python scripts/torch_env.py --with-transformers` makes one with"
        " PyTorch and transformers, and TESSERA_TORCH_PYTHON names one of your own"
    )
