"""``tessera up`` as a process, and clients of its server in this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from tessera.service.cli.main import app
from tests.support.patience import PATIENCE_S
from tests.support.waiting import until

TESSERA: Final = [sys.executable, "-m", "tessera.service.cli.main"]
QUICK: Final = ["--listen", "127.0.0.1:0", "--period", "0", "--agents", "1"]


def run_client(address: str, command: str | Sequence[str]) -> str:
    """Run a client's command against the server, in this process, and return its stdout."""
    words = command.split() if isinstance(command, str) else command
    result = CliRunner().invoke(app, words, env={"TESSERA_SERVER": address})
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return result.stdout


def read_json(address: str, command: str) -> Any:
    """Return the JSON that a client's command prints."""
    return json.loads(run_client(address, f"{command} -o json"))


def wait_for_cells(address: str, model: str, batch: int) -> list[Any]:
    """Return the Cells of a workload of a live job, once the server has derived them."""
    query = f"cells --model {model} --batch {batch}"
    cells: list[Any] = until(
        lambda: read_json(address, query).get("cells"), f"{model}/{batch} has Cells"
    )
    return cells


@contextmanager
def make_home() -> Iterator[Path]:
    """Yield a folder for `up`, which other users can pass through.

    PostgreSQL may still write into it while it is removed.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-up-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@contextmanager
def run_up(
    home: Path,
    *options: str,
    directory: tuple[str, ...] | None = None,
    umask: int = -1,
    **variables: str,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address of a running `tessera up`, and its process.

    ``directory`` holds the options that name the data directory. If it is None, that is ``home``.
    ``variables`` are further variables of its environment.
    """
    directory_words = ("--data-dir", str(home)) if directory is None else directory
    with (home / "messages").open("w") as messages:
        process = subprocess.Popen(
            [*TESSERA, "up", *directory_words, *QUICK, *options],
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            umask=umask,
            env={**os.environ, "TESSERA_HOME": str(home / "home"), **variables},
        )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address), (home / "messages").read_text()
        yield address, process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
