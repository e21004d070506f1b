"""The command `tessera`: a client of the API, and the way to start its servers."""

from __future__ import annotations

import importlib
import importlib.util
import sys


def run() -> None:
    """Run the command line, or say what to install where only the agent's part is."""
    if importlib.util.find_spec("typer") is None:
        sys.exit("error: `tessera` needs more than an agent does; install 'tessera[server]'")
    importlib.import_module("service.cli.main").main()
