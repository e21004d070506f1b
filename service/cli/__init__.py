"""The command `tessera`: a client of the API that can also start its servers."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from tessera.formulation.release import install_hint

NEEDED = ("google.rpc", "grpc_status", "rich", "typer", "yaml")
"""Modules that every command of the client imports."""


def run() -> None:
    """Run the command line. If only the agent's part is installed, say what to install."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: `tessera` needs {', '.join(missing)}, which an agent does not need; install them"
            f" with: {install_hint('client')}"
        )
    importlib.import_module("tessera.service.cli.main").main()
