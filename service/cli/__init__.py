"""The command `tessera`: a client of the API that can also start servers and agents."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from tessera.formulation.base.release import install_hint

NEEDED = ("google.rpc", "grpc_status", "rich", "typer", "yaml")
"""Modules that every command of the client imports."""


def run() -> None:
    """Run the command line, or say what to install if only the agent's part is installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: `tessera` needs {', '.join(missing)}, which are not part of an agent's installation;"
            f" install them with: {install_hint('client')}"
        )
    importlib.import_module("tessera.service.cli.main").main()
