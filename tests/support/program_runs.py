"""Programs of users, started as an agent starts them: in the environment that it promises."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera import progress
from tests.support.patience import PATIENCE_S
from tests.support.waiting import until

PROGRESS_ROOT = Path(progress.__file__).parents[2]
"""The folder from which programs import ``tessera.progress``."""

NOTE_RANK = ("/bin/sh", "-c", 'echo $$ > "$TEST_RANKS/$RANK" && exec "$@"', "rank")
"""A program before each rank's interpreter. It notes the rank's process."""


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class ProgramRun:
    """A generation of a job: its program, in a process group of its own, and the files it writes."""

    def __init__(
        self,
        job: Path,
        generation: int,
        argv: Sequence[str],
        iterations: int,
        *,
        batch: int = 16,
        resume: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = job / f"generation-{generation}"
        self.checkpoints, self.ranks = self.folder / "checkpoints", self.folder / "ranks"
        for folder in (self.checkpoints, self.ranks):
            folder.mkdir(parents=True)
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "PYTHON"))},
            "PYTHONPATH": str(PROGRESS_ROOT),
            "OMP_NUM_THREADS": "1",
            "TEST_RANKS": str(self.ranks),
            "TESSERA_GENERATION": str(generation),
            "TESSERA_NODE_RANK": "0",
            "TESSERA_ITERATIONS": str(iterations),
            "TESSERA_GLOBAL_BATCH": str(batch),
            "TESSERA_JOB_DIR": str(job),
            "TESSERA_CHECKPOINT_DIR": str(self.checkpoints),
            "TESSERA_PROGRESS_FILE": str(self.folder / "progress.json"),
            "TESSERA_CONTROL_FILE": str(self.folder / "control.json"),
            **(environment or {}),
        }
        if resume is not None:
            variables["TESSERA_RESUME_FROM"] = str(resume["path"])
            variables["TESSERA_RESUME_ITERATIONS"] = str(resume["iterations"])
        self._output = self.folder / "output.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                argv, env=variables, stdout=output, stderr=output, cwd=job, start_new_session=True
            )

    def __enter__(self) -> ProgramRun:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """Return what the program has written so far."""
        return self._output.read_text(errors="replace")

    @property
    def progress(self) -> dict[str, Any]:
        """Return the progress that was reported last, or {}. The program must not have ended badly."""
        assert self.process.poll() in (None, 0), self.output
        try:
            value: dict[str, Any] = json.loads((self.folder / "progress.json").read_text())
        except FileNotFoundError:
            return {}
        return value

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint, as an agent does."""
        partial = self.folder / "control.partial"
        partial.write_text(json.dumps({"checkpoint": 1}))
        partial.rename(self.folder / "control.json")

    def stop_ranks(self) -> None:
        """Ask each rank to write a checkpoint and exit."""
        for rank in self._live_ranks():
            os.kill(rank, signal.SIGTERM)

    def _live_ranks(self) -> list[int]:
        """Return the ranks that are alive. torchrun gives each of them a session of its own."""
        own = f"TEST_RANKS={self.ranks}".encode()
        live = []
        for note in self.ranks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):  # dead, or not begun
                rank = int(note.read_text())
                if own in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"):
                    live.append(rank)
        return live

    def stop(self) -> None:
        """Ask the program itself to write a checkpoint and exit."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all processes at once, without a checkpoint."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for rank in self._live_ranks():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        until(lambda: not self._live_ranks(), "the end of all ranks")

    def wait(self) -> None:
        """Wait for the end of the program, which must be a success."""
        assert self.process.wait(PATIENCE_S) == 0, self.output
