"""Interpreters with stand-ins of frameworks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def make_python(folder: Path) -> str:
    """Make an interpreter whose only packages are in the folder ``site`` next to it."""
    (folder / "site").mkdir(parents=True)
    python = folder / "python"
    site = shlex.quote(str(folder / "site"))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def install(folder: Path, module: str, version: str = "", text: str = "") -> None:
    """Install a module for the interpreter in ``folder``."""
    package = folder / "site" / module
    package.mkdir()
    (package / "__init__.py").write_text(text)
    if version:
        facts = folder / "site" / f"{module}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n"
        )
