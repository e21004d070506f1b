"""The runtime of profiling tasks.

A profiling task is a process that measures layers on one GPU and reports to the servers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.runtimes import PROFILER, RUNTIMES
from tessera.service.agent.credentials import Credentials, FixedCredentials
from tessera.service.agent.isolation import visible_devices
from tessera.service.agent.runtimes.handle import ProcessHandle
from tessera.service.agent.runtimes.protocol import Member, MemberHandle

TASK_MODULE: Final = "tessera.service.profiling.task"
"""The task's module, which is run and never imported: it needs the estimator, which agents lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerRuntime:
    """A runtime that runs the single-device profiler in ``environment``, on its gang's one GPU."""

    servers: tuple[str, ...]
    cluster: str
    environment: Mapping[str, str]
    lease: str = ""  # the agent's file with the end of its lease; "" without a lease
    credentials: Credentials = field(default_factory=FixedCredentials)

    @property
    def leader_only(self) -> bool:
        """Return that a task has one process, on its one GPU."""
        return True

    def launch(self, member: Member) -> MemberHandle:
        """Start the process. Raises InvalidInput (not one GPU, or not a task), OSError."""
        RUNTIMES[PROFILER].check_command("command", member.gang.command)
        if len(member.gpus) != 1:
            raise InvalidInput("gpus", f"a profiling task has one GPU, not {len(member.gpus)}")
        gang, (gpu,) = member.gang, member.gpus
        spec = {
            "directory": str(member.directory),
            "lease": self.lease,
            "checkpoints": str(member.store),
            "task": gang.command[0],
            "job": gang.job,
            "gpu_type": gang.gpu_type,
            "node": gang.leader,
            "cluster": self.cluster,
            "servers": [self.credentials.address(server) for server in self.servers],
            "channel": {
                name: str(value)
                for name in ("authorities", "certificate", "key")
                if (value := getattr(self.credentials.lasting_settings(), name))
            },
        }
        return ProcessHandle.spawn(
            [sys.executable, "-P", "-m", TASK_MODULE],  # imports nothing from the working directory
            spec,
            member.directory,
            {**self.environment, **member.environment, **visible_devices(self.environment, [gpu])},
        )

    def adopt(self, directory: Path) -> MemberHandle | None:
        """Return the handle of the process that an earlier agent started there, dead or alive.

        If there is no such process, return None.
        """
        return ProcessHandle.adopt(directory)
