"""Runs of the same programs outside of Tessera, in one process, which nothing disturbs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.errors import Unavailable
from tessera.service.agent.process import remove_secrets
from tessera.service.agent.runtimes.programs import copy_client
from tessera.service.cli.demo.train.jobs import DemoJob
from tessera.service.cli.demo.train.proof import Execution, parse_output, read_ledger

LEDGER: Final = "ledger"
LIMIT_S: Final = 900.0
"""The longest time that a run may take."""


@dataclass(frozen=True, slots=True)
class UndisturbedRun:
    """A program that runs at low priority, with a folder of its own."""

    job: DemoJob
    folder: Path
    process: subprocess.Popen[bytes]

    def finish(self) -> list[Execution]:
        """Wait for its end, and return its iterations. Raises Unavailable."""
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{self.job.script} takes too long outside of Tessera") from error
        self.require_success()
        return read_executions(self.job, self.folder, {0: self._output()})

    def require_success(self) -> None:
        """Raise Unavailable, with the end of its output, if the program has failed."""
        if status := self.process.poll():
            raise Unavailable(
                f"{self.job.script} ended with status {status} outside of Tessera:\n"
                f"{self._output()[-2000:]}"
            )

    def _output(self) -> str:
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")


@contextmanager
def run_undisturbed(
    job: DemoJob, command: tuple[str, ...], iterations: int, folder: Path
) -> Iterator[UndisturbedRun]:
    """Run a job's program outside of Tessera until it ends, or until the block does."""
    folder.mkdir(parents=True)
    copy_client(folder / "site")
    inherited = remove_secrets(dict(os.environ))
    environment = {k: v for k, v in inherited.items() if not k.startswith("TESSERA_")} | {
        **job.environment,
        "PYTHONPATH": str(folder / "site"),
        "TESSERA_ITERATIONS": str(iterations),
        "TESSERA_GLOBAL_BATCH": str(job.batch),
        "TESSERA_JOB_DIR": str(folder),
        "TESSERA_CHECKPOINT_DIR": str(folder),
    }
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            ["nice", "-n", "19", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            env=environment,
        )
    try:
        yield UndisturbedRun(job, folder, process)
    finally:
        process.kill()
        process.wait()


def read_executions(job: DemoJob, folder: Path, outputs: dict[int, str]) -> list[Execution]:
    """Return the executions of a job from its ledger, or else from its ``outputs`` by generation."""
    if job.samples:
        return read_ledger(folder / LEDGER)
    return [
        execution
        for generation in sorted(outputs)
        for execution in parse_output(generation, outputs[generation])
    ]
