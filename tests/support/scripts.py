"""The modules of ``scripts/``, which is no package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """Return a module of ``scripts/``, which may import others from there."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
