"""Profiling tasks: a process that measures layers on one GPU and tells the servers; and who runs what."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.runtimes import PROFILER, RUNTIMES
from tessera.service.agent.gangs import Gang
from tessera.service.agent.replay import ReplayHandle
from tessera.service.agent.runtime import NOTHING, Handle, Runtime

MODULE: Final = "tessera.service.profiletask"
"""Run, never imported: it needs the estimator, which agents do without."""

VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Which GPUs a process sees, by the names of NVIDIA's and AMD's libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerRuntime:
    """Runs the single-device profiler in ``environment``, with the one GPU of its gang."""

    servers: tuple[str, ...]
    cluster: str
    environment: Mapping[str, str]

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = NOTHING,
    ) -> Handle:
        """Start the process. Raises InvalidInput (not one GPU, or not a task), OSError."""
        RUNTIMES[PROFILER].check_command("command", gang.command)
        if len(gang.devices) != 1:
            raise InvalidInput("gpus", f"a profiling task has one GPU, not {len(gang.devices)}")
        ((_, gpu),) = gang.devices
        spec = {
            "directory": str(directory),
            "checkpoints": str(checkpoints),
            "task": gang.command[0],
            "job": gang.job,
            "gpu_type": gang.cell.gpu_type,
            "node": gang.leader,
            "cluster": self.cluster,
            "servers": self.servers,
        }
        visible = {name: self._device(name, gpu) for name in VISIBLE}
        return ReplayHandle.spawn(
            [sys.executable, "-m", MODULE],
            spec,
            directory,
            {**self.environment, **environment, **visible},
        )

    def adopt(self, directory: Path) -> Handle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive."""
        return ReplayHandle.adopt(directory)

    def _device(self, name: str, gpu: int) -> str:
        """Return what the variable ``name`` is to say: a GPU among those that the agent itself may see."""
        seen = [text.strip() for text in self.environment.get(name, "").split(",") if text.strip()]
        return seen[gpu] if gpu < len(seen) else str(gpu)


class ByName:
    """Leaves each gang to the runtime that it names, or else to the agent's ``own``.

    All of them keep the same files in a gang's directory, so any can adopt what another has started.
    """

    def __init__(self, own: Runtime, others: Mapping[str, Runtime]) -> None:
        self._own, self._others = own, others

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = NOTHING,
    ) -> Handle:
        """Start it. Raises InvalidInput (no such runtime, or it cannot run it), OSError."""
        runtime = self._others.get(gang.runtime) if gang.runtime else self._own
        if runtime is None:
            raise InvalidInput(
                "runtime",
                f"this agent has no runtime {gang.runtime!r}; upgrade tessera on its node",
            )
        return runtime.start(gang, directory, checkpoints, environment)

    def adopt(self, directory: Path) -> Handle | None:
        """Return what an earlier agent started in ``directory``, dead or alive; None: nothing."""
        return self._own.adopt(directory)
