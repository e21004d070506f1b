"""The checked-in generated code matches the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generating_again_gives_the_checked_in_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "protos.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
