"""Make the virtual environment for ``make setup`` and ``make demo``: ``scripts/setup.py EXTRA FOLDER``.

It prints a line for each step with the time since the start. Packages are installed at the versions
of ``requirements/EXTRA.lock``, with uv if it is on PATH, and otherwise with pip. A file whose hash is
not in the lock is refused. Nothing is built but our own two projects, with the locked build tool.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)
SILENCE_S = 20.0
"""Seconds after which a command is reported as still running."""

BEGAN_S = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time since the start."""
    sys.stdout.write(f"[{time.monotonic() - BEGAN_S:4.0f} s] {text}\n")
    sys.stdout.flush()


def run(*command: str) -> None:
    """Run a command, report regularly that it is still running, and exit if it fails."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        while True:
            try:
                status = process.wait(SILENCE_S)
                break
            except subprocess.TimeoutExpired:
                say("  ... still running")
    if status:
        sys.exit(f"error: `{' '.join(command)}` ended with status {status}")


def main(extra: str, folder: str) -> None:
    """Make ``folder`` and install Tessera with ``extra`` in it."""
    if sys.version_info < OLDEST:
        sys.exit(f"error: Tessera needs Python {'.'.join(map(str, OLDEST))} or later")
    python, uv = f"{folder}/bin/python", shutil.which("uv")
    if not (ROOT / python).exists():
        say(f"making {folder} with Python {sys.version.split()[0]}")
        if uv:
            run(uv, "venv", "--quiet", "--python", sys.executable, folder)
        else:
            run(sys.executable, "-m", "venv", folder)
    if uv:
        install = (uv, "pip", "install", "--python", python)
    else:
        pip = ("--disable-pip-version-check", "--progress-bar", "off")
        install = (python, "-m", "pip", "install", *pip)
    lock = f"requirements/{extra}.lock"
    say(f"installing the packages of {lock}, with {'uv' if uv else 'pip'}")
    run(*install, "--require-hashes", "--only-binary", ":all:", "-r", lock)
    say("installing Tessera itself")
    run(*install, "--no-deps", "--no-build-isolation", "-e", "./proto", "-e", ".")
    say("compiling the loops of the solvers, which takes half a minute of one core, but only once")
    run(python, "-m", "tessera.solvers.warm")
    say("done")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/setup.py EXTRA FOLDER")
    main(sys.argv[1], sys.argv[2])
