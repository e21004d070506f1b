"""Outputs of Alpa's runner, as it wrote them with a stand-in for Alpa, and faults put into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

REPORT: Final = "@tessera-report "

CLEAN: Final = (
    "plan of None with ['--lr', '0.25']\n"
    '@tessera-report {"iterations": 1, "loss": 1.0}\n'
    '@tessera-report {"iterations": 2, "loss": 0.25}\n'
    '@tessera-report {"iterations": 3, "loss": 0.015625}\n'
    '@tessera-report {"iterations": 4, "loss": 0.3525390625}\n'
)
"""The output of four iterations, recorded from the runner. A test compares it with the runner's."""

REPLAY: Final = """
import json, os, pathlib, signal, sys
json.load(sys.stdin)["method"]
conversation = json.loads(pathlib.Path(__file__).with_name("conversation.json").read_text())
for part in conversation["parts"]:
    os.write(1, part.encode("latin-1"))
if conversation["end"] == "hangs":
    signal.pause()
if conversation["end"] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(conversation["end"]))
"""
"""A program in place of the runner: it writes a conversation, and ends as that says."""


def write_replay(folder: Path) -> Path:
    """Write the program in place of the runner; return its path."""
    program = folder / "replay.py"
    program.write_text(REPLAY)
    return program


def write_conversation(folder: Path, *parts: str, end: str = "0") -> None:
    """Let the program in ``folder`` write these parts, and end with a status, or as "hangs", "dies"."""
    plain = {"parts": parts, "end": end}
    (folder / "conversation.json").write_text(json.dumps(plain))


def reported(iterations: object, loss: object = 0.5) -> str:
    """Return the line of a report."""
    return f"{REPORT}{json.dumps({'iterations': iterations, 'loss': loss})}\n"
