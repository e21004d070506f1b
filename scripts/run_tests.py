"""Run pytest, and write the processor seconds of all its processes to build/test-cpu.json.

`python scripts/run_tests.py TIER [arguments of pytest]`. The time of servers and other processes that
outlive their parents counts, because this process adopts them (Linux, PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

RECORD: Final = Path(__file__).resolve().parents[1] / "build" / "test-cpu.json"
PR_SET_CHILD_SUBREAPER: Final = 36
LAST_S: Final = 30.0
"""Time in which processes that outlive pytest should end."""


def main() -> None:
    """Run the tests, and end with the status of pytest."""
    tier, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began_s = time.monotonic()
    environment = os.environ | {"TEST_TIER": tier}
    pytest = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=environment)
    code = wait_for(pytest.pid)
    wall_s = time.monotonic() - began_s
    collect_orphans()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[tier] = {"cpu_s": round(cpu_s), "wall_s": round(wall_s)}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record) + "\n")
    sys.stdout.write(f"{cpu_s:.0f} processor seconds in all processes, {wall_s:.0f} s\n")
    sys.exit(code)


def wait_for(pid: int) -> int:
    """Return the exit status of a child. Adopted ones that end before are collected, as init would."""
    while True:
        try:
            child, status = os.wait()
        except KeyboardInterrupt:  # pytest gets it, too, and ends
            continue
        if child == pid:
            return os.waitstatus_to_exitcode(status)


def collect_orphans() -> None:
    """Wait for processes that pytest left, so that their time counts."""
    end_s = time.monotonic() + LAST_S
    while time.monotonic() < end_s:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
