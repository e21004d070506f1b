"""The name and the version of the installed distribution."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTION: Final = "tessera-scheduler"
"""The name to install. The name `tessera` belongs to another project."""

UNPACKAGED_VERSION: Final = "unpackaged"
"""The version of a source tree that was never installed."""


@cache
def installed_version() -> str:
    """Return the installed version of Tessera."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return UNPACKAGED_VERSION


def install_hint(*extras: str) -> str:
    """Return the command that installs Tessera with ``extras``."""
    names = f"[{','.join(extras)}]" if extras else ""
    return f"pip install '{DISTRIBUTION}{names}'"
