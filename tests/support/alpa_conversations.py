"""Outputs of Alpa's runner, as it wrote them with a stand-in for Alpa, and faults put into them."""

from __future__ import annotations

import json
from typing import Final

REPORT: Final = "@tessera-report "

CLEAN: Final = (
    "plan of None with ['--lr', '0.25']\n"
    '@tessera-report {"iterations": 1, "loss": 1.0}\n'
    '@tessera-report {"iterations": 2, "loss": 0.25}\n'
    '@tessera-report {"iterations": 3, "loss": 0.015625}\n'
    '@tessera-report {"iterations": 4, "loss": 0.165985107421875}\n'
)
"""The output of four iterations, recorded from the runner. A test compares it with the runner's."""

REPLAY: Final = """
import json, os, signal, sys
json.load(sys.stdin)["method"]
for part in json.loads(os.environ["PARTS"]):
    os.write(1, part.encode("latin-1"))
end = os.environ["END"]
if end == "hangs":
    signal.pause()
if end == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
"""A program in place of the runner: it writes a conversation, and ends as it is told."""


def replay(*parts: str, end: str = "0") -> dict[str, str]:
    """Return the variables of ``REPLAY`` for these parts of an output, and its end."""
    return {"PARTS": json.dumps(parts), "END": end}


def reported(iterations: object, loss: object = 0.5) -> str:
    """Return the line of a report."""
    return f"{REPORT}{json.dumps({'iterations': iterations, 'loss': loss})}\n"
