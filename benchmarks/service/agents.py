"""A real agent in a separate process, which replays jobs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(slots=True, kw_only=True)
class AgentProcess:
    """An agent process for several nodes. Closing it also ends its jobs."""

    address: str
    cluster: str
    nodes: Sequence[tuple[str, str, int]]
    """The name, GPU type and number of GPUs of each node."""
    folder: Path
    options: Sequence[str] = ()
    """Further options of its command, e.g. ``--clock-factor=30``."""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Start the process."""
        self.folder.mkdir(parents=True)
        argv = [sys.executable, "-m", "tessera.service.agent.main", f"--server={self.address}"]
        argv += [f"--cluster={self.cluster}", f"--data-dir={self.folder}", "--stop-on-exit"]
        argv += [f"--node={name}:{gpu_type}:{gpus}" for name, gpu_type, gpus in self.nodes]
        argv += self.options
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out)

    @property
    def log(self) -> Path:
        """Return the path of the agent's log."""
        return self.folder.with_suffix(".log")

    def close(self) -> None:
        """End the agent and all processes that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            _, left = psutil.wait_procs(children, timeout=2)
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
