"""The runtime of profiling tasks, and the choice of the runtime for each gang.

A profiling task is a process that measures layers on one GPU and reports to the servers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera.formulation.errors import InvalidInput
from tessera.formulation.runtimes import PROFILER, RUNTIMES
from tessera.service.agent.credentials import Credentials, FixedCredentials
from tessera.service.agent.gangs import Gang
from tessera.service.agent.replay import ReplayHandle
from tessera.service.agent.runtime import EMPTY_ENVIRONMENT, GangHandle, Runtime

TASK_MODULE: Final = "tessera.service.profiletask"
"""The task's module, which is run and never imported: it needs the estimator, which agents lack."""

VISIBILITY_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that select the GPUs visible to a process, for NVIDIA's and AMD's libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerRuntime:
    """A runtime that runs the single-device profiler in ``environment``, on its gang's one GPU."""

    servers: tuple[str, ...]
    cluster: str
    environment: Mapping[str, str]
    credentials: Credentials = field(default_factory=FixedCredentials)

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = EMPTY_ENVIRONMENT,
    ) -> GangHandle:
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
            "servers": [self.credentials.address(server) for server in self.servers],
            "channel": {
                name: str(value)
                for name in ("authorities", "certificate", "key")
                if (value := getattr(self.credentials.lasting_settings(), name))
            },
        }
        visible = {name: self._device(name, gpu) for name in VISIBILITY_VARIABLES}
        return ReplayHandle.spawn(
            [sys.executable, "-m", TASK_MODULE],
            spec,
            directory,
            {**self.environment, **environment, **visible},
        )

    def adopt(self, directory: Path) -> GangHandle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive.

        If there is no such process, return None.
        """
        return ReplayHandle.adopt(directory)

    def _device(self, name: str, gpu: int) -> str:
        """Return the value of the variable ``name``: a GPU among those visible to the agent."""
        seen = [text.strip() for text in self.environment.get(name, "").split(",") if text.strip()]
        return seen[gpu] if gpu < len(seen) else str(gpu)


class RuntimeChooser:
    """A runtime that leaves each gang to the runtime that it names, or else to the agent's ``own``.

    All runtimes keep the same files in a gang's directory, so any can adopt what another has
    started.
    """

    def __init__(self, own: Runtime, others: Mapping[str, Runtime]) -> None:
        self._own, self._others = own, others

    def start(
        self,
        gang: Gang,
        directory: Path,
        checkpoints: Path,
        environment: Mapping[str, str] = EMPTY_ENVIRONMENT,
    ) -> GangHandle:
        """Start the gang. Raises InvalidInput (no such runtime, or it cannot run it), OSError."""
        runtime = self._others.get(gang.runtime) if gang.runtime else self._own
        if runtime is None:
            raise InvalidInput(
                "runtime",
                f"this agent has no runtime {gang.runtime!r}; upgrade tessera on its node",
            )
        return runtime.start(gang, directory, checkpoints, environment)

    def adopt(self, directory: Path) -> GangHandle | None:
        """Return the handle of a gang that an earlier agent started there, dead or alive.

        If none was started there, return None.
        """
        return self._own.adopt(directory)
