"""The words of the commands that a script really starts: bash with programs that note their words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.patience import PATIENCE_S

STARTED = ("torchrun", "deepspeed", "python", "python3", "accelerate")
"""Launchers, each of which notes its words and does nothing else."""
PREFIXES = ("srun", "numactl", "mpirun")
"""Programs that start what follows their options."""
_NOTE = """#!/bin/sh
for word in "${0##*/}" "$@"; do printf "%s\\0" "$word"; done >> "$NOTES"
printf "\\001\\0" >> "$NOTES"
"""
_PREFIX = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'
_NOTHING = "#!/bin/sh\nexit 0\n"


class Bash:
    """A folder with programs that stand for launchers, in which bash runs scripts."""

    def __init__(self, folder: Path) -> None:
        self._programs = folder / "programs"
        self._programs.mkdir()
        self._folder = folder / "work"
        self._folder.mkdir()
        self._notes = folder / "notes"
        texts = dict.fromkeys(STARTED, _NOTE) | dict.fromkeys(PREFIXES, _PREFIX)
        texts |= dict.fromkeys(("module", "nvidia-smi", "scontrol", "docker", "wandb"), _NOTHING)
        for name, text in texts.items():
            program = self._programs / name
            program.write_text(text)
            program.chmod(0o755)

    def started(self, script: str, **variables: str) -> list[list[str]]:
        """Return the words of each launcher that a script starts, with its name."""
        self._notes.write_bytes(b"")
        environment = {
            "PATH": f"{self._programs}:/usr/bin:/bin",
            "NOTES": str(self._notes),
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
            **variables,
        }
        subprocess.run(
            ["bash", "-c", script],
            env=environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        started: list[list[str]] = [[]]
        for word in self._notes.read_bytes().decode().split("\0")[:-1]:
            if word == "\1":
                started.append([])
            else:
                started[-1].append(word)
        for path in self._folder.iterdir():
            if path.is_file():
                os.unlink(path)
        return started[:-1]
